"""Weights through memory that a rank and an engine share: CUDA IPC on the GPU that both are on, files in /dev/shm on the CPU.

    rank                        driver                        engine
    fill a bucket, offer it --> ask for it, POST its handle --> map it, copy it
    drop it                 <-- taken                       <-- answer

Every tensor parallel rank of an engine takes the buckets of the Megatron rank on its own GPU, of which a store
carries handles of a few hundred bytes. On a GPU each bucket is in memory of its own: SGLang answers before it has copied,
and torch keeps memory that is dropped until the other process has let go of it, but not from being written. On the
CPU, where one rank serves all ranks of an engine, each of these has memory of its own, too, because SGLang's
loaders may write into it: that of gpt-oss sets a bias to zero on all ranks but the first.
"""

import asyncio
import base64
import contextlib
import errno
import io
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import Store
from torch.multiprocessing import reductions

from megatron_rl.engines.client import EngineClient
from megatron_rl.errors import UserError
from megatron_rl.system.leftovers import SHARED_MEMORY, Scratch, scratch_directory
from megatron_rl.system.process_variables import ALLOCATOR_VARIABLES
from megatron_rl.system.rendezvous import join_store, serve_store
from megatron_rl.weights.transport import (
    BucketTransport,
    Surroundings,
    WeightSender,
    WeightSource,
    WeightSpec,
    awaited,
    fill_buckets,
    num_bucket_bytes,
    take_all,
)

GIVEN_UP = b"given up"
"""What the store says of a bucket that an engine has not taken and will not."""
_DEVICE_ARGUMENT = 6
"""Of torch's `rebuild_cuda_tensor`: SGLang replaces that function by one that takes a GPU's UUID there (its utils/patch_torch.py)."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A tensor parallel rank of the engine at `url`, on the machine `host`, else on that of the URL."""

    url: str
    tp_rank: int
    host: str = field(default="", compare=False)

    def offer(self, version: int, bucket: int) -> str:
        """Return the store's key for a bucket offered by the seat's rank."""
        return f"offer/{version}/{bucket}/{self.url}/{self.tp_rank}"

    def taken(self, version: int, bucket: int) -> str:
        """Return the store's key for a bucket no longer needed by the engine."""
        return f"taken/{version}/{bucket}/{self.url}/{self.tp_rank}"


# The rank's end


@dataclass(frozen=True, slots=True)
class IpcPlan:
    """A rank's input: the store of rank 0 at `address`:`port`, and the `seats` of ranks beside engines."""

    address: str
    port: int
    seats: dict[int, tuple[Seat, ...]]
    buckets: tuple[tuple[WeightSpec, ...], ...]
    timeout_s: float

    def open(self, source: WeightSource, *, rank: int) -> "IpcSender":
        """Join the store. Raises UserError when an engine of this rank is on another host, or the allocator's memory cannot be shared."""
        seats = self.seats.get(rank, ())
        for seat in seats:
            check_same_host(seat.url, rank=rank, host=seat.host)
        check_allocator()
        store: Store | None = None
        if rank == 0:
            store = serve_store(self.address, port=self.port, timeout_s=self.timeout_s)
        elif seats:
            store = join_store(self.address, port=self.port, num_clients=len(self.seats), timeout_s=self.timeout_s)
        return IpcSender(source, self, seats=seats, store=store)


