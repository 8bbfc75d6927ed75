"""Tensors written from where they are in memory, without a copy: one as torch.save writes it, and the header of a safetensors file."""

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_rl.models.tensor_files import DTYPES

_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of `tensor`, of any shape, on the CPU; its own memory where it is contiguous.

    Not through `Tensor.numpy`, after which torch lets nobody resize that memory any more, as whoever puts a model away does.
    """
    own = tensor.detach().contiguous()
    found = (ctypes.c_ubyte * own.nbytes).from_address(own.data_ptr())
    # Whoever has the view has the memory.
    found.owner = own  # type: ignore[attr-defined]
    return memoryview(found).cast("B")


def save_tensor(tensor: Tensor, stream: IO[bytes]) -> None:
    """Write `tensor`, of any shape, as torch.save does, but neither more of the memory behind a view than its own numbers nor checksums.

    torch's CRC of the numbers takes longer than hashing and writing them, and nothing reads it.
    """
    own = tensor.detach()
    if own.untyped_storage().nbytes() != own.nbytes:
        own = torch.frombuffer(raw_bytes(own), dtype=own.dtype).view(own.shape) if own.numel() else own.clone()
    with _without_checksums():
        torch.save(own, stream)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch keeps this switch for each thread apart, so nobody else's files change, and whoever writes has to set it himself."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def safetensors_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What stands in a safetensors file before the numbers of `tensors` (name, dtype, shape), which follow one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
