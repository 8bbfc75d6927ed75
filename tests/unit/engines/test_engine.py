"""How an engine is waited for. A small HTTP server stands for SGLang's: it takes the same orders on standard input."""

import json
import socket
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_rl.engines import engine as module
from megatron_rl.engines.engine import Engine
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.errors import DeadlineError, EngineDiedError, EngineError, UserError
from megatron_rl.system.versions import installed_version

SERVER = '''#!{python} -IS
"""Ready at once; /server_info fails `failures` times and then takes `seconds`."""
import http.server, json, os, socketserver, sys, time
failures, seconds = {failures}, {seconds}
arguments = json.load(sys.stdin)
answers = {{"/ready": {{}}, "/v1/models": {{"data": [{{"max_model_len": 64}}]}}, "/server_info": {{"max_total_num_tokens": 512}}}}
answers["/health"] = {{name: arguments.get(name) for name in ("node_rank", "dist_init_addr")}}

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global failures
        slow = self.path == "/server_info"
        if self.path == "/exit" or failures < 0:
            os._exit(3)
        if slow and failures:
            failures -= 1
            self.send_error(503)
            return
        time.sleep(seconds if slow else 0)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answers[self.path]).encode())

# Not HTTPServer: that one looks up the name of its address.
socketserver.ThreadingTCPServer((arguments["host"], arguments["port"]), Handler).serve_forever()
'''


def arguments_of(model: Path, device_kind: str) -> dict[str, object]:
    (model / "config.json").write_text(json.dumps({"vocab_size": 32}))
    return server_arguments({}, model_path=model, device_kind=device_kind, dtype="float32", seed=0)


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    made, python = list[Engine](), sys.executable

    def make(*, failures: int = 0, seconds: float = 0.0, nnodes: int = 1, **options: Any) -> Engine:
        program = tmp_path / "server"
        program.write_text(SERVER.format(python=python, failures=failures, seconds=seconds))
        program.chmod(0o755)
        monkeypatch.setattr(module.sys, "executable", str(program))
        made.append(Engine(arguments_of(tmp_path, "cpu") | {"nnodes": nnodes}, log_path=tmp_path / "log", **options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0.0), (2, 0.0), (0, 0.5)], ids=["at once", "after failures", "slowly"])
def test_a_ready_engine_has_the_rest_of_its_start_to_describe(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, failures: int, seconds: float
) -> None:
    monkeypatch.setattr(module, "ENGINE_READY_S", 0.2)
    address = make_engine(failures=failures, seconds=seconds).start()
    assert (address.context_length, address.max_total_tokens, address.vocab_size) == (64, 512, 32)