class IpcSender(WeightSender):
    """The giver of weights: all ranks gather, and a rank with `seats` offers every bucket to each seat."""

    def __init__(self, source: WeightSource, plan: IpcPlan, *, seats: Sequence[Seat], store: Store | None) -> None:
        super().__init__(source)
        self._plan, self._seats, self._store = plan, tuple(seats), store

    def _send(self, *, version: int, checked: bool) -> None:
        """Offer bucket by bucket, two per seat at a time: one is filled while engines take the one before."""
        weights = self._gathered(receivers=tuple(self._plan.seats), checked=checked and bool(self._seats))
        try:
            if self._seats:
                self._offer_all(weights, version=version)
        finally:
            take_all(weights)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Leave the store, or end the store on rank 0."""
        self._store = None

    def _offer_all(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        seats, held, shared = self._seats, dict[Seat, Tensor](), SharedMemory(max(map(num_bucket_bytes, self._plan.buckets)))
        with scratch_directory() as scratch:
            for number, flat in enumerate(fill_buckets(weights, self._plan.buckets, allocate=shared.allocate)):
                if held:
                    seats = self._those_that_took(held, version=version, number=number - 1)
                    shared.free(held[seat] for seat in seats)
                if not seats:
                    return
                held = self._offer(flat, seats, shared, version=version, number=number, scratch=scratch)
            assert held, "a model has weights"
            self._those_that_took(held, version=version, number=len(self._plan.buckets) - 1)

    def _offer(
        self, flat: Tensor, seats: Sequence[Seat], shared: "SharedMemory", *, version: int, number: int, scratch: Scratch
    ) -> dict[Seat, Tensor]:
        """Offer the content of `flat` [bytes] uint8 to `seats`; return the memory of each, of the first `flat` itself.

        On the CPU each seat gets a file. On a GPU a rank has one seat for each engine beside, and no two ranks of an
        engine share a bucket.
        """
        assert self._store is not None, "a rank with seats joins the store"
        offered = dict.fromkeys(seats, flat)
        if not flat.is_cuda:
            offered |= {seat: shared.allocate(flat.nbytes, flat.device).copy_(flat) for seat in seats[1:]}
            scratch.note(file for memory in offered.values() for file in shared_files(memory))
        for seat, memory in offered.items():
            self._store.set(seat.offer(version, number), handle_of(memory, self._plan.buckets[number]))
        return offered

    def _those_that_took(self, offered: Mapping[Seat, Tensor], *, version: int, number: int) -> tuple[Seat, ...]:
        """Wait until all users are done with each seat's `offered` bucket; return the seats of takers.

        A handle that nobody opens counts as a user for ever: a file's is counted out, a GPU's bucket stays until
        the rank ends.
        """
        assert self._store is not None, "a rank with seats joins the store"
        self._store.wait([seat.taken(version, number) for seat in offered], timedelta(seconds=self._plan.timeout_s))
        took = []
        for seat, flat in offered.items():
            key = seat.taken(version, number)
            if self._store.get(key) != GIVEN_UP:
                took.append(seat)
            elif not flat.is_cuda:
                flat.untyped_storage()._shared_decref()
            self._store.delete_key(key)
        return tuple(took)


def check_same_host(url: str, *, rank: int, host: str = "") -> None:
    """Raise UserError when a server of the engine at `url` is on another machine: only an address of this one can be bound."""
    host = host or urlsplit(url).hostname or ""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError as error:
        raise UserError(
            f"weights.transport is ipc, but the engine at {url} is not on the machine of Megatron rank {rank}, {socket.gethostname()} "
            f"({error}), and memory is shared within one machine; set weights.transport to broadcast or disk"
        ) from error


def check_allocator() -> None:
    """Raise UserError for options of torch's allocator without handles for other processes."""
    for name in ALLOCATOR_VARIABLES:
        options = os.environ.get(name, "")
        if "expandable_segments:true" in options.replace(" ", "").lower():
            raise UserError(
                f"the environment of the ranks has {name}={options}, whose memory cannot be shared with an engine; remove "
                f"expandable_segments there, or set weights.transport to disk"
            )


def allocate_shared(num_bytes: int, device: torch.device) -> Tensor:
    """Return memory [num_bytes] uint8 for sharing with other processes: any of a GPU, on the CPU a file of /dev/shm.

    Raises UserError where /dev/shm has no room.
    """
    if device.type == "cuda":
        # Buckets released by engines become free only after a check.
        torch.cuda.ipc_collect()
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    except RuntimeError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise UserError(
            f"/dev/shm has no room for a bucket of {num_bytes} bytes of weights; give it more (docker run --shm-size=4g, or mount -o "
            "remount,size=4G /dev/shm), or set weights.transport to disk"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class SharedMemory:
    """Shared memory for the buckets of one sync, of at most `bucket_bytes` each.

    On a CPU memory is used again, since an engine there has copied when it answers: new pages take
    three times the CPU seconds of the copy.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes, self._free = bucket_bytes, list[Tensor]()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory as `allocate_shared` [num_bytes] uint8, with any content."""
        if device.type == "cuda":
            return allocate_shared(num_bytes, device)
        return (self._free.pop() if self._free else allocate_shared(self._bucket_bytes, device))[:num_bytes]

    def free(self, buckets: Iterable[Tensor]) -> None:
        """Use the memory of `buckets` [bytes] uint8 again, where possible."""
        self._free += [torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage()) for flat in buckets if not flat.is_cuda]


