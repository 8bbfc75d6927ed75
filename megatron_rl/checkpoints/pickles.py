"""A distributed checkpoint, read in place and without running any code named inside.

torch reads `.metadata` with `pickle.load` and the objects in `.distcp` files with `torch.load(weights_only=False)`.
Both call anything named by a file. Here an unpickler limited to the records of torch reads `.metadata`, and objects
are tensors, numbers, strings and their containers. Upstream reads `common.pt` in the same safe way, unless an
environment variable of torch turns the safety off.
"""

import enum
import io
import mmap
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import read_object

_RECORDS = {
    (filesystem.__name__, "_StorageInfo"),
    *((metadata.__name__, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((metadata.__name__, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
"""The content of metadata.json of a distributed checkpoint."""
_UNSAFE_SWITCH = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def _member(kind: Any, name: str) -> enum.Enum:
    """Return a member of an enumeration, which Python before 3.11.4 pickles as a call of `getattr`."""
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it names {name} of {kind}, which is no member of an enumeration")
    return kind[name]


class RecordsUnpickler(pickle.Unpickler):
    """Find the records of `.metadata` and torch's dtypes; raise at any other name before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or value of this name. Raises UnpicklingError."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _RECORDS and not (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no record of a checkpoint")
        return super().find_class(module, name)


def stored_part(reader: FileSystemReader, item: ReadItem) -> Tensor:
    """Return the part, of any shape, of a stored tensor for `item`, in the file's own pages, from any byte on.

    torch's own reading fills new memory and copies from there, at twice the time. Raises ValueError when the
    tensor is not within its place in the file.
    """
    info = reader.storage_data[item.storage_index]
    with (Path(reader.path) / info.relative_path).open("rb") as file:
        view = reader._slice_file(file, info)
        with torch.serialization.skip_data():
            stored = torch.load(view, map_location="cpu", weights_only=True)
        if not isinstance(stored, Tensor):
            raise ValueError("it holds no tensor")
        part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
        if not part.numel():
            return part
        view.seek(0)
        start = int(torch._C.PyTorchFileReader(view).get_record_offset("data/0"))  # type: ignore[attr-defined]
        start += int(part.storage_offset()) * part.itemsize
        count = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        if start + count * part.itemsize > info.length:
            raise ValueError("a tensor ends behind its place in the file")
        skipped = (info.offset + start) % mmap.ALLOCATIONGRANULARITY
        first = info.offset + start - skipped
        pages = mmap.mmap(file.fileno(), skipped + count * part.itemsize, access=mmap.ACCESS_COPY, offset=first)
    numbers = torch.frombuffer(pages, dtype=part.dtype, count=count, offset=skipped)
    return numbers.as_strided(part.shape, part.stride())


def _read_data(reader: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
    """Fill the tensors of `plan` in their own memory; read objects as plain data before the planner does."""
    for item in plan.items:
        if item.type is LoadItemType.BYTE_IO:
            info = reader.storage_data[item.storage_index]
            with (Path(reader.path) / info.relative_path).open("rb") as file:
                value = io.BytesIO(reader._slice_file(file, info).read())
            torch.load(value, weights_only=True)
            value.seek(0)
            planner.load_bytes(item, value)
        else:
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored_part(reader, item))
            planner.commit_tensor(item, target)
    done: Future[None] = Future()
    done.set_result(None)
    return done


@contextmanager
def reading_records_only(directory: Path) -> Iterator[None]:
    """Have torch and megatron-core read `directory` by this module. Raises UserError for any other content."""
    switch, read_data = os.environ.pop(_UNSAFE_SWITCH, None), FileSystemReader.read_data
    # In place of the module `pickle` in torch's reading and writing of `.metadata`.
    filesystem.pickle = SimpleNamespace(dump=pickle.dump, load=lambda file: RecordsUnpickler(file).load())  # type: ignore[assignment]
    FileSystemReader.read_data = _read_data  # type: ignore[method-assign,assignment]
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"a file of checkpoint {directory} holds more than the records of a checkpoint ({str(error).splitlines()[0]}), "
            "so it was not read; anyone who can write there can run code as you: take a checkpoint that only you could write"
        ) from error
    finally:
        filesystem.pickle, FileSystemReader.read_data = pickle, read_data  # type: ignore[method-assign]
        if switch is not None:
            os.environ[_UNSAFE_SWITCH] = switch


def _check_format(directory: Path) -> None:
    """Raise UserError unless metadata.json in `directory` names the format read by megatron-core."""
    named = read_object(directory / "metadata.json", fix="copy the checkpoint again")
    for key, needed in FORMAT.items():
        # When absent, the last three have megatron-core's default.
        got = named.get(key, None if key == "sharded_backend" else needed)
        if got != needed:
            raise UserError(
                f"checkpoint {directory} has the {key} {got!r} in metadata.json, needs {needed!r}; take one that this program has written, "
                "or save it again in that format"
            )


def read_metadata(directory: Path) -> metadata.Metadata:
    """Return the places of tensors in the checkpoint `directory`. Raises UserError for one of another format or cut off."""
    _check_format(directory)
    try:
        with reading_records_only(directory):
            return FileSystemReader(directory).read_metadata()
    except (EOFError, ImportError, AttributeError) as error:
        raise UserError(f"{directory / '.metadata'} holds less than the records of a checkpoint ({error}); take another one") from error
