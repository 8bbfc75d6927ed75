"""Engines and ranks of a weight sync, as its tests set them up: the engines' HTTP and the ranks are stand-ins."""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.errors import EngineError
from megatron_rl.observe.metrics import metric_values
from megatron_rl.weights.broadcast import BroadcastPlan
from megatron_rl.weights.sync import TRANSPORTS, WeightSync
from megatron_rl.weights.transport import SenderPlan, Sent, Surroundings, WeightSpec, WeightTransport

SPECS = tuple(WeightSpec(f"w{index}", "float32", (2, 3)) for index in range(3))
BUCKETS = (SPECS[:2], SPECS[2:])
SYNC_TIMEOUT_S = 7200.0
SILENT = "/pause_generation"
UPDATES = {"broadcast": "/update_weights_from_distributed", "disk": "/update_weights_from_disk", "ipc": "/update_weights_from_tensor"}


class Server:
    """What a client sends, without the network: (path, body) in order. `served` is the version that it says it serves.

    A `deaf` server keeps serving what it did. One that `fails_at` a path cannot be reached for it once it has answered `fails_after`
    calls of it, or `hangs` there; `dead`, where it is set, is called a moment later. With `once` the next call succeeds.
    """

    def __init__(
        self, log: list[Any], *, deaf: bool = False, fails_at: str = "", fails_after: int = 0, once: bool = False, hangs: bool = False
    ) -> None:
        self.log, self.calls, self.timeouts = log, list[tuple[str, Any]](), set[float]()
        self.served, self._deaf = 0, deaf
        self._fails_at, self._fails_after, self._once, self._hangs = fails_at, fails_after, once, hangs
        self.dead: Callable[[], None] | None = None
        self.update_s, self.lasts_s = 0.0, dict[str, float]()

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float, attempts: int = 1) -> Any:
        self.calls.append((path, body))
        self.log.append((path,))
        self.timeouts.add(timeout_s)
        if path == self._fails_at and sum(called == path for called, _ in self.calls) > self._fails_after:
            await self.fails(path)
        if path in UPDATES.values():
            await asyncio.sleep(self.update_s)
        await asyncio.sleep(self.lasts_s.get(path, 0.0))
        version = (body or {}).get("weight_version")
        self.served = self.served if version is None or self._deaf else int(version)
        return {"weight_version": str(self.served)} if path == "/model_info" else {"success": True}

    async def fails(self, path: str) -> None:
        """As a process that was killed: the connection breaks, and that it has ended is noticed later. Of a machine it does not break."""
        if self._once:
            self._fails_at = ""
        if self.dead is not None:
            asyncio.get_running_loop().call_later(0.02, self.dead)
        if self._hangs:
            await asyncio.sleep(3600)
        raise EngineError(f"cannot be reached for {path}")


class Ranks:
    """Two ranks that are connected at once, and take a moment to send; where the transport wants files or memory they make it."""

    has_died = False

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log
        self.plans: list[Any] = []
        self.send_s, self.gather_s = 0.02, 0.0
        self._thread = ThreadPoolExecutor(1)

    def begin_open_sender(self, plan: SenderPlan) -> list[Future[None]]:
        self.plans.append(plan)
        # Rank 0 of a broadcast waits for engines.
        self._sender = plan.open(self, rank=1 if isinstance(plan, BroadcastPlan) else 0)  # type: ignore[arg-type]
        return [done(), done()]

    def begin_close_sender(self) -> list[Future[None]]:
        self._sender.close()
        self.log.append(("closed",))
        return [done(), done()]

    def begin_send(self, *, version: int, checked: bool) -> list[Future[Sent]]:
        def work() -> Sent:
            time.sleep(self.send_s)
            sent = self._sender.send(version=version, checked=checked)
            self.log.append(("sent",))
            return sent

        return [self._thread.submit(work), done(Sent(0.0, 0.0, {}))]

    def weights(self, *, receivers: object = None) -> Any:
        for number, spec in enumerate(SPECS, start=1):
            time.sleep(self.gather_s)
            yield spec.name, torch.full(spec.shape, float(number))

    def save_hf(self, path: Path, *, max_shard_bytes: int, durable: bool) -> None:
        assert max_shard_bytes == 48 and not durable
        time.sleep(3 * self.gather_s)
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"x" * 72)


def free_address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


def done(result: Any = None) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Run:
    """One run's engines and ranks, and the order in which everything happened."""

    def __init__(self, directory: Path, *servers: dict[str, bool]) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.servers = [Server(self.log, **kind) for kind in servers]
        self.ranks, self.directory = Ranks(self.log), directory

    def client(self, number: int, *, timeout_s: float = SYNC_TIMEOUT_S) -> EngineClient:
        address = EngineAddress(f"http://127.0.1.{number}", "key", 32, 64, 64, has_tokenizer=False)
        client = EngineClient(address, request_timeout_s=5.0, control_timeout_s=timeout_s)
        client._call = self.servers[number].call  # type: ignore[method-assign]
        return client

    def open(
        self,
        name: str,
        *,
        num_members: int | None = None,
        ranks_per_engine: int = 1,
        timeout_s: float = SYNC_TIMEOUT_S,
        check_interval: int = 0,
        deltas: bool = False,
    ) -> WeightSync:
        """A sync of a pool of the first `num_members` engines, all where None."""

        def make_transport(urls: Sequence[str]) -> WeightTransport:
            surroundings = Surroundings(
                manifest=SPECS,
                directory=self.directory / "weights",
                free_address=free_address if name == "ipc" or deltas else lambda: ("10.0.0.1", 1234),
                backend="gloo",
                num_engines=len(urls),
                ranks_per_engine=ranks_per_engine,
                timeout_s=timeout_s,
                bucket_bytes=48,
                ranks_beside={url: (0,) for url in urls},
                deltas=deltas,
            )
            return TRANSPORTS[name](surroundings)

        self.clients = [self.client(number, timeout_s=timeout_s) for number in range(len(self.servers))]
        self.pool = EnginePool(self.clients[:num_members], max_requests=1)
        return WeightSync(make_transport, ranks=self.ranks, pool=self.pool, timeout_s=timeout_s, check_interval=check_interval)

    def sync(self, name: str, *, version: int, timeout_s: float = SYNC_TIMEOUT_S) -> dict[str, float]:
        """Connect and sync once; the log holds what happened during the sync."""

        async def work() -> dict[str, float]:
            weight_sync = self.open(name, timeout_s=timeout_s)
            await weight_sync.connect()
            self.log.clear()
            return metric_values(await weight_sync.run(version=version))

        return asyncio.run(work())


BEGIN, END, RESUME = "/begin_weight_update", "/end_weight_update", "/continue_generation"


def parts_of(server: Server, name: str) -> list[str]:
    """What the engine was told, of a sync."""
    return [path for path, _ in server.calls if path in (SILENT, BEGIN, UPDATES[name], END, RESUME)]


def whole(name: str) -> list[str]:
    """What an engine is told that gets all of a version."""
    update = UPDATES[name]
    return [SILENT, *([update] if name == "disk" else [BEGIN, update, update, END]), RESUME]


def dies(run: Run, number: int) -> None:
    """Let the engine that cannot be reached leave the pool."""
    run.servers[number].dead = lambda: run.pool.leave(run.clients[number], EngineError("killed by signal 9"))