def shared_files(flat: Tensor) -> list[Path]:
    """Return the file of `flat` [bytes] uint8 and the directory of torch's helper, which a kill of both leaves behind."""
    helper, name, _ = flat.untyped_storage()._share_filename_cpu_()
    return [SHARED_MEMORY / name.decode().lstrip("/"), Path(helper.decode()).parent]


def handle_of(flat: Tensor, bucket: Sequence[WeightSpec]) -> str:
    """Return the handle of `flat` [bytes] uint8, with the tensors of `bucket`, for one process, counted as a user.

    The form is SGLang's `flattened_bucket`. SGLang unpickles the handle with functions of torch, and the description
    of the tensors with plain records: all else is refused.
    """
    metadata, start = [], 0
    for spec in bucket:
        end = start + spec.num_bytes
        place = {"start_idx": start, "end_idx": end, "numel": spec.num_bytes}
        metadata.append(SimpleNamespace(name=spec.name, shape=spec.shape, dtype=spec.torch_dtype, **place))
        start = end
    file = io.BytesIO()
    _HandlePickler(file).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(file.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """A pickler with handles in place of memory. A GPU goes by its UUID: its number is another one in the engine.

    For a file torch's own pickler writes the descriptor, for a socket with authentication.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.is_cuda:
            function, arguments = reductions.reduce_tensor(obj)
            uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
            return function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
        if isinstance(obj, torch.UntypedStorage):
            place = obj._share_filename_cpu_()
            # The file stays until every user has let go, and the reader lets go one time more than it takes.
            obj._shared_incref()
            return reductions.rebuild_storage_filename, (type(obj), *place)
        return NotImplemented


# The engines' end


class IpcTransport(BucketTransport):
    """The engines' end: every engine gets the handles of the ranks beside it, bucket by bucket."""

    plan: IpcPlan

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._engine_seats = {
            url: tuple(Seat(url, tp_rank) for tp_rank in range(surroundings.ranks_per_engine)) for url in surroundings.ranks_beside
        }
        address, port = surroundings.free_address()
        self.plan = IpcPlan(address, port, _seats_of_ranks(surroundings), self.buckets, surroundings.timeout_s)
        self._store: Store

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Join the store. Raises UserError for an engine without a device shared with a rank."""
        for client in clients:
            if client.address.url not in self._engine_seats:
                raise UserError(
                    f"weights.transport is ipc, but the engine at {client.address.url} shares no memory with a Megatron rank; set "
                    f"runtime.colocate to true, or weights.transport to broadcast"
                )
        plan = self.plan
        self._store = await asyncio.to_thread(
            join_store, plan.address, port=plan.port, num_clients=1 + len(plan.seats), timeout_s=plan.timeout_s
        )

    async def take(self, client: EngineClient, number: int, *, version: int, is_last: bool) -> None:
        """Let an engine take a bucket by the handles of its seats."""
        seats = self._engine_seats[client.address.url]
        handles = [await self._offered(seat.offer(version, number)) for seat in seats]
        await client.take_bucket(handles, version=version if is_last else None)
        for seat in seats:
            self._store.set(seat.taken(version, number), "")

    def give_up(self, client: EngineClient, *, version: int) -> None:
        """Stop the ranks' offers to one engine, at their present bucket; the ranks go on to the remaining engines."""
        with contextlib.suppress(torch.distributed.DistNetworkError):  # rank 0 is gone, and so is who would wait
            for number in range(len(self.buckets)):
                for seat in self._engine_seats[client.address.url]:
                    self._store.set(seat.taken(version, number), GIVEN_UP.decode())

    async def _offered(self, key: str) -> str:
        """Return the handle under `key`."""
        handle = await awaited(self._store, key)
        self._store.delete_key(key)
        return handle


def _seats_of_ranks(surroundings: Surroundings) -> dict[int, tuple[Seat, ...]]:
    """Return the seats of every rank beside an engine; on the CPU, where an engine has one slot, one rank has all."""
    seats: dict[int, tuple[Seat, ...]] = {}
    for url, ranks in surroundings.ranks_beside.items():
        assert surroundings.ranks_per_engine % len(ranks) == 0, f"{surroundings.ranks_per_engine} ranks of {url} beside ranks {ranks}"
        for tp_rank in range(surroundings.ranks_per_engine):
            rank = ranks[tp_rank * len(ranks) // surroundings.ranks_per_engine]
            hosts = surroundings.hosts.get(url) or ("",)
            seats[rank] = (*seats.get(rank, ()), Seat(url, tp_rank, hosts[tp_rank * len(hosts) // surroundings.ranks_per_engine]))
    return seats
