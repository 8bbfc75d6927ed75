"""Weights from the trainer to the engines, versioned: pause, move, resume, then ask every engine what it serves now."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
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


async def _check_versions(clients: Sequence[EngineClient], *, version: int) -> None:
    served = await asyncio.gather(*(client.weight_version() for client in clients))
    for client, got in zip(clients, served, strict=True):
        if got != version:
            raise EngineError(f"the engine at {client.address.url} serves weights {got} after a sync, needs {version}; see its log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """Who takes part in a sync, and how long it may take in seconds."""

    trainers: TrainerGroup
    clients: Sequence[EngineClient]
    background: BackgroundLoop
    watchdog: Watchdog
    timeout_s: float


class BroadcastPublisher:
    """Through a process group, `backend` gloo or nccl, of trainer rank 0 and the `ranks_per_engine` ranks of every engine."""

    def __init__(self, parties: Parties, *, backend: str, ranks_per_engine: int) -> None:
        self._parties = parties
        self._buckets = make_buckets(parties.trainers.manifest())
        address, port = parties.trainers.free_address()
        world_size = 1 + len(parties.clients) * ranks_per_engine
        self._group = BroadcastGroup(address=address, port=port, world_size=world_size, name=GROUP_NAME, backend=backend)
        joining = parties.background.submit(self._join(ranks_per_engine))
        sending = [ref.future() for ref in parties.trainers.begin_join(self._group, timeout_s=parties.timeout_s)]
        parties.watchdog.wait([joining, *sending], name="joining trainer and engines for weight syncs", timeout_s=parties.timeout_s)

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
                for number, client in enumerate(self._parties.clients)
            )
        )

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Send every bucket to all engines at once."""
        receiving = self._parties.background.submit(self._receive_all(version))
        sending = [ref.future() for ref in self._parties.trainers.begin_send(self._buckets)]
        self._parties.watchdog.wait([receiving, *sending], name=f"weight sync to version {version}", timeout_s=self._parties.timeout_s)
        num_bytes = sum(spec.num_bytes for bucket in self._buckets for spec in bucket)
        return {"weights/version": Last(version), "weights/bytes": Sum(num_bytes)}

    async def _receive_all(self, version: int) -> None:
        await asyncio.gather(*(self._receive(client, version) for client in self._parties.clients))
        await _check_versions(self._parties.clients, version=version)

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
    """Through `directory`, which trainer and engines share; nothing is left in it."""

    def __init__(self, parties: Parties, *, directory: Path) -> None:
        self._parties = parties
        self._directory = directory

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Save, let all engines read, remove."""
        path = self._directory / f"version-{version:06d}"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._parties.trainers.save_hf(path)
        loading = self._parties.background.submit(self._load_all(path, version))
        self._parties.watchdog.wait([loading], name=f"weight sync to version {version}", timeout_s=self._parties.timeout_s)
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        shutil.rmtree(path)
        return {"weights/version": Last(version), "weights/bytes": Sum(num_bytes)}

    async def _load_all(self, path: Path, version: int) -> None:
        await asyncio.gather(*(self._load(client, path, version) for client in self._parties.clients))
        await _check_versions(self._parties.clients, version=version)

    async def _load(self, client: EngineClient, path: Path, version: int) -> None:
        await client.pause("retract")
        await client.load_weights(path, version=version)
        await client.resume()
