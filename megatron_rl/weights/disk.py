"""Weights through a shared directory: the ranks write a Hugging Face directory, every engine reads."""

import shutil
import uuid
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.received_deltas import DELTA
from megatron_rl.system.files import atomic_directory, partial_path
from megatron_rl.weights.deltas import DIGEST, Deltas, Message, holding
from megatron_rl.weights.transport import (
    Expected,
    Surroundings,
    WeightSender,
    WeightSource,
    WeightSpec,
    WeightTransport,
    make_buckets,
    open_update,
    take_all,
)

FIRST, AGAIN = "weights", "again"
"""Directories of what a sync with deltas sends, and of all weights again, for comparison."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """A rank's input for writing below `directory`, in files of at most `bucket_bytes`.

    Deltas are of `buckets`; none without. `token` names their connection.
    """

    directory: Path
    bucket_bytes: int
    buckets: tuple[tuple[WeightSpec, ...], ...] = ()
    token: str = ""

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
        self._deltas = Deltas(plan.buckets, token=plan.token) if plan.buckets and rank == 0 else None

    def _send(self, *, version: int, checked: bool) -> None:
        """Write a directory, in files as small as buckets, because rank 0 holds a whole file."""
        if self._plan.buckets:
            return self._send_deltas(version=version, checked=checked)
        # Not durable: engines read the files from the memory of the file system before their removal.
        self._source.save_hf(self._plan.path(version), max_shard_bytes=self._plan.bucket_bytes, durable=False)
        if checked:
            take_all(self._gathered(receivers=(0,), checked=self._rank == 0))

    def _send_deltas(self, *, version: int, checked: bool) -> None:
        """Write a file for each message, those for comparison into a directory of their own."""
        weights = self._gathered(receivers=(0,), checked=checked and self._rank == 0)
        try:
            if self._deltas is not None:
                with atomic_directory(self._plan.path(version), durable=False) as path:
                    place = path / FIRST
                    place.mkdir()
                    for message in self._deltas.messages(weights, version=version, checked=checked):
                        if message.bucket is None:
                            place = path / AGAIN
                            place.mkdir()
                        else:
                            save_file(self._named(message), place / f"{message.bucket:06d}.safetensors")
        finally:
            take_all(weights)

    def _named(self, message: Message) -> dict[str, Tensor]:
        """Return what a file of a message has."""
        assert message.bucket is not None, "a message with content"
        if message.is_delta:
            return {f"{DELTA}{message.bucket}": message.content}
        bucket = self._plan.buckets[message.bucket]
        parts = message.content.split([spec.num_bytes for spec in bucket])
        return {spec.name: part.view(spec.torch_dtype).view(spec.shape) for spec, part in zip(bucket, parts, strict=True)}


class DiskTransport(WeightTransport):
    """The engines' end of the directory: engines read, then the directory is removed."""

    plan: DiskPlan
    sends_first = True

    def __init__(self, surroundings: Surroundings) -> None:
        self.plan = DiskPlan(surroundings.directory, surroundings.bucket_bytes)
        self._num_ranks = surroundings.ranks_per_engine
        if surroundings.deltas:
            buckets = make_buckets(surroundings.manifest, max_bytes=surroundings.bucket_bytes)
            self.plan, self.deltas = replace(self.plan, buckets=buckets, token=uuid.uuid4().hex), True

    async def deliver(self, client: EngineClient, *, version: int, expected: Expected | None = None) -> None:
        """Let an engine read the directory, with deltas first these, and then what is sent for comparison."""
        path = self.plan.path(version)
        if self.plan.buckets:
            holds = holding(self.plan.token, version)
            async with open_update(client, num_ranks=self._num_ranks, expected=expected, holds=holds):
                await client.load_weights(path / FIRST, version=version)
                if (path / AGAIN).exists():
                    await client.order(DIGEST, num_ranks=self._num_ranks)
                    await client.load_weights(path / AGAIN, version=version)
            return
        # SGLang opens one itself, and another changes nothing but the time.
        update = nullcontext() if expected is None else open_update(client, num_ranks=self._num_ranks, expected=expected)
        async with update:
            await client.load_weights(path, version=version)

    def finish(self, *, version: int) -> int:
        """Remove the directory, also one still in progress on rank 0 after a deadline."""
        path = self.plan.path(version)
        shutil.rmtree(partial_path(path), ignore_errors=True)
        num_bytes = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
        # A file that an engine has open leaves another one on NFS.
        shutil.rmtree(path, ignore_errors=True)
        return num_bytes
