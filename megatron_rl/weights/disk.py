"""Weights through a shared directory: the ranks write a Hugging Face directory, every engine reads."""

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.engines.client import EngineClient
from megatron_rl.system.files import partial_path
from megatron_rl.weights.transport import Expected, Surroundings, WeightSender, WeightSource, WeightTransport, open_update, take_all


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """A rank's input for writing below `directory`, in files of at most `bucket_bytes`."""

    directory: Path
    bucket_bytes: int

    def open(self, source: WeightSource, *, rank: int) -> "DiskSender":
        """Nothing is to be opened."""
        return DiskSender(source, self, rank=rank)

    def path(self, version: int) -> Path:
        """Return the directory of the weights of one version."""
        return self.directory / f"version-{version:06d}"


class DiskSender(WeightSender):
    """The writer of weights: all ranks gather, and rank 0 writes."""

    def __init__(self, source: WeightSource, plan: DiskPlan, *, rank: int) -> None:
        super().__init__(source)
        self._plan, self._rank = plan, rank

    def _send(self, *, version: int, checked: bool) -> None:
        """Write a directory, in files as small as buckets, because rank 0 holds a whole file."""
        # Not durable: engines read the files from the memory of the file system before their removal.
        self._source.save_hf(self._plan.path(version), max_shard_bytes=self._plan.bucket_bytes, durable=False)
        if checked:
            take_all(self._gathered(receivers=(0,), checked=self._rank == 0))


class DiskTransport(WeightTransport):
    """The engines' end of the directory: engines read, then the directory is removed."""

    plan: DiskPlan
    sends_first = True

    def __init__(self, surroundings: Surroundings) -> None:
        self.plan = DiskPlan(surroundings.directory, surroundings.bucket_bytes)
        self._num_ranks = surroundings.ranks_per_engine

    async def deliver(self, client: EngineClient, *, version: int, expected: Expected | None = None) -> None:
        """Let an engine read the directory."""
        # SGLang opens one itself, and another changes nothing but the time.
        update = nullcontext() if expected is None else open_update(client, num_ranks=self._num_ranks, expected=expected)
        async with update:
            await client.load_weights(self.plan.path(version), version=version)

    def finish(self, *, version: int) -> int:
        """Remove the directory, also one still in progress on rank 0 after a deadline."""
        path = self.plan.path(version)
        shutil.rmtree(partial_path(path), ignore_errors=True)
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        if path.exists():
            shutil.rmtree(path)
        return num_bytes
