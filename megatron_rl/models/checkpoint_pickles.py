"""The pickles in a distributed checkpoint, read without running code that they may contain.

torch reads `.metadata` with `pickle.load` and the objects in the `.distcp` files with `torch.load(weights_only=False)`: both call whatever
a file names. Here `.metadata` is read by an unpickler that knows the records that torch and megatron-core write there and nothing else,
and objects are tensors, numbers, strings and their containers. `common.pt` is read that way upstream, unless an environment variable of
torch turns it off.
"""

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
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
LoadBytes = Callable[[DefaultLoadPlanner, ReadItem, io.BytesIO], None]
_UNSAFE_SWITCH = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class RecordsUnpickler(pickle.Unpickler):
    """Knows the records of `.metadata` and torch's dtypes; any other name in the file is an error before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or value of that name. Raises UnpicklingError."""
        if (module, name) not in _RECORDS and not (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no record of a checkpoint")
        return super().find_class(module, name)


class _Records(ModuleType):
    """Stands for the module `pickle` where torch reads and writes `.metadata`."""

    dump = staticmethod(pickle.dump)

    @staticmethod
    def load(file: io.BufferedIOBase) -> Any:
        return RecordsUnpickler(file).load()


def _after_a_look(load_bytes: LoadBytes) -> LoadBytes:
    """`DefaultLoadPlanner.load_bytes` that gets what has been read as plain data before, and refuses all else."""

    def load_plain(planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        load_bytes(planner, read_item, value)

    return load_plain


@contextmanager
def reading_records_only(directory: Path) -> Iterator[None]:
    """While the body runs, torch and megatron-core read the pickles of the checkpoint `directory` as this module says.

    Raises UserError for a file that holds anything else, also where the body's own errors report it.
    """
    backend = json.loads((directory / "metadata.json").read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise UserError(f"checkpoint {directory} has the format {backend!r}, needs 'torch_dist'; resume from a checkpoint of this program")
    switch = os.environ.pop(_UNSAFE_SWITCH, None)
    original_pickle, original_load = filesystem.pickle, DefaultLoadPlanner.load_bytes
    filesystem.pickle, DefaultLoadPlanner.load_bytes = _Records("pickle"), _after_a_look(original_load)  # type: ignore[method-assign,assignment]
    try:
        # At once as well, because torch reports a failure at this file without its cause.
        with (directory / ".metadata").open("rb") as file:
            RecordsUnpickler(file).load()
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"a file of checkpoint {directory} holds more than the records of a checkpoint ({str(error).splitlines()[0]}), so it was not "
            f"read; whoever can write there can run code as you: resume from a checkpoint that only you could write"
        ) from error
    finally:
        filesystem.pickle, DefaultLoadPlanner.load_bytes = original_pickle, original_load  # type: ignore[method-assign]
        if switch is not None:
            os.environ[_UNSAFE_SWITCH] = switch
