"""The form of a transport of weights: buckets, the ranks' end, the engines' end, and the input of both.

A sync moves few large buckets instead of many small tensors. Trainer and engine agree on the buckets before the
first byte moves: names, dtypes and shapes follow from the manifest.
"""

import asyncio
import collections
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.received_weights import noted
from megatron_rl.errors import EngineError
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import rules, tensor_shapes
from megatron_rl.system.files import runs_of_bytes

BUCKET_BYTES = 512 * 1024 * 1024
POLL_S = 0.002
_FUSED_MODULE = ".self_attn."
"""An engine may fuse tensors of one attention into one of its own, and then drops the one whose counterpart is not in the same bucket.

SGLang does so for q_a_proj and kv_a_proj_with_mqa of latent attention (`cached_a_proj` in its deepseek_weight_loader.py).
"""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the checkpoint under its Hugging Face name; `dtype` is torch's name without the prefix, as in "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "WeightSpec":
        """Describe `tensor`, of any shape [...]."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def exported_specs(spec: ModelSpec, *, dtype: str) -> tuple[WeightSpec, ...]:
    """Return the tensors of `export_hf_weights` in its order, by the architecture alone.

    `dtype` is the name of the parameters' dtype, such as "bfloat16".
    """
    float32 = {name for rule in rules(spec) if rule.float32 for name in rule.hugging_face}
    return tuple(WeightSpec(name, "float32" if name in float32 else dtype, shape) for name, shape in tensor_shapes(spec))


def fused_together(name: str) -> str:
    """Return a common name for all tensors that an engine has to receive at once: a layer's attention, or its own."""
    module, found, _ = name.partition(_FUSED_MODULE)
    return module + found


def make_buckets(manifest: Sequence[WeightSpec], *, max_bytes: int = BUCKET_BYTES) -> tuple[tuple[WeightSpec, ...], ...]:
    """Cut the manifest, in order, into runs of at most `max_bytes` bytes.

    Tensors possibly fused by an engine stay together, in a larger bucket when needed.
    """
    units = [list(unit) for _, unit in itertools.groupby(manifest, key=lambda spec: fused_together(spec.name))]
    runs = runs_of_bytes(units, num_bucket_bytes, max_bytes=max_bytes)
    buckets = tuple(tuple(itertools.chain(*run)) for run in runs)
    bucket_of: dict[str, int] = {}
    for number, bucket in enumerate(buckets):
        for spec in bucket:
            first = bucket_of.setdefault(fused_together(spec.name), number)
            assert first == number, f"{spec.name} is in bucket {number}, but an engine may fuse it with tensors of bucket {first}"
    return buckets


def num_bucket_bytes(bucket: Sequence[WeightSpec]) -> int:
    """Return the size of one bucket in bytes."""
    return sum(spec.num_bytes for spec in bucket)


