"""Megatron-Core's distributed checkpoints (`torch_dist`) read tensor by tensor in one process.

`.metadata` says of each tensor which chunks it has and where in which file they are. A chunk is stored as torch.save writes it.
"""

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_rl.errors import UserError
from megatron_rl.models.checkpoint_pickles import RecordsUnpickler


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: where it starts in the tensor, its sizes, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    num_bytes: int


def is_torch_dist(path: Path) -> bool:
    """Whether the directory `path` holds a distributed checkpoint."""
    return (path / ".metadata").is_file() and (path / "metadata.json").is_file()


class TorchDist:
    """The tensors of a distributed checkpoint by their keys."""

    def __init__(self, path: Path) -> None:
        """Read what is stored where. Raises UserError for another format, for missing files and for files that are cut off."""
        self.path = path
        backend = json.loads((path / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend")
        if backend != "torch_dist":
            raise UserError(f"checkpoint {path} has the format {backend!r}, needs 'torch_dist'; save it again in that format")
        metadata = _read_metadata(path / ".metadata")
        self._tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        stored = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        self._chunks = {key: [_chunk(path, key, chunk, stored) for chunk in entry.chunks] for key, entry in self._tensors.items()}
        self._check_files()

    def keys(self) -> set[str]:
        """Keys of all tensors."""
        return set(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """The whole shape [...] of a tensor."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor."""
        dtype: torch.dtype = self._tensors[key].properties.dtype
        return dtype

    def read(self, key: str, at: Sequence[int] = ()) -> Tensor:
        """A whole tensor, of any shape, or what its first dimensions have at the indices `at`.

        Raises UserError when a part of it is in no chunk, or its file is damaged.
        """
        shape = self.shape(key)
        chunks = [chunk for chunk in self._chunks[key] if all(map(_covers, chunk.offsets, chunk.sizes, at))]
        rest = shape[len(at) :]
        result: Tensor | None = None
        filled = 0
        for chunk in chunks:
            index = tuple(place - offset for place, offset in zip(at, chunk.offsets, strict=False))
            part = self._read_chunk(key, chunk)[index]
            filled += part.numel()
            if tuple(part.shape) == rest:
                result = part
                continue
            if result is None:
                # What no chunk fills shows, also where others overlap and the count is right.
                result = torch.full(rest, float("nan") if self.dtype(key).is_floating_point else 0, dtype=self.dtype(key))
            offsets = chunk.offsets[len(at) :]
            result[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
        if filled != math.prod(rest) or result is None:
            raise UserError(
                f"{key} of checkpoint {self.path} has {filled:,} of {math.prod(rest):,} numbers in its files; a rank's part was not saved: "
                "take another checkpoint"
            )
        return result

    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        try:
            with (self.path / chunk.file).open("rb") as file:
                part = cast("IO[bytes]", _create_file_view(file, chunk.position, chunk.num_bytes))
                tensor = torch.load(part, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"cannot read {key} from {self.path / chunk.file}: {reason}; take another checkpoint") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes or tensor.dtype != self.dtype(key):
            raise UserError(f"{key} in {self.path / chunk.file} is not what .metadata says; take another checkpoint")
        return tensor

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for chunk in (chunk for chunks in self._chunks.values() for chunk in chunks):
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.position + chunk.num_bytes)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise UserError(f"checkpoint {self.path} lacks the file {name}, which its .metadata names; copy the checkpoint again")
            size = file.stat().st_size
            if size < end:
                raise UserError(f"{file} is cut off: it has {size:,} bytes, needs {end:,}; copy the checkpoint again")


def _covers(offset: int, size: int, place: int) -> bool:
    return offset <= place < offset + size


def _chunk(path: Path, key: str, chunk: Any, stored: dict[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    info = stored.get((key, tuple(chunk.offsets)))
    if info is None:
        raise UserError(f"{path / '.metadata'} does not say where the part of {key} at {tuple(chunk.offsets)} is; take another checkpoint")
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length)


def _read_metadata(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            metadata = RecordsUnpickler(stream).load()
    except (pickle.UnpicklingError, EOFError, ImportError) as error:
        raise UserError(f"{file} holds more or less than the records of a checkpoint ({error}), so it was not read") from error
    assert isinstance(metadata, Metadata), f"{file} holds a {type(metadata).__name__}"
    return metadata
