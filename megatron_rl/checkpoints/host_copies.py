"""Copies of tensors in host memory, to be written while the tensors go on changing.

The kernel takes several times as long to provide the memory as the copying takes. So the memory is
requested in large pages and kept.
"""

import mmap
import threading
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

_LARGE_PAGE_BYTES = 2**21


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor`, of any shape, in host memory."""
    return _new(tensor).copy_(tensor.detach())


def _new(like: Tensor) -> Tensor:
    """Host memory for the numbers of `like`."""
    if like.nbytes < 2 * _LARGE_PAGE_BYTES:
        return torch.empty(like.shape, dtype=like.dtype)
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without large pages reports an error and gives small ones.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


class HostCopies:
    """Host memory for copies of one state after the other. Several threads may make copies at once."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []
        self._lock = threading.Lock()

    def copies_of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return a copy of each of `tensors`; the caller gives the copies back after use."""
        with self._lock:
            # Two saves at once must not have the same memory.
            spare, self._spare = self._spare, []
        copies: list[Tensor] = []
        for tensor in tensors:
            place = spare[len(copies)] if len(copies) < len(spare) else None
            if place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype):
                copies.append(place.copy_(tensor.detach()))
            else:
                copies.append(host_copy(tensor))
        return copies

    def give_back(self, copies: list[Tensor]) -> None:
        """Let the next state have the memory of `copies`."""
        with self._lock:
            self._spare = copies
