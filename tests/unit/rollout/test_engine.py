"""How an engine is waited for. A small HTTP server stands for SGLang's: it takes the same orders on standard input."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.rollout import engine as module
from megatron_rl.rollout.engine import Engine

SERVER = '''#!{python} -IS
"""Ready at once; /server_info fails `failures` times and then takes `seconds`. Ends with its standard input, as the real one."""
import http.server, json, os, socketserver, sys, threading, time
failures, seconds = {failures}, {seconds}
arguments = json.loads(sys.stdin.readline())["arguments"]
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
answers = {{"/ready": {{}}, "/v1/models": {{"data": [{{"max_model_len": 64}}]}}, "/server_info": {{"max_total_num_tokens": 512}}}}

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global failures
        slow = self.path == "/server_info"
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


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32}))
    made: list[Engine] = []

    def make(*, failures: int = 0, seconds: float = 0.0, startup_timeout_s: float = 60.0) -> Engine:
        program = tmp_path / "server"
        program.write_text(SERVER.format(python=sys.executable, failures=failures, seconds=seconds))
        program.chmod(0o755)
        monkeypatch.setattr(module.sys, "executable", str(program))
        settings = RolloutSettings(startup_timeout_s=startup_timeout_s)
        made.append(Engine(tmp_path, settings=settings, device_kind="cpu", dtype="float32", seed=0, log_path=tmp_path / "log"))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0.0), (2, 0.0), (0, 0.5)], ids=["at once", "after failures", "slowly"])
def test_a_ready_engine_has_the_rest_of_its_start_to_describe_itself(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, failures: int, seconds: float
) -> None:
    monkeypatch.setattr(module, "READY_REQUEST_S", 0.2)
    address = make_engine(failures=failures, seconds=seconds).start()
    assert (address.context_length, address.max_total_tokens, address.vocab_size) == (64, 512, 32)


def test_an_engine_that_never_describes_itself_is_stopped_at_the_deadline(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(failures=10**9, startup_timeout_s=1.0)
    with pytest.raises(DeadlineError, match=r"does not answer /\w+ after 1 s \(rollout\.startup_timeout_s\)"):
        engine.start()
    with pytest.raises(EngineError, match="died"):
        engine.check()
