"""The form of a transport of weights: the ranks' end, the engines' end, and the input of both."""

import collections
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatron_rl.engines.client import EngineClient
from megatron_rl.errors import EngineError
from megatron_rl.weights.bucket import BUCKET_BYTES, WeightSpec


class WeightSource(Protocol):
    """The trainer of one rank. Both methods are collective, because gathering a sharded weight is."""

    def weights(self, *, receivers: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name, one whole tensor at a time.

        The ranks `receivers` get all weights; None means all ranks. Any other rank takes part as
        long as the gathering needs it, and gets the same or nothing.
        """
        ...

    def save_hf(self, directory: Path | str, *, max_shard_bytes: int, durable: bool) -> None:
        """Write the weights as a Hugging Face directory of files of at most `max_shard_bytes`.

        Rank 0 holds one file at a time. Only a `durable` directory has to survive a power failure.
        """
        ...


def take_all(weights: Iterable[object]) -> None:
    """Take part in gathering to the end: the other ranks do, whatever becomes of what this one gathers."""
    collections.deque(weights, maxlen=0)


class WeightSender(Protocol):
    """The rank's end."""

    def send(self, *, version: int) -> None:
        """Send the current weights. Every rank calls `send` at the same time."""
        ...

    def close(self) -> None:
        """Give back what `SenderPlan.open` took, while `WeightTransport.disconnect` runs at the other end."""
        ...


class SenderPlan(Protocol):
    """The plan of a rank's end. The plan travels to the ranks and can be pickled."""

    def open(self, source: WeightSource, *, rank: int) -> WeightSender:
        """Open the end of `rank`, while `WeightTransport.connect` runs at the other one."""
        ...


class WeightTransport(Protocol):
    """The engines' end: the driver's requests to each of a fixed number of engines."""

    @property
    def plan(self) -> SenderPlan:
        """The plan of every rank's end."""
        ...

    @property
    def sends_first(self) -> bool:
        """Return True when engines read after all sending, False when both happen at once."""
        ...

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Connect every engine, once, before the first sync."""
        ...

    async def disconnect(self, client: EngineClient) -> None:
        """Release a connected engine's resources of the connection."""
        ...

    async def deliver(self, client: EngineClient, *, version: int) -> None:
        """Let one engine take the ranks' weights, and serve `version` from the last part on."""
        ...

    def give_up(self, client: EngineClient, *, version: int) -> None:
        """Let no rank wait for an engine whose part of a sync has failed."""
        ...

    def finish(self, *, version: int) -> int:
        """Clean up after a sync, also a failed one; return the bytes received by each engine."""
        ...


@asynccontextmanager
async def updating(client: EngineClient) -> AsyncIterator[None]:
    """Let an engine take buckets inside the context; end the engine's update in every case.

    An engine refuses a second update during the first.
    """
    await client.begin_weight_update()
    try:
        yield
    except EngineError:
        with suppress(EngineError):  # it is dead
            await client.end_weight_update()
        raise
    await client.end_weight_update()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The surroundings of transports; each transport uses a part.

    `manifest` lists the weights in a rank's export order. `directory` is on storage shared by ranks
    and engines, and for syncs alone. `free_address` gives an address of rank 0's node and a free
    port there. `backend` is gloo or nccl, `timeout_s` the deadline for connecting, in seconds.
    `ranks_beside` has the URL of every engine on the devices of Megatron ranks, and these ranks in
    the order of the engine's own. `bucket_bytes` is the size of a message.
    """

    manifest: Sequence[WeightSpec]
    directory: Path
    free_address: Callable[[], tuple[str, int]]
    backend: str
    num_engines: int
    ranks_per_engine: int
    timeout_s: float
    ranks_beside: Mapping[str, Sequence[int]] = field(default_factory=dict)
    bucket_bytes: int = BUCKET_BYTES
