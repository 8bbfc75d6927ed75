"""Weights through a directory that ranks and engines share: the ranks write a Hugging Face directory, every engine reads it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.files import partial_path
from megatron_rl.rollout.client import EngineClient
from megatron_rl.weights.interface import Surroundings, WeightSource


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What a rank needs to write below `directory`, in files of at most `bucket_bytes`."""

    directory: Path
    bucket_bytes: int

    def open(self, source: WeightSource, *, rank: int) -> "DiskSender":
        """Nothing is to be opened."""
        return DiskSender(source, self)

    def path(self, version: int) -> Path:
        """Where the weights of one version are."""
        return self.directory / f"version-{version:06d}"


class DiskSender:
    """Gathers the weights of all ranks; rank 0 writes them."""

    def __init__(self, source: WeightSource, plan: DiskPlan) -> None:
        self._source, self._plan = source, plan

    def send(self, *, version: int) -> None:
        """Write a directory, in files as small as the buckets of other transports, as rank 0 holds a whole one.

        Engines read it from the memory of the file system, and it is removed after that: nobody waits for the disk.
        """
        self._source.save_hf(self._plan.path(version), max_shard_bytes=self._plan.bucket_bytes, durable=False)

    def close(self) -> None:
        """Nothing was opened."""


class DiskTransport:
    """Directs engines to read a directory, which is removed afterwards."""

    sends_first = True

    def __init__(self, surroundings: Surroundings) -> None:
        self.plan = DiskPlan(surroundings.directory, surroundings.bucket_bytes)

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Nothing connects them."""

    async def disconnect(self, client: EngineClient) -> None:
        """Nothing connects them."""

    async def deliver(self, client: EngineClient, *, version: int) -> None:
        """Let an engine read the directory."""
        await client.load_weights(self.plan.path(version), version=version)

    def give_up(self, client: EngineClient, *, version: int) -> None:
        """No rank waits for an engine."""

    def finish(self, *, version: int) -> int:
        """Remove the directory, also one that rank 0 still writes after a deadline."""
        path = self.plan.path(version)
        shutil.rmtree(partial_path(path), ignore_errors=True)
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        if path.exists():
            shutil.rmtree(path)
        return num_bytes
