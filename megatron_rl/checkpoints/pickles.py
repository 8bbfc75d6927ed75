"""The pickles in a distributed checkpoint, read without running any code named inside.

torch reads `.metadata` with `pickle.load` and the objects in `.distcp` files with
`torch.load(weights_only=False)`. Both call anything named by a file. Here an unpickler limited to
the records of torch reads `.metadata`, and objects are tensors, numbers, strings and their
containers. Upstream reads `common.pt` in the same safe way, unless an environment variable of torch
turns the safety off.
"""

import enum
import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megatron_rl.errors import UserError

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
_load_bytes = DefaultLoadPlanner.load_bytes


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


class _Records(ModuleType):
    """Stand for the module `pickle` in torch's reading and writing of `.metadata`."""

    dump = staticmethod(pickle.dump)

    @staticmethod
    def load(file: io.BufferedIOBase) -> Any:
        return RecordsUnpickler(file).load()


def _load_plain_bytes(planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Read an object as plain data before `DefaultLoadPlanner.load_bytes` does."""
    torch.load(value, weights_only=True)
    value.seek(0)
    _load_bytes(planner, read_item, value)


@contextmanager
def reading_records_only(directory: Path) -> Iterator[None]:
    """Have torch and megatron-core read the pickles of `directory` under this module's limits.

    Raises UserError for a file with any other content.
    """
    switch = os.environ.pop(_UNSAFE_SWITCH, None)
    filesystem.pickle, DefaultLoadPlanner.load_bytes = _Records("pickle"), _load_plain_bytes  # type: ignore[method-assign,assignment]
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"a file of checkpoint {directory} holds more than the records of a checkpoint ({str(error).splitlines()[0]}), "
            "so it was not read; whoever can write there can run code as you: take a checkpoint that only you could write"
        ) from error
    finally:
        filesystem.pickle, DefaultLoadPlanner.load_bytes = pickle, _load_bytes  # type: ignore[method-assign]
        if switch is not None:
            os.environ[_UNSAFE_SWITCH] = switch


def check_format(directory: Path) -> None:
    """Raise UserError unless metadata.json of `directory` names the format read by megatron-core.

    `directory` is a distributed checkpoint.
    """
    try:
        named = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{directory / 'metadata.json'} cannot be read ({error}); copy the checkpoint again") from error
    named = named if isinstance(named, dict) else {}
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
    check_format(directory)
    try:
        with reading_records_only(directory):
            return filesystem.FileSystemReader(directory).read_metadata()
    except (EOFError, ImportError) as error:
        raise UserError(f"{directory / '.metadata'} holds less than the records of a checkpoint ({error}); take another one") from error
