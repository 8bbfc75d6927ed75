"""The servers of one engine on several nodes as one, in actors of this process: a call's reference is its future."""

from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from megatron_rl.engines.engine import EngineAddress
from megatron_rl.errors import EngineDiedError, EngineError
from megatron_rl.runtime import engines

WORKER = engines.EngineWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]


class Server:
    """An engine's server: its arguments, whether it runs and whether it does work."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.host, self.url = arguments, f"10.0.0.{1 + arguments.get('node_rank', 0)}", "http://10.0.0.1:80"
        self.meeting_point, self.pid, self.still, self.looked = "10.0.0.1:5000", 1, False, {}

    def start(self, *, timeout_s: float) -> EngineAddress:
        self.check()
        return EngineAddress(self.url, "key", 8, 8, 8, has_tokenizer=False)

    def check(self) -> None:
        self.arguments["check_others"]()

    def is_still(self, **hang: bool) -> bool:
        self.looked = hang
        return self.still

    def stop(self) -> None:
        self.pid = None


class Nodes:
    """An engine on three nodes; `runs` are of the watches on the other ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options, self.servers, self.runs = list[Any](), list[Server](), list[Future[None]]()
        monkeypatch.setattr(engines, "EngineWorker", SimpleNamespace(options=self.actor))
        for name in ("enter_directory", "answer_stack_requests"):
            monkeypatch.setattr(engines, name, lambda *_: None)
        monkeypatch.setattr(engines, "own_gpus", lambda: ("7",))
        ray = SimpleNamespace(get=self.get, wait=lambda refs, num_returns, timeout: (list(wait(refs, timeout).done), None))
        monkeypatch.setattr(engines, "ray", SimpleNamespace(**vars(ray), util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")))
        elsewhere = [({"node": 1}, ("2", "3")), ({"node": 2}, ())]
        self.first = WORKER(self.make_engine, directory=Path(), shared_gpus=("0", "1"), elsewhere=elsewhere)

    def make_engine(self, **arguments: Any) -> Server:
        self.servers.append(Server(**arguments))
        return self.servers[-1]

    def actor(self, **options: Any) -> Any:
        def remote(*arguments: Any, **keywords: Any) -> Any:
            worker = WORKER(*arguments, **keywords)
            calls = {name: SimpleNamespace(remote=partial(self.call, getattr(worker, name))) for name in ("call", "stop")}
            return SimpleNamespace(**calls, run=SimpleNamespace(remote=lambda timeout_s: self.run(timeout_s)))

        self.options.append(options)
        return SimpleNamespace(remote=remote)

    def run(self, timeout_s: float) -> Future[None]:
        self.runs.append(Future())
        return self.runs[-1]

    def call(self, method: Any, *arguments: Any, **keywords: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(method(*arguments, **keywords))
        return done

    def get(self, refs: list[Future[Any]], timeout: float | None = None) -> list[Any]:
        return [ref.result(timeout=5) for ref in refs]

    @property
    def running(self) -> list[bool]:
        return [server.pid is not None for server in self.servers]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


def test_servers_start_at_the_meeting_point_of_the_first(nodes: Nodes) -> None:
    address = nodes.first.start(5.0)
    assert address.hosts == ("10.0.0.1", "10.0.0.2", "10.0.0.3") and len(nodes.runs) == 2
    assert nodes.options == [{"node": 1}, {"node": 2}]
    first, *others = [server.arguments for server in nodes.servers]
    assert "node_rank" not in first and first["gpu_ids"] == ("0", "1")
    assert [(each["node_rank"], each["meeting_point"], each["gpu_ids"]) for each in others] == [
        (1, "10.0.0.1:5000", ("2", "3")),
        (2, "10.0.0.1:5000", ("7",)),
    ]


DEATH = EngineDiedError("the SGLang server at b died (killed by signal 9)")


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        (RayTaskError("run", "traceback", DEATH), r"^the SGLang server at b died \(killed by signal 9\)$"),
        (ActorDiedError(), "a part of the engine at http://10.0.0.1:80 on another node is gone"),
    ],
    ids=["server", "node"],
)
def test_the_death_of_one_server_ends_all(nodes: Nodes, lost: Exception, sentence: str) -> None:
    nodes.first.start(5.0)
    nodes.runs[1].set_exception(lost)
    with pytest.raises(EngineDiedError, match=sentence):
        nodes.first.watch()
    assert nodes.running == [False, False, False]


def test_a_server_that_does_not_start_ends_the_start(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: Future[None] = Future()
    failed.set_exception(RayTaskError("run", "traceback", EngineError("exit status 1")))
    monkeypatch.setattr(nodes, "run", lambda timeout_s: failed)
    with pytest.raises(EngineError, match="exit status 1"):
        nodes.first.start(5.0)


def test_one_server_that_hangs_ends_all(nodes: Nodes) -> None:
    nodes.first.start(5.0)
    nodes.first.end("no step", hangs=True, answers=False, waits=True)
    assert nodes.running == [True, True, True]
    assert [server.looked["answers"] for server in nodes.servers] == [False, True, True]
    nodes.servers[2].still = True
    nodes.first.end("no step", hangs=True, answers=False, waits=True)
    assert nodes.running == [False, False, False]
    with pytest.raises(EngineDiedError, match="was ended: no step"):
        nodes.first.watch()