def test_servers_of_an_engine_meet_at_its_first_node(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    assert make_engine().meeting_point is None
    lost: list[EngineError] = []

    def check_others() -> None:
        if lost:
            raise lost[0]

    first = make_engine(nnodes=2, check_others=check_others)
    assert first.meeting_point is not None and first.meeting_point.startswith("127.0.0.1:") and first.meeting_point not in first.url
    other = make_engine(nnodes=2, node_rank=1, meeting_point=first.meeting_point)
    other.follow()
    with urllib.request.urlopen(f"{other.url}/health") as response:
        assert json.loads(response.read()) == {"node_rank": 1, "dist_init_addr": first.meeting_point}
    first.start()
    assert {path.name for path in tmp_path.glob("log*")} == {"log", "log-node-1"}
    first.check()
    lost.append(EngineError("the other one"))
    with pytest.raises(EngineError, match="the other one"):
        first.check()


def test_an_engine_without_description_stops_at_the_deadline(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(failures=10**9)
    with pytest.raises(DeadlineError, match=r"does not answer /\w+ after 1 s \(model\.deadline_s\)"):
        engine.start(timeout_s=1.0)
    with pytest.raises(EngineError, match="died"):
        engine.check()


@pytest.mark.parametrize(("end", "told"), [("kill", "killed by signal 9"), ("/exit", "exit status 3")])
def test_a_server_that_ends_in_a_run_is_not_one_that_failed(make_engine: Callable[..., Engine], end: str, told: str) -> None:
    """The run goes on from its checkpoint; one that fails to start would do so again."""
    engine = make_engine()
    engine.start()
    assert engine._process is not None
    if end == "kill":
        engine._process.kill()
    else:
        assert engine._get(end, timeout_s=10) is None
    engine._process.wait(timeout=10)
    with pytest.raises(EngineDiedError, match=told):
        engine.check()


def test_a_server_that_fails_to_start_is_not_started_again(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(EngineError, match="exit status 3") as caught:
        make_engine(failures=-1).start()
    assert not isinstance(caught.value, EngineDiedError)


def environment_of(tmp_path: Path, *, device_kind: str, gpus: tuple[str, ...] = ()) -> dict[str, str]:
    return Engine(arguments_of(tmp_path, device_kind), log_path=tmp_path / "log", gpu_ids=gpus)._environment()


def test_an_engine_does_not_get_the_ranks_memory_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With expandable segments SGLang's memory saver gives nothing back, with a warning only."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    environment = environment_of(tmp_path, device_kind="cpu")
    assert not [name for name in environment if name.endswith("ALLOC_CONF")]
    assert environment["SOMETHING_ELSE"] == "1" and "NCCL_NVLS_ENABLE" not in environment


def test_no_port_is_drawn_twice_before_its_server_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers import for half a minute, in which another process of the node draws, too."""
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    drawn = iter([5, 5, 6, 5])
    monkeypatch.setattr(module.secrets, "randbelow", lambda limit: next(drawn))
    first, second = (Engine({"model_path": tmp_path}, log_path=tmp_path / "log") for _ in range(2))
    assert [engine.url.rpartition(":")[2] for engine in (first, second)] == [str(module.FIRST_PORT + number) for number in (5, 6)]
    first.stop()
    assert module.free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX)) == module.FIRST_PORT + 5


def test_an_engine_refuses_variables_that_change_its_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody checked the settings before: with this one log-probs would be those before the temperature."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    with pytest.raises(UserError, match="the environment has SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        environment_of(tmp_path, device_kind="cuda")


def test_an_engine_finds_programs_beside_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing activates the environment: SGLang runs ninja from PATH, and its memory saver loads libcudart from the loader's path."""
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    assert environment_of(tmp_path, device_kind="cpu")["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment_of(tmp_path, device_kind="cpu")["LD_LIBRARY_PATH"] == "/own"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    libraries = tmp_path / "purelib" / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    environment = environment_of(tmp_path, device_kind="cuda")
    assert (environment["PATH"].split(":")[1:], environment["LD_LIBRARY_PATH"]) == (["/usr/bin"], f"/own:{libraries}")


@pytest.mark.skipif(installed_version("torch-memory-saver") is None, reason="a part of the GPU stack")
def test_the_loader_finds_libcudart_for_an_engine(tmp_path: Path) -> None:
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcudart.so.13')"]
    assert subprocess.run(load, env=environment_of(tmp_path, device_kind="cuda"), check=False, timeout=60).returncode == 0


def test_an_engine_sets_up_nccl_as_ranks_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    environment = environment_of(tmp_path, device_kind="cuda", gpus=("GPU-8f2c", "GPU-11aa"))
    assert (environment["NCCL_CUMEM_ENABLE"], environment["NCCL_NVLS_ENABLE"]) == ("0", "1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-8f2c,GPU-11aa"
    assert environment["SGLANG_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("answers", "waits", "stopped", "busy_s", "expected"),
    [
        # The server, its scheduler and its detokenizer, which has nothing to do between answers.
        (True, False, (), {1: 0.0, 2: 0.2, 3: 0.0}, False),
        (True, False, (), {1: 9.0, 2: 0.05, 3: 9.0}, True),
        (False, False, (), {1: 0.05, 2: 9.0, 3: 9.0}, True),
        (False, False, (), {1: 0.2, 2: 0.2, 3: 0.0}, False),
        # A compiler works for the scheduler that waits for it, and not for a server that answers nothing.
        (True, False, (), {1: 0.0, 2: 0.0, 3: 0.0, 4: 9.0}, False),
        (True, False, (), {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.05}, True),
        (False, False, (), {1: 0.0, 2: 0.0, 3: 0.0, 4: 9.0}, True),
        # One has ended that nobody reaps.
        (True, False, (), {1: 0.0, 2: 0.0, 3: 0.0, 4: -9.0}, False),
        # One that waits for the ranks does no work, either.
        (True, True, (), {1: 9.0, 2: 0.0, 3: 9.0}, False),
        (True, True, (2,), {1: 9.0, 2: 0.0, 3: 9.0}, True),
        (True, True, (2,), {1: 9.0, 2: 0.2, 3: 9.0}, False),
        (True, True, (1, 3), {1: 0.0, 2: 0.0, 3: 0.0}, False),
        (False, True, (1,), {1: 0.0, 2: 0.0, 3: 0.0}, True),
    ],
)
def test_a_server_is_still_when_who_has_to_work_does_not(
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    answers: bool,
    waits: bool,
    stopped: tuple[int, ...],
    busy_s: dict[int, float],
    expected: bool,
) -> None:
    compiles, busy_s = 4 in busy_s, {4: 0.0, **busy_s}
    names, before_s = {1: "python", 2: "sglang::scheduler_TP0", 3: "sglang::detokenizer", 4: "ninja"}, dict.fromkeys(busy_s, 100.0)
    passed = [False]

    def process(pid: int) -> SimpleNamespace:
        times = lambda: (before_s[pid] + passed[0] * busy_s[pid] / 2, passed[0] * busy_s[pid] / 2, 7.0, 7.0)  # noqa: E731
        status = psutil.STATUS_STOPPED if pid in stopped else psutil.STATUS_SLEEPING
        children = {1: [2, 3, 4]}.get(pid, []) if pid != 2 else [4] * compiles
        return SimpleNamespace(
            pid=pid, name=lambda: names[pid], cpu_times=times, status=lambda: status, children=lambda recursive: [*map(process, children)]
        )

    engine = make_engine()
    monkeypatch.setattr(module, "psutil", SimpleNamespace(**{**vars(psutil), "Process": process}))
    monkeypatch.setattr(module, "_group_members", lambda group: sorted(names))
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: passed.__setitem__(0, seconds == 10.0)))
    monkeypatch.setattr(Engine, "pid", 1)
    assert engine.is_still(answers=answers, waits=waits) == expected
