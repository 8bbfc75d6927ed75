"""Starting Ray on a machine that is too busy for it. A process that sleeps stands for Ray's node."""

import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services
from ray._private.node import Node

from megatron_rl.errors import DeadlineError, WorkerDiedError
from megatron_rl.runtime import ray_reaper, ray_session
from megatron_rl.runtime.ray_session import ray_cluster

NOT_YET = RuntimeError("node info is not available")
Processes = list["subprocess.Popen[bytes]"]


class Rays:
    """Ray on this machine: its node is there when it was asked for `late` times, `node` is the command of its process."""

    def __init__(self, *, late: int = 0, node: tuple[str, ...] = ("sleep", "600")) -> None:
        self.late, self.node = late, node
        self.started: Processes = []
        self.arguments: dict[str, Any] = {}

    def get_node(self, gcs_address: str, node_id: str) -> dict[str, str]:
        if self.late:
            self.late -= 1
            raise NOT_YET
        return {"address": gcs_address, "id": node_id}

    def init(self, **arguments: Any) -> None:
        """As `Node.__init__` does it after its 30 s: the first answer counts."""
        self.arguments = arguments
        self.started.append(subprocess.Popen(self.node))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.node[0] == "true":
            os.waitid(os.P_PID, self.started[0].pid, os.WEXITED | os.WNOWAIT)
        try:
            assert services.get_node("address", "id") == {"address": "address", "id": "id"}
        except RuntimeError as error:
            raise Exception("The current node timed out during startup.") from error


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Rays]]:
    """`machine(late=3)` replaces Ray."""

    def make(**options: Any) -> Rays:
        rays = Rays(**options)
        monkeypatch.setattr(ray, "init", rays.init)
        monkeypatch.setattr(services, "get_node", rays.get_node)
        return rays

    (tmp_path / "session" / "logs").mkdir(parents=True)
    node = SimpleNamespace(get_session_dir_path=lambda: str(tmp_path / "session"))
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_session, "RAY_STOP_S", 0.1)
    monkeypatch.setattr(ray_session, "POLL_S", 0.001)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield make
    signal.signal(signal.SIGTERM, before)


def test_a_node_that_comes_late_is_waited_for(machine: Callable[..., Rays]) -> None:
    rays = machine(late=200)
    with ray_cluster(address=None, num_processes=1):
        assert [node.poll() is None for node in rays.started] == [True]
        assert services.get_node == rays.get_node
    assert [node.poll() is None for node in rays.started] == [False]


def test_a_node_that_never_comes_is_one_sentence(machine: Callable[..., Rays], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "RAY_START_S", 0.05)
    rays = machine(late=10**9)
    sentence = r"did not come up within 0 s; the machine has a load of \d+ on \d+ CPUs"
    with pytest.raises(DeadlineError, match=sentence), ray_cluster(address=None, num_processes=1):
        raise AssertionError("the block runs without Ray")
    assert [node.poll() is None for node in rays.started] == [False]
    assert services.get_node == rays.get_node


