"""What a transport of weights is: an end that every rank holds, an end that directs the engines, and what the two are made from."""

import collections
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatron_rl.errors import EngineError
from megatron_rl.rollout.client import EngineClient
from megatron_rl.weights.bucket import BUCKET_BYTES, WeightSpec


class WeightSource(Protocol):
    """The trainer of one rank. Both methods are collective, because gathering a sharded weight is."""

    def weights(self, *, receivers: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, one whole tensor at a time, on the ranks `receivers`, all where None.

        Any other rank takes part as long as it has a part in what they gather, and gets the same or nothing.
        """
        ...

    def save_hf(self, directory: Path | str, *, max_shard_bytes: int, durable: bool) -> None:
        """Write the weights as a Hugging Face directory of files of at most `max_shard_bytes`, of which rank 0 holds one at a time.

        Only a `durable` one has to survive a power failure.
        """
        ...


def take_all(weights: Iterable[object]) -> None:
    """Take part in gathering to the end: the other ranks do, whatever becomes of what this one gathers."""
    collections.deque(weights, maxlen=0)


class WeightSender(Protocol):
    """The rank's end."""

    def send(self, *, version: int) -> None:
        """Send the current weights. Every rank calls it at the same time."""
        ...

    def close(self) -> None:
        """Give back what `SenderPlan.open` took, while `WeightTransport.disconnect` runs at the other end."""
        ...


class SenderPlan(Protocol):
    """What a rank opens its end from; it travels to the ranks, so it can be pickled."""

    def open(self, source: WeightSource, *, rank: int) -> WeightSender:
        """Open the end of `rank`, while `WeightTransport.connect` runs at the other one."""
        ...


class WeightTransport(Protocol):
    """The engines' end, of a fixed number of engines: what the driver asks of each while it is paused."""

    @property
    def plan(self) -> SenderPlan:
        """What every rank opens its end from."""
        ...

    @property
    def sends_first(self) -> bool:
        """True when engines read what ranks have finished sending, False when both happen at once."""
        ...

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Connect every engine, once, before the first sync."""
        ...

    async def disconnect(self, client: EngineClient) -> None:
        """Let an engine that was connected give back what connecting took."""
        ...

    async def deliver(self, client: EngineClient, *, version: int) -> None:
        """Let one engine take what the ranks send, and serve it as `version` from the last part of it on."""
        ...

    def give_up(self, client: EngineClient, *, version: int) -> None:
        """Let no rank wait for an engine whose part of a sync has failed."""
        ...

    def finish(self, *, version: int) -> int:
        """Leave nothing behind of a sync that is over, also one that failed; return the bytes that each engine got."""
        ...


@asynccontextmanager
async def updating(client: EngineClient) -> AsyncIterator[None]:
    """Inside, an engine takes buckets. Whether it got all or not, its update is over then: it would refuse another during this one."""
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
    """What transports are made from; each uses its part.

    `manifest` lists the weights in the order in which a rank exports them. `directory` is on storage that ranks and engines share, and for
    syncs alone. `free_address` gives an address of rank 0's node and a free port on it. `backend` is gloo or nccl, `timeout_s` the
    deadline for connecting, in seconds. `ranks_beside` has the URL of every engine on the devices of Megatron ranks, and these ranks in
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