def fill_buckets(
    weights: Iterable[tuple[str, Tensor]],
    buckets: Sequence[Sequence[WeightSpec]],
    *,
    allocate: Callable[[int, torch.device], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Yield each bucket as one flat uint8 tensor [bytes], in the order of the buckets.

    Each is in memory of its own from `allocate`(bytes, device); without, all use the memory of the largest, so
    copy one to keep its content beyond the next. Raises ValueError when a tensor differs from its entry in the
    manifest: it would be written to a wrong place of the engine.
    """
    source = iter(weights)
    memory: Tensor | None = None
    for bucket in buckets:
        start = 0
        if allocate is not None:
            memory = None
        for spec in bucket:
            tensor = next_weight(source, spec)
            if memory is None and allocate is not None:
                memory = allocate(num_bucket_bytes(bucket), tensor.device)
            elif memory is None:
                memory = torch.empty(max(map(num_bucket_bytes, buckets)), dtype=torch.uint8, device=tensor.device)
            end = start + spec.num_bytes
            memory[start:end].view(spec.torch_dtype).view(spec.shape).copy_(tensor)
            start = end
        assert memory is not None, "a bucket has tensors"
        yield memory[:start]
    check_all_taken(source)


def check_all_taken(source: Iterator[tuple[str, Tensor]]) -> None:
    """Raise ValueError when more comes from `source`."""
    if next(source, None) is not None:
        raise ValueError("the trainer exports more tensors than the manifest promised to the engines")


def next_weight(source: Iterator[tuple[str, Tensor]], spec: WeightSpec) -> Tensor:
    """Return the next tensor of `source`, of any shape. Raises ValueError for another one than `spec` says."""
    name, tensor = next(source, (None, None))
    got = WeightSpec.of(name, tensor) if name is not None and tensor is not None else None
    if got != spec or tensor is None:
        raise ValueError(f"the trainer exports {got or 'nothing more'}, the manifest promised {spec} to the engines")
    return tensor.detach()


class WeightSource(Protocol):
    """The trainer of one rank. Both methods are collective, because gathering a sharded weight is."""

    def weights(self, *, receivers: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name, one whole tensor at a time.

        The ranks `receivers` get all weights; None means all ranks. Others take part as long as the gathering
        needs them, and get the same or nothing.
        """

    def save_hf(self, directory: Path | str, *, max_shard_bytes: int, durable: bool) -> None:
        """Write a Hugging Face directory of files of at most `max_shard_bytes`, of which rank 0 holds one at a time.

        Only a `durable` directory has to survive a power failure.
        """


def take_all(weights: Iterable[object]) -> None:
    """Take part in gathering to the end: the other ranks do, whatever becomes of what this one gathers."""
    collections.deque(weights, maxlen=0)


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank's account of a sync: seconds of gathering (in Hugging Face form) and of all else, and checksums by name."""

    gather_s: float
    send_s: float
    checksums: Mapping[str, int]


class WeightSender:
    """The rank's end, with the weights of `source`."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._gather_s, self._checksums = 0.0, dict[str, int]()

    def send(self, *, version: int, checked: bool = False) -> Sent:
        """Send the current weights, `checked` with checksums. Every rank calls `send` at the same time."""
        begun_s, self._gather_s, self._checksums = time.perf_counter(), 0.0, {}
        self._send(version=version, checked=checked)
        return Sent(self._gather_s, time.perf_counter() - begun_s - self._gather_s, self._checksums)

    def _send(self, *, version: int, checked: bool) -> None:
        raise NotImplementedError

    def _gathered(self, *, receivers: Collection[int], checked: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of `source` for `receivers`, timed; a receiver notes checksums where `checked`."""
        weights = self._source.weights(receivers=receivers)
        timed = iter(partial(self._next, weights), None)
        return noted(timed, self._checksums) if checked else timed

    def _next(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
        begun_s = time.perf_counter()
        weight = next(weights, None)
        self._gather_s += time.perf_counter() - begun_s
        return weight

    def close(self) -> None:
        """Give back what `SenderPlan.open` took, while `WeightTransport.disconnect` runs at the other end."""


Expected = Awaitable[Mapping[str, int]]
"""Checksums of all weights of a sync by name, known when all are sent."""


@asynccontextmanager
async def open_update(
    client: EngineClient, *, num_ranks: int, expected: Expected | None, holds: str | None = None, version: int | None = None
) -> AsyncIterator[None]:
    """Open an update of an engine of `num_ranks`, and compare what came with `expected` checksums.

    After it the engine takes deltas to the weights that it `holds`, and serves `version`. The update
    ends in every case, because an engine refuses a second update during the first.
    """
    client.holds = None
    await client.begin_weight_update()
    try:
        if expected is not None or holds is not None:
            await client.order("begin" if expected is None else "note", num_ranks=num_ranks)
        yield
        if expected is not None or holds is not None:
            sums = None if expected is None else await expected
            await client.order("end", num_ranks=num_ranks, expected=sums, holds=holds, version=version)
            client.holds = holds
    except RuntimeError:
        # Of the engine, or of a broken store: then the engine lives, and would refuse the next update.
        with suppress(EngineError):  # it is dead
            await client.end_weight_update()
        raise
    await client.end_weight_update()


async def awaited(store: Store, key: str) -> str:
    """Return the value of `key`, waited for without a deadline: the sync has one.

    In threads: a store whose server is stopped answers nothing.
    """
    while not await asyncio.to_thread(store.check, [key]):
        await asyncio.sleep(POLL_S)
    return (await asyncio.to_thread(store.get, key)).decode()


class SenderPlan(Protocol):
    """The plan of a rank's end, which travels to the ranks and can be pickled."""

    def open(self, source: WeightSource, *, rank: int) -> WeightSender:
        """Open the end of `rank`, while `WeightTransport.connect` runs at the other one."""


class WeightTransport:
    """The engines' end: the driver's requests to a fixed number of engines, with the `plan` of every rank's end.

    With `sends_first` engines read after all sending, else both happen at once. With `deltas`
    syncs after the first send changes of what each engine `holds`.
    """

    plan: SenderPlan
    sends_first = False
    deltas = False

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Connect every engine, once, before the first sync."""

    async def disconnect(self, client: EngineClient) -> None:
        """Release a connected engine's resources of the connection."""

    async def deliver(self, client: EngineClient, *, version: int, expected: Expected | None = None) -> None:
        """Let one engine take the ranks' weights, and serve `version` from the last part on.

        The engine compares what came with the `expected` checksums, and ends where it differs.
        """
        raise NotImplementedError

    def give_up(self, client: EngineClient, *, version: int) -> None:
        """Let no rank wait for an engine whose part of a sync has failed."""

    def finish(self, *, version: int) -> int:
        """Clean up after a sync, also a failed one; return the bytes received by each engine."""
        raise NotImplementedError


class BucketTransport(WeightTransport):
    """A transport whose engines take `buckets` one after the other."""

    def __init__(self, surroundings: "Surroundings") -> None:
        self.buckets = make_buckets(surroundings.manifest, max_bytes=surroundings.bucket_bytes)
        self._num_ranks = surroundings.ranks_per_engine

    async def deliver(self, client: EngineClient, *, version: int, expected: Expected | None = None) -> None:
        """Let an engine take every bucket, the last one with the version: half of the weights never count as new ones."""
        async with open_update(client, num_ranks=self._num_ranks, expected=expected):
            for number in range(len(self.buckets)):
                await self.take(client, number, version=version, is_last=number == len(self.buckets) - 1)

    async def take(self, client: EngineClient, number: int, *, version: int, is_last: bool) -> None:
        """Let an engine take bucket `number` of `version`."""
        raise NotImplementedError

    def finish(self, *, version: int) -> int:
        """Nothing is left behind."""
        return sum(map(num_bucket_bytes, self.buckets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The surroundings of transports, of which each uses a part.

    `manifest` lists the weights in a rank's export order. `directory` is on storage shared by ranks and engines, and
    for syncs alone. `free_address` gives an address of rank 0's node and a free port there. `backend` is gloo or nccl,
    `timeout_s` the deadline for connecting, in seconds. `ranks_beside` has the URL of every engine on the devices of
    Megatron ranks, and these ranks in the order of the engine's own; `hosts` the addresses of its nodes in this order,
    where it has several. `bucket_bytes` is the size of a message. With `deltas`, syncs after a connection's first send
    changes.
    """

    manifest: Sequence[WeightSpec]
    directory: Path
    free_address: Callable[[], tuple[str, int]]
    backend: str
    num_engines: int
    ranks_per_engine: int
    timeout_s: float
    ranks_beside: Mapping[str, Sequence[int]] = field(default_factory=dict)
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bucket_bytes: int = BUCKET_BYTES
    deltas: bool = False
