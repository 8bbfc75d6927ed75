"""Megatron-Core's distributed checkpoints (`torch_dist`) read tensor by tensor in one process.

`.metadata` says of each tensor which chunks it has and where in which file they are. A chunk is stored as torch.save writes it.
"""

import io
import json
import math
import mmap
import pickle
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_rl.errors import UserError
from megatron_rl.models.checkpoint_manifest import check_descriptions
from megatron_rl.models.checkpoint_pickles import RecordsUnpickler

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a file in a zip archive: at its end the bytes of the name and of the extra field that follow it."""


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
        # A pickle with another bit can do anything to the process.
        check_descriptions(path)
        backend = json.loads((path / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend")
        if backend != "torch_dist":
            raise UserError(f"checkpoint {path} has the format {backend!r}, needs 'torch_dist'; save it again in that format")
        metadata = _read_metadata(path / ".metadata")
        self._tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        stored = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        self._chunks = {key: [_chunk(path, key, chunk, stored) for chunk in entry.chunks] for key, entry in self._tensors.items()}
        self._check_files()
        self._mapped: dict[str, mmap.mmap] = {}
        self._known: dict[bytes, Any] = {}

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
            part = self._read_chunk(key, chunk, index)
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

    def _read_chunk(self, key: str, chunk: Chunk, index: tuple[int, ...]) -> Tensor:
        """What the first dimensions of the chunk have at `index`, in the file's own pages: only those that somebody looks at are read."""
        try:
            pages = self._pages(chunk.file)
            start, num_bytes, tensor = stored_tensor(memoryview(pages)[chunk.position : chunk.position + chunk.num_bytes], self._known)
        except (OSError, RuntimeError, EOFError, ValueError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"cannot read {key} from {self.path / chunk.file}: {reason}; take another checkpoint") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes or tensor.dtype != self.dtype(key):
            raise UserError(f"{key} in {self.path / chunk.file} is not what .metadata says; take another checkpoint")
        part, size = tensor[index], tensor.element_size()
        first = part.storage_offset() if part.is_contiguous() else 0
        count = part.numel() * size if part.is_contiguous() else num_bytes
        stored = torch.frombuffer(pages, dtype=torch.uint8, count=count, offset=chunk.position + start + int(first) * size)
        if stored.data_ptr() % size:
            # Other programs put one chunk behind the other wherever it ends.
            stored = stored.clone()
        return stored.view(tensor.dtype).as_strided(part.shape, part.stride(), part.storage_offset() - first)

    def _pages(self, name: str) -> mmap.mmap:
        if name not in self._mapped:
            with (self.path / name).open("rb") as file:
                # Private, because torch has no tensors that cannot be written.
                self._mapped[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapped[name]

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


class _Part(io.RawIOBase):
    """The bytes `data` as a file, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def stored_tensor(data: memoryview, known: dict[bytes, Any]) -> tuple[int, int, Any]:
    """Where in what torch.save wrote the numbers of its one tensor are, their bytes, and the tensor with any numbers. Raises ValueError.

    Tensors of one shape and dtype are described by the same bytes, which take torch longer to read than what small ones hold: `known`
    keeps the tensor of each description from one call to the next, and so is shared by all that fit it.
    """
    with zipfile.ZipFile(cast("IO[bytes]", _Part(data))) as archive:
        records = archive.infolist()
    numbers = [record for record in records if "/data/" in record.filename]
    if len(numbers) != 1 or numbers[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"it holds {len(numbers)} tensors, needs one that is not compressed")
    descriptions = [record for record in records if record.filename.endswith("/data.pkl")]
    start = _content(data, descriptions[0]) if descriptions else 0
    description = bytes(data[start : start + descriptions[0].file_size]) if descriptions else b""
    if description not in known:
        with torch.serialization.skip_data():
            known[description] = torch.load(cast("IO[bytes]", _Part(data)), weights_only=True, map_location="cpu")
    return _content(data, numbers[0]), numbers[0].file_size, known[description]


def _content(data: memoryview, record: zipfile.ZipInfo) -> int:
    """Where the content of a record begins."""
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(data, record.header_offset)
    return record.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


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
