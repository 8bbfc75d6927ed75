"""Starting Ray on a machine that is too busy for it. A process that sleeps stands for Ray's node."""

import ctypes
import inspect
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private import node, services
from ray._private.node import Node

from megatron_rl.config.settings import RuntimeSettings
from megatron_rl.engines.engine import free_port
from megatron_rl.errors import DeadlineError, UserError, WorkerDiedError
from megatron_rl.runtime import ray_session
from megatron_rl.runtime.ray_session import ray_cluster

NOT_YET = RuntimeError("node info is not available")
Processes = list["subprocess.Popen[bytes]"]


class Rays:
    """Ray on this machine: its node is there when it was asked for `late` times, `node` is the command of its process."""

    def __init__(self, *, late: int = 0, node: tuple[str, ...] = ("sleep", "600")) -> None:
        self.late, self.node = late, node
        self.started: Processes = []
        self.arguments: dict[str, Any] = {}
        self.tokens: list[str] = []
        # What listens where Ray's control service does.
        self.control = socket.create_server(("127.0.0.1", 0))

    def get_node(self, gcs_address: str, node_id: str) -> dict[str, str]:
        if self.late:
            self.late -= 1
            raise NOT_YET
        return {"address": gcs_address, "id": node_id}

    def init(self, **arguments: Any) -> None:
        """As `Node.__init__` does it after its 30 s: the first answer counts."""
        self.arguments, self.tokens = arguments, [*self.tokens, os.environ["RAY_AUTH_TOKEN"]]
        self.started.append(subprocess.Popen(self.node))
        # As Ray's core does it, behind Python's back.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN.value))
        if self.node[0] == "true":
            os.waitid(os.P_PID, self.started[0].pid, os.WEXITED | os.WNOWAIT)
        try:
            assert services.get_node("address", "id") == {"address": "address", "id": "id"}
        except RuntimeError as error:
            raise Exception("The current node timed out during startup.") from error


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Rays]]:
    """`machine(late=3)` replaces Ray."""

    made: list[Rays] = []

    def make(**options: Any) -> Rays:
        rays = Rays(**options)
        monkeypatch.setattr(ray, "init", rays.init)
        monkeypatch.setattr(services, "get_node", rays.get_node)
        address = f"127.0.0.1:{rays.control.getsockname()[1]}"
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        made.append(rays)
        return rays

    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_session, "POLL_S", 0.001)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield make
    for rays in made:
        rays.control.close()


def test_a_node_that_comes_late_is_waited_for(machine: Callable[..., Rays]) -> None:
    rays = machine(late=200)
    with ray_cluster(address=None, num_processes=1, logs=Path("logs")):
        assert [node.poll() is None for node in rays.started] == [True]
        assert services.get_node == rays.get_node
    assert [node.poll() is None for node in rays.started] == [False]


def test_a_node_that_never_comes_is_one_sentence(machine: Callable[..., Rays], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "RAY_START_S", 0.05)
    rays = machine(late=10**9)
    sentence = r"did not come up within 0 s; the machine has a load of \d+ on \d+ CPUs"
    with pytest.raises(DeadlineError, match=sentence), ray_cluster(address=None, num_processes=1, logs=Path("logs")):
        raise AssertionError("the block runs without Ray")
    assert [node.poll() is None for node in rays.started] == [False]
    assert services.get_node == rays.get_node


def test_a_node_whose_process_ended_is_not_waited_for(machine: Callable[..., Rays]) -> None:
    machine(late=10**9, node=("true",))
    with (
        pytest.raises(WorkerDiedError, match="Ray did not start: true ended; see its logs in logs/ray"),
        ray_cluster(address=None, num_processes=1, logs=Path("logs")),
    ):
        raise AssertionError("the block runs without Ray")


def test_a_local_ray_opens_no_dashboard_and_joins_nobody(machine: Callable[..., Rays]) -> None:
    rays = machine()
    with ray_cluster(address=None, num_processes=1000, logs=Path("logs")):
        pass
    assert rays.arguments["include_dashboard"] is False
    assert rays.arguments["address"] == "local"
    assert rays.arguments["num_cpus"] == 1000


def test_signals_stay_with_the_handlers_of_this_process(machine: Callable[..., Rays]) -> None:
    """Ray's core prints C++ stacks at SIGTERM and aborts."""
    machine()
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with ray_cluster(address=None, num_processes=1, logs=Path("logs")):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


