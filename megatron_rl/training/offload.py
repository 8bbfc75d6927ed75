"""A trained model's memory, moved to host memory for another user of the device, and back.

The bytes are copied out and the storage shrinks to 0 bytes, so parameters, views into gradient
buffers and optimizer state stay the same objects. torch reports a touched tensor of a part that is
away as a storage of size 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from megatron.core import parallel_state
from torch import Tensor, UntypedStorage

from megatron_rl.checkpoints.optimizer_shards import parts_of
from megatron_rl.models.build import TrainedModel

Part = Literal["parameters", "gradients", "optimizer"]
"""`optimizer` is main parameters of their own, as bf16 has them, and moments. Gradients come back as zeros: every step begins with that."""

PARTS: tuple[Part, ...] = get_args(Part)

PIECE_BYTES = 128 * 2**20
"""Host memory is page-locked in pieces of this size, because torch rounds each of them up to a power of two, and takes 16 GiB for 8.1."""


def piece_sizes(num_bytes: int) -> list[int]:
    """Return the sizes of the pieces of `num_bytes` in host memory: equal ones, and the rest."""
    whole, rest = divmod(num_bytes, PIECE_BYTES)
    return [PIECE_BYTES] * whole + [rest] * (rest > 0)


def page_locked_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes taken by page-locked pieces of the given sizes."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """A storage that is away: the size in bytes, and uint8 pieces in host memory, None where zeros are as good."""

    storage: UntypedStorage
    num_bytes: int
    host: list[Tensor] | None


class ModelMemory:
    """The device memory of one rank's share of `model`, in three parts, each here or away. No method is collective."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._device = next(model.chunks[0].parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._away: dict[Part, list[_Stored]] = {}
        # Page-locked memory is slow to get and never given back while the model lives.
        self._spare: dict[int, list[Tensor]] = {}

    @property
    def away(self) -> frozenset[Part]:
        """Return the parts that are away."""
        return frozenset(self._away)

    def num_bytes(self, part: Part) -> int:
        """Return the present bytes of `part` on the device; 0 while the part is away."""
        return sum(storage.nbytes() for storage in self._storages(part))

    def host_bytes(self) -> int:
        """Return the bytes of page-locked host memory of all parts while away."""
        kept = (storage.nbytes() for part in PARTS if part != "gradients" for storage in self._storages(part))
        return page_locked_bytes(size for num_bytes in kept for size in piece_sizes(num_bytes))

    @torch.no_grad()
    def put_away(self, parts: Iterable[Part] = PARTS) -> None:
        """Free the device memory of `parts`; parts already away stay away."""
        coming = [part for part in PARTS if part in set(parts) - self.away]
        if "gradients" in coming:
            # Main parameters hold gradients of their own between backward and step.
            self._model.optimizer.zero_grad()
        for part in coming:
            self._away[part] = [self._copy_out(storage, keep=part != "gradients") for storage in self._storages(part)]
        self._synchronize()
        for part in coming:
            for stored in self._away[part]:
                stored.storage.resize_(0)
        self._release_caches()

    @torch.no_grad()
    def take_back(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring `parts` back, bit for bit; parts already here stay unchanged."""
        returned = [stored for part in PARTS if part in set(parts) & self.away for stored in self._away.pop(part)]
        for stored in returned:
            stored.storage.resize_(stored.num_bytes)
            pieces = _pieces_of(stored.storage)
            if stored.host is None:
                for here in pieces:
                    here.zero_()
            else:
                for piece, here in zip(stored.host, pieces, strict=True):
                    here.copy_(piece, non_blocking=True)
        self._synchronize()
        for piece in (piece for stored in returned for piece in stored.host or ()):
            if piece.is_pinned():
                self._spare.setdefault(len(piece), []).append(piece)

    def _copy_out(self, storage: UntypedStorage, *, keep: bool) -> _Stored:
        if not storage.resizable():
            raise ValueError(f"a storage of {storage.nbytes()} bytes on {storage.device} belongs to somebody else and cannot be put away")
        num_bytes = storage.nbytes()
        if not keep:
            return _Stored(storage, num_bytes, None)
        spare, new = self._spare, partial(torch.empty, dtype=torch.uint8, pin_memory=self._on_gpu)
        host = [spare[size].pop() if spare.get(size) else new(size) for size in piece_sizes(num_bytes)]
        for piece, here in zip(host, _pieces_of(storage), strict=True):
            piece.copy_(here, non_blocking=True)
        return _Stored(storage, num_bytes, host)

    def _storages(self, part: Part) -> list[UntypedStorage]:
        """Return distinct storages of `part` on the device; the first part owns shared ones."""
        owners: dict[int, tuple[Part, UntypedStorage]] = {}
        for owner in PARTS:
            for tensor in _tensors(self._model, owner):
                if tensor.device == self._device:
                    storage = tensor.untyped_storage()
                    owners.setdefault(storage._cdata, (owner, storage))
        return [storage for owner, storage in owners.values() if owner == part]

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _release_caches(self) -> None:
        """Hand free memory to the other users of the device."""
        if self._on_gpu:
            # Sequence parallelism gathers activations into a buffer that megatron-core would keep for good.
            parallel_state.get_global_memory_buffer().buffer.clear()
            # SGLang answers for all ranks of an engine after the first rank lets go of a bucket. Memory freed later by other ranks is free
            # only after a check, and torch checks at its own lack of memory, not at the engine's.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def _pieces_of(storage: UntypedStorage) -> tuple[Tensor, ...]:
    """The whole storage as tensors [bytes] uint8 of `piece_sizes`."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.split(piece_sizes(storage.nbytes()))


def _tensors(model: TrainedModel, part: Part) -> Iterator[Tensor]:
    """Yield tensors in the storages of `part`, with repetitions."""
    if part == "optimizer":
        for owner in parts_of(model.optimizer):
            for group in owner.optimizer.param_groups:
                yield from group["params"]
            for state in owner.optimizer.state.values():
                yield from (value for name, value in state.items() if name != "step" and isinstance(value, Tensor))
        return
    for chunk in model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            whole = buffer.param_data if part == "parameters" else buffer.grad_data
            if whole is not None:
                yield whole
        if part == "parameters":
            yield from chunk.parameters()