def test_a_node_whose_process_ended_is_not_waited_for(machine: Callable[..., Rays], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    machine(late=10**9, node=("true",))
    told = f"Ray did not start: true ended; see the logs below {get_default_ray_temp_dir()}/session_latest"
    with pytest.raises(WorkerDiedError, match=told), ray_cluster(address=None, num_processes=1):
        raise AssertionError("the block runs without Ray")


def test_a_local_ray_opens_no_dashboard_and_joins_nobody(machine: Callable[..., Rays]) -> None:
    rays = machine()
    with ray_cluster(address=None, num_processes=1000):
        pass
    assert rays.arguments["include_dashboard"] is False
    assert rays.arguments["address"] == "local"
    assert rays.arguments["num_cpus"] == 1000


def test_signals_stay_with_the_handlers_of_this_process(machine: Callable[..., Rays]) -> None:
    """Ray's core prints C++ stacks at SIGTERM and aborts."""
    machine()
    before = signal.getsignal(signal.SIGTERM)
    with ray_cluster(address=None, num_processes=1):
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_session_belongs_to_this_process_while_it_lasts(machine: Callable[..., Rays], tmp_path: Path) -> None:
    machine()
    with ray_cluster(address=None, num_processes=1):
        (noted,) = tmp_path.glob("megatron-rl-*/elsewhere.json")
        assert str(tmp_path / "session") in noted.read_text()
    assert not list(tmp_path.glob("megatron-rl-*"))


def test_a_reaper_is_there_from_before_ray_to_its_end(machine: Callable[..., Rays], monkeypatch: pytest.MonkeyPatch) -> None:
    rays, during = machine(), []

    def reapers() -> list[psutil.Process]:
        children = psutil.Process().children()
        # A process that has just been started has no command line for a moment.
        while any(child.status() != psutil.STATUS_ZOMBIE and not child.cmdline() for child in children):
            time.sleep(0.01)
        return [child for child in children if ray_reaper.__file__ in child.cmdline()]

    def init(**arguments: Any) -> None:
        during.append(reapers())
        rays.init(**arguments)

    monkeypatch.setattr(ray, "init", init)
    with ray_cluster(address=None, num_processes=1):
        during.append(reapers())
    assert during[0] == during[1] and len(during[0]) == 1 and reapers() == []
    monkeypatch.setattr(ray, "init", lambda **arguments: during.append(reapers()))
    with ray_cluster(address="10.0.0.1:6379", num_processes=1):
        pass
    assert during[2] == []


def ignored_signals(process: psutil.Process) -> int:
    """A bit for each, of proc(5)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))


def test_what_is_left_of_ray_ends_when_its_driver_is_killed_and_nothing_else(tmp_path: Path) -> None:
    """Also when the driver was asked to end before, with every process of its job: it may take long to write its checkpoint."""
    start = f"""
import os, subprocess, sys, time
def has_open(place, mode):
    os.makedirs(place, exist_ok=True)
    nap = f"import time; log = open({{place + '/x.out'!r}}, {{mode!r}}); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", nap]).pid
reaper = subprocess.Popen([sys.executable, "-I", "-S", {ray_reaper.__file__!r}, str(os.getpid()), "10"])
mine = f"{tmp_path}/session_2026_{{os.getpid()}}"
agent = has_open(f"{{mine}}/logs", "a")
while not os.path.exists(f"{{mine}}/logs/x.out"):
    time.sleep(0.01)
print(reaper.pid, agent, has_open(f"{{mine}}/logs", "r"), has_open(f"{{mine}}7/logs", "a"), has_open(f"{{mine}}/sockets", "a"), flush=True)
time.sleep(60)
"""
    driver = subprocess.Popen([sys.executable, "-I", "-S", "-c", start], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    reaper, agent, *others = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    try:
        while not ignored_signals(reaper) & 1 << signal.SIGTERM - 1 or not all(other.open_files() for other in others):
            time.sleep(0.01)
        reaper.terminate()
        driver.kill()
        driver.wait()
        assert psutil.wait_procs([reaper, agent], timeout=20)[1] == []
        assert len(others) == 3 and all(other.is_running() for other in others)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        for process in (reaper, agent, *others):
            if process.is_running():
                process.kill()


def test_a_process_that_closes_a_file_at_this_moment_is_found_nevertheless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "session_1_123456" / "logs").mkdir(parents=True)
    readlink = os.readlink

    def first_is_closed(path: str) -> str:
        if path == f"/proc/{os.getpid()}/fd/0":
            raise FileNotFoundError(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", first_is_closed)
    with (tmp_path / "session_1_123456" / "logs" / "raylet.out").open("w"):
        assert ray_reaper.session_processes(123456) == [os.getpid()]
    assert ray_reaper.session_processes(123456) == []


def test_processes_of_another_container_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There another driver may have the same id."""
    (tmp_path / "session_1_123456" / "logs").mkdir(parents=True)
    readlink = os.readlink

    def elsewhere(path: str) -> str:
        return "pid:[1]" if path == f"/proc/{os.getpid()}/ns/pid" else readlink(path)

    with (tmp_path / "session_1_123456" / "logs" / "raylet.out").open("w"):
        assert ray_reaper.session_processes(123456) == [os.getpid()]
        monkeypatch.setattr(os, "readlink", elsewhere)
        assert ray_reaper.session_processes(123456) == []


def test_ray_still_names_its_session_by_its_driver() -> None:
    """When this fails, look how `ray_reaper` finds the processes of a session."""
    assert 'f"session_{date_str}_{os.getpid()}"' in inspect.getsource(Node)


def test_ray_still_gives_its_node_thirty_seconds_that_nothing_changes() -> None:
    """When this fails, look whether Ray's deadline can be set now, and whether it still asks `services.get_node`."""
    source = inspect.getsource(Node.__init__)
    assert "raylet_start_wait_time_s = 30" in source
    assert "ray._private.services.get_node(" in source