def blocked_signals(process: psutil.Process) -> int:
    """Return a bit for each signal that a process blocks (proc(5))."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))


def test_signals_to_a_whole_job_do_not_reach_ray(machine: Callable[..., Rays]) -> None:
    """This process ends Ray, when its checkpoint is there. It hears the signals itself."""
    rays, bits = machine(), sum(1 << number - 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    with ray_cluster(address=None, num_processes=1, logs=Path("logs")):
        assert blocked_signals(psutil.Process(rays.started[0].pid)) & bits == bits
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def test_ray_works_in_a_directory_that_nobody_else_can_enter(machine: Callable[..., Rays], tmp_path: Path) -> None:
    rays = machine()
    with ray_cluster(address=None, num_processes=1, logs=tmp_path / "logs"):
        directory = Path(rays.arguments["_temp_dir"])
        assert directory.stat().st_mode & 0o777 == 0o700
        assert len(f"{directory}{ray_session.LONGEST_SOCKET}") <= 107
        (directory / "session_latest" / "logs").mkdir(parents=True)
    assert not directory.exists() and not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("error", "kept"), [(RuntimeError("a rank died"), True), (SystemExit(128 + signal.SIGTERM), False)])
def test_the_logs_of_ray_are_kept_when_a_run_failed(machine: Callable[..., Rays], tmp_path: Path, error: BaseException, kept: bool) -> None:
    rays, logs = machine(), tmp_path / "run" / "logs" / "ray"
    with pytest.raises(type(error)), ray_cluster(address=None, num_processes=1, logs=logs):
        directory = Path(rays.arguments["_temp_dir"])
        (directory / "session_latest" / "logs").mkdir(parents=True)
        (directory / "session_latest" / "logs" / "raylet.out").write_text("why")
        raise error
    assert (logs / "raylet.out").exists() == kept and not directory.exists()


@pytest.mark.parametrize("address", ["{free}", "localhost:{port}"])
def test_an_address_where_nothing_listens_is_one_sentence(address: str) -> None:
    port = free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX))
    given = address.format(free=f"127.0.0.1:{port}", port=port)
    with pytest.raises(UserError, match=rf"runtime\.ray_address is {given}.*Connection refused.*ray start --head"):
        ray_session.check_answers(given)


def test_an_address_that_is_no_name_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"runtime\.ray_address is 10\.0\.\.1:6379, but nothing answers there .*label empty or too long"):
        ray_session.check_answers("10.0..1:6379")


def test_a_join_that_is_not_answered_can_be_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for 60 s whatever listens there, and no signal reaches the thread that waits."""
    asked, end, joins = threading.Event(), threading.Event(), list[float | None]()

    def never(**_: object) -> None:
        asked.set()
        end.wait()
        raise ConnectionError("no Ray")

    monkeypatch.setattr(ray, "init", never)
    monkeypatch.setattr(ray_session, "wait", lambda futures, timeout: asked.wait() and _leave())
    monkeypatch.setattr(ray_session._Session, "join", lambda self, timeout=None: joins.append(timeout))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(SystemExit), ray_cluster(address=address, num_processes=1, logs=Path("logs")):
            raise AssertionError("the block runs without Ray")
        end.set()
    assert joins == [], "nothing is waited for"


def _leave() -> None:
    raise SystemExit(128 + signal.SIGTERM)


def test_a_control_service_that_is_gone_ends_the_run(machine: Callable[..., Rays], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself aborts the driver, after 60 s."""
    monkeypatch.setattr(ray_session, "CONTROL_POLL_S", 0.01)
    monkeypatch.setattr(ray_session, "RAY_SILENT_S", 0.1)
    rays = machine()
    with ray_cluster(address=None, num_processes=1, logs=Path("logs")) as lost:
        time.sleep(0.5)
        assert not lost.done()
        rays.control.close()
        with pytest.raises(WorkerDiedError, match=r"Ray's control service at 127\.0\.0\.1:.* is gone"):
            lost.result(timeout=20)


def test_a_local_ray_stays_on_loopback_where_a_plug_in_imported_it(machine: Callable[..., Rays], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", True)
    machine()
    with ray_cluster(address=None, num_processes=1, logs=Path("logs")):
        assert ray.util.get_node_ip_address() == "127.0.0.1"


@pytest.mark.parametrize("given", [None, "of the user"])
def test_ray_alone_has_the_token(machine: Callable[..., Rays], monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """Reward workers start before Ray, async agents are threads of this process; Ray reads its token once in a process."""
    rays = machine()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", given)
    ray_session.prepare_environment(RuntimeSettings())
    for _ in range(2):
        assert os.environ.get("RAY_AUTH_TOKEN") == given
        with ray_cluster(address=None, num_processes=1, logs=Path("logs")):
            assert os.environ.get("RAY_AUTH_TOKEN") == given
    first, second = rays.tokens
    assert first == second and (first == given or (given is None and len(first) >= 32))


def test_ray_reads_the_deadlines_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also 300 s without its control service, in which a checkpoint in progress is written; Ray's own are 60."""
    monkeypatch.setattr(os, "environ", {})
    ray_session.prepare_environment(RuntimeSettings())
    given = {name for name, value in os.environ.items() if value == "300"}
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" in given and len(given) == 3
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    readers = Path(ray._raylet.__file__).read_bytes() + inspect.getsource(node).encode()
    assert [name for name in given if name.encode() not in readers] == []


def test_ray_still_gives_its_node_thirty_fixed_seconds() -> None:
    """When this fails, look whether Ray's deadline can be set now, and whether it still asks `services.get_node`."""
    source = inspect.getsource(Node.__init__)
    assert "raylet_start_wait_time_s = 30" in source
    assert "ray._private.services.get_node(" in source
