"""Weights through memory that a rank and an engine share: CUDA IPC on the GPU that both are on, files in /dev/shm on the CPU.

    rank                        driver                        engine
    fill a bucket, offer it --> ask for it, POST its handle --> map it, copy it
    drop it                 <-- taken                       <-- answer

Every tensor parallel rank of an engine takes the buckets of the Megatron rank on its own GPU, of which a store carries handles of a few
hundred bytes. Each bucket is in memory of its own: SGLang answers before a GPU has copied, and torch keeps memory that is dropped until
the other process has let go of it, but not from being written.
"""

import asyncio
import base64
import contextlib
import errno
import io
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

from megatron_rl.errors import UserError
from megatron_rl.leftovers import SHARED_MEMORY, Scratch, scratch_directory
from megatron_rl.process_variables import ALLOCATOR_VARIABLES
from megatron_rl.rendezvous import join_store, serve_store
from megatron_rl.rollout.client import EngineClient
from megatron_rl.weights.bucket import WeightSpec, fill_buckets, make_buckets, num_bucket_bytes
from megatron_rl.weights.interface import Surroundings, WeightSource, take_all, updating

POLL_S = 0.002
GIVEN_UP = b"given up"
"""What the store says of a bucket that an engine has not taken and will not."""
_DEVICE_ARGUMENT = 6
"""Of torch's `rebuild_cuda_tensor`: SGLang replaces that function by one that takes a GPU's UUID there (its utils/patch_torch.py)."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A tensor parallel rank of the engine at `url`."""

    url: str
    tp_rank: int

    def offer(self, version: int, bucket: int) -> str:
        """The key of the store under which the seat's rank offers a bucket."""
        return f"offer/{version}/{bucket}/{self.url}/{self.tp_rank}"

    def taken(self, version: int, bucket: int) -> str:
        """The key of the store that says that the engine needs a bucket no longer."""
        return f"taken/{version}/{bucket}/{self.url}/{self.tp_rank}"


# The rank's end


@dataclass(frozen=True, slots=True)
class IpcPlan:
    """What a rank needs: the store that rank 0 serves at `address`:`port`, and the `seats` of every rank that is beside an engine."""

    address: str
    port: int
    seats: dict[int, tuple[Seat, ...]]
    buckets: tuple[tuple[WeightSpec, ...], ...]
    timeout_s: float

    def open(self, source: WeightSource, *, rank: int) -> "IpcSender":
        """Join the store. Raises UserError when an engine of this rank is on another host, or the allocator's memory cannot be shared."""
        seats = self.seats.get(rank, ())
        for seat in seats:
            check_same_host(seat.url, rank=rank)
        check_allocator()
        store: Store | None = None
        if rank == 0:
            store = serve_store(self.address, port=self.port, timeout_s=self.timeout_s)
        elif seats:
            store = join_store(self.address, port=self.port, num_clients=len(self.seats), timeout_s=self.timeout_s)
        return IpcSender(source, self, seats=seats, store=store)


class IpcSender:
    """Gathers the weights for the ranks that have seats; one that has `seats` offers every bucket to each of them."""

    def __init__(self, source: WeightSource, plan: IpcPlan, *, seats: Sequence[Seat], store: Store | None) -> None:
        self._source, self._plan, self._seats, self._store = source, plan, tuple(seats), store

    def send(self, *, version: int) -> None:
        """Offer bucket by bucket, of which two exist at a time: one is filled while engines take the one before."""
        weights = self._source.weights(receivers=tuple(self._plan.seats))
        try:
            if self._seats:
                self._offer_all(weights, version=version)
        finally:
            take_all(weights)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Leave the store, or end it."""
        self._store = None

    def _offer_all(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        seats, held = self._seats, None
        with scratch_directory() as scratch:
            for number, flat in enumerate(fill_buckets(weights, self._plan.buckets, allocate=allocate_shared)):
                if held is not None:
                    seats = self._those_that_took(held, seats, version=version, number=number - 1)
                if not seats:
                    return
                self._offer(flat, seats, version=version, number=number, scratch=scratch)
                held = flat
            assert held is not None, "a model has weights"
            self._those_that_took(held, seats, version=version, number=len(self._plan.buckets) - 1)

    def _offer(self, flat: Tensor, seats: Sequence[Seat], *, version: int, number: int, scratch: Scratch) -> None:
        assert self._store is not None, "a rank with seats joins the store"
        if not flat.is_cuda:
            scratch.note(shared_files(flat))
        for seat in seats:
            self._store.set(seat.offer(version, number), handle_of(flat, self._plan.buckets[number]))

    def _those_that_took(self, flat: Tensor, seats: Sequence[Seat], *, version: int, number: int) -> tuple[Seat, ...]:
        """Wait until nobody needs `flat`, which these `seats` were offered; the seats whose engine took it.

        The others get no further offer. A handle that nobody opens counts as a user for ever: a file has it counted out, on a GPU that one
        bucket stays until the rank ends.
        """
        assert self._store is not None, "a rank with seats joins the store"
        keys = {seat.taken(version, number): seat for seat in seats}
        self._store.wait(list(keys), timedelta(seconds=self._plan.timeout_s))
        took = []
        for key, seat in keys.items():
            if self._store.get(key) != GIVEN_UP:
                took.append(seat)
            elif not flat.is_cuda:
                flat.untyped_storage()._shared_decref()
            self._store.delete_key(key)
        return tuple(took)


def check_same_host(url: str, *, rank: int) -> None:
    """Raise UserError when the server at `url` is on another machine: only an address of this one can be bound."""
    host = urlsplit(url).hostname or ""
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
    """Raise UserError for options of torch's allocator whose memory has no handle that another process could open."""
    for name in ALLOCATOR_VARIABLES:
        options = os.environ.get(name, "")
        if "expandable_segments:true" in options.replace(" ", "").lower():
            raise UserError(
                f"the environment of the ranks has {name}={options}, whose memory cannot be shared with an engine; remove "
                f"expandable_segments there, or set weights.transport to disk"
            )


