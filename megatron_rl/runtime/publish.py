"""Weights from the trainer to the engines, versioned: pause, move, resume, then ask every engine what it serves now."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_rl.errors import EngineError
from megatron_rl.observe.metrics import Last, Metric, Sum
from megatron_rl.rollout.client import EngineClient
from megatron_rl.runtime.background import BackgroundLoop
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.weights.broadcast import BroadcastGroup
from megatron_rl.weights.bucket import make_buckets

GROUP_NAME = "weights"


class Publisher(Protocol):
    """A way for weights to reach the engines."""

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Give every engine the trainer's current weights as `version`. Raises when one of them does not serve it afterwards."""


class NoPublisher:
    """Supervised training: there is nobody to publish to."""

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Do nothing."""
        return {}


async def _check_versions(clients: Sequence[EngineClient], *, version: int) -> None:
    served = await asyncio.gather(*(client.weight_version() for client in clients))
    for client, got in zip(clients, served, strict=True):
        if got != version:
            raise EngineError(f"the engine at {client.address.url} serves weights {got} after a sync, needs {version}; see its log")


class BroadcastPublisher:
    """Through a process group of trainer rank 0 and all engine ranks."""

    def __init__(
        self,
        *,
        trainers: TrainerGroup,
        clients: Sequence[EngineClient],
        background: BackgroundLoop,
        watchdog: Watchdog,
        backend: str,
        ranks_per_engine: int,
        timeout_s: float,
    ) -> None:
        self._trainers, self._clients, self._background, self._watchdog = trainers, clients, background, watchdog
        self._timeout_s = timeout_s
        self._buckets = make_buckets(trainers.manifest())
        address, port = trainers.free_address()
        self._group = BroadcastGroup(
            address=address, port=port, world_size=1 + len(clients) * ranks_per_engine, name=GROUP_NAME, backend=backend
        )
        joining = background.submit(self._join(ranks_per_engine))
        sending = [ref.future() for ref in trainers.begin_join(self._group, timeout_s=timeout_s)]
        watchdog.wait([joining, *sending], name="joining trainer and engines for weight syncs", timeout_s=timeout_s)

    async def _join(self, ranks_per_engine: int) -> None:
        group = self._group
        await asyncio.gather(
            *(
                client.join_group(
                    address=group.address,
                    port=group.port,
                    rank_offset=1 + number * ranks_per_engine,
                    world_size=group.world_size,
                    name=group.name,
                    backend=group.backend,
                )
                for number, client in enumerate(self._clients)
            )
        )

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Send every bucket to all engines at once."""
        receiving = self._background.submit(self._receive_all(version))
        sending = [ref.future() for ref in self._trainers.begin_send(self._buckets)]
        self._watchdog.wait([receiving, *sending], name=f"weight sync to version {version}", timeout_s=self._timeout_s)
        num_bytes = sum(spec.num_bytes for bucket in self._buckets for spec in bucket)
        return {"weights/version": Last(version), "weights/bytes": Sum(num_bytes)}

    async def _receive_all(self, version: int) -> None:
        await asyncio.gather(*(self._receive(client, version) for client in self._clients))
        await _check_versions(self._clients, version=version)

    async def _receive(self, client: EngineClient, version: int) -> None:
        await client.pause("retract")
        await client.begin_weight_update()
        for number, bucket in enumerate(self._buckets):
            await client.receive_bucket(
                [spec.name for spec in bucket],
                dtypes=[spec.dtype for spec in bucket],
                shapes=[spec.shape for spec in bucket],
                group=self._group.name,
                version=version if number == len(self._buckets) - 1 else None,
            )
        await client.end_weight_update()
        await client.resume()


class DiskPublisher:
    """Through a directory that trainer and engines share; the one before is removed."""

    def __init__(
        self,
        *,
        trainers: TrainerGroup,
        clients: Sequence[EngineClient],
        background: BackgroundLoop,
        watchdog: Watchdog,
        directory: Path,
        timeout_s: float,
    ) -> None:
        self._trainers, self._clients, self._background, self._watchdog = trainers, clients, background, watchdog
        self._directory = directory
        self._timeout_s = timeout_s

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Save, let all engines read, remove."""
        path = self._directory / f"version-{version:06d}"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._trainers.save_hf(path)
        loading = self._background.submit(self._load_all(path, version))
        self._watchdog.wait([loading], name=f"weight sync to version {version}", timeout_s=self._timeout_s)
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        shutil.rmtree(path)
        return {"weights/version": Last(version), "weights/bytes": Sum(num_bytes)}

    async def _load_all(self, path: Path, version: int) -> None:
        await asyncio.gather(*(self._load(client, path, version) for client in self._clients))
        await _check_versions(self._clients, version=version)

    async def _load(self, client: EngineClient, path: Path, version: int) -> None:
        await client.pause("retract")
        await client.load_weights(path, version=version)
        await client.resume()