def allocate_shared(num_bytes: int, device: torch.device) -> Tensor:
    """Memory [num_bytes] uint8 that other processes can open: any of a GPU, a file of /dev/shm on the CPU.

    Raises UserError where /dev/shm has no room.
    """
    if device.type == "cuda":
        # Buckets that engines have let go of are free only once somebody looks.
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


def shared_files(flat: Tensor) -> list[Path]:
    """What a kill of this process and of torch's helper would leave of `flat` [bytes] uint8: its file, and the helper's directory."""
    helper, name, _ = flat.untyped_storage()._share_filename_cpu_()
    return [SHARED_MEMORY / name.decode().lstrip("/"), Path(helper.decode()).parent]


def handle_of(flat: Tensor, bucket: Sequence[WeightSpec]) -> str:
    """The handle of `flat` [bytes] uint8, which holds the tensors of `bucket`, as SGLang's `flattened_bucket` has it.

    SGLang unpickles it with the functions of torch, and what describes the tensors with plain records: it refuses all else. A handle is
    for one process, which counts itself as its user.
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
    """Writes handles in place of memory. A GPU goes by its UUID: its number here is another one in the engine.

    Of a file torch's own pickler writes the descriptor, for a socket at which no stranger can authenticate himself.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.is_cuda:
            function, arguments = reductions.reduce_tensor(obj)
            uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
            return function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
        if isinstance(obj, torch.UntypedStorage):
            place = obj._share_filename_cpu_()
            # The file is there until everybody has let go of it, and the reader will once more than it has taken.
            obj._shared_incref()
            return reductions.rebuild_storage_filename, (type(obj), *place)
        return NotImplemented


# The engines' end


class IpcTransport:
    """Hands every engine the handles that the ranks beside it offer, bucket by bucket."""

    sends_first = False

    def __init__(self, surroundings: Surroundings) -> None:
        self._engine_seats = {
            url: tuple(Seat(url, tp_rank) for tp_rank in range(surroundings.ranks_per_engine)) for url in surroundings.ranks_beside
        }
        address, port = surroundings.free_address()
        self.plan = IpcPlan(
            address=address,
            port=port,
            seats=_seats_of_ranks(surroundings),
            buckets=make_buckets(surroundings.manifest, max_bytes=surroundings.bucket_bytes),
            timeout_s=surroundings.timeout_s,
        )
        self._store: Store

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Join the store. Raises UserError for an engine that shares nothing with a rank."""
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

    async def disconnect(self, client: EngineClient) -> None:
        """An engine keeps nothing that is shared."""

    async def deliver(self, client: EngineClient, *, version: int) -> None:
        """Let an engine take every bucket; the version comes with the last, so that half of the weights never count as new ones."""
        seats, num_buckets = self._engine_seats[client.address.url], len(self.plan.buckets)
        async with updating(client):
            for number in range(num_buckets):
                handles = [await self._offered(seat.offer(version, number)) for seat in seats]
                await client.take_bucket(handles, version=version if number == num_buckets - 1 else None)
                for seat in seats:
                    self._store.set(seat.taken(version, number), "")

    def give_up(self, client: EngineClient, *, version: int) -> None:
        """Tell the ranks, which go on to whoever else they serve. They read of it at the bucket at which they are."""
        with contextlib.suppress(torch.distributed.DistNetworkError):  # rank 0 is gone, and so is who would wait
            for number in range(len(self.plan.buckets)):
                for seat in self._engine_seats[client.address.url]:
                    self._store.set(seat.taken(version, number), GIVEN_UP.decode())

    async def _offered(self, key: str) -> str:
        """The handle under `key`, waited for without a deadline: the sync has one."""
        while not self._store.check([key]):
            await asyncio.sleep(POLL_S)
        handle = self._store.get(key).decode()
        self._store.delete_key(key)
        return handle

    def finish(self, *, version: int) -> int:
        """Nothing is left behind."""
        return sum(map(num_bucket_bytes, self.plan.buckets))


def _seats_of_ranks(surroundings: Surroundings) -> dict[int, tuple[Seat, ...]]:
    """The seats of every rank that is beside an engine; on the CPU, where an engine has one slot, one rank has all of them."""
    seats: dict[int, tuple[Seat, ...]] = {}
    for url, ranks in surroundings.ranks_beside.items():
        assert surroundings.ranks_per_engine % len(ranks) == 0, f"{surroundings.ranks_per_engine} ranks of {url} beside ranks {ranks}"
        for tp_rank in range(surroundings.ranks_per_engine):
            rank = ranks[tp_rank * len(ranks) // surroundings.ranks_per_engine]
            seats[rank] = (*seats.get(rank, ()), Seat(url, tp_rank))
    return seats
