"""Reading a checkpoint's tensors from their files into the very memory that they are for.

Upstream's reader has each tensor read into memory of its own, which the kernel takes longer to provide than the bytes take to read, and
copies it from there.
"""

import io
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.nn import Module

from megatron_rl.models.tensor_writing import raw_bytes
from megatron_rl.models.torch_dist import stored_tensor


@contextmanager
def reading_in_place() -> Iterator[None]:
    """While the body runs, torch's reader of distributed checkpoints is the one of this module: upstream lets nobody choose another."""
    original = FileSystemReader.read_data
    FileSystemReader.read_data = _read_data  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        FileSystemReader.read_data = original  # type: ignore[method-assign]


def _read_data(reader: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
    """Fill what is planned, from the start of each file to its end."""
    places = [(reader.storage_data[item.storage_index], item) for item in plan.items]
    places.sort(key=lambda place: (place[0].relative_path, place[0].offset))
    known: dict[bytes, Any] = {}
    for name, of_file in itertools.groupby(places, key=lambda place: place[0].relative_path):
        with (
            (Path(reader.path) / name).open("rb", buffering=0) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as pages,
        ):
            for info, item in of_file:
                with pages[info.offset : info.offset + info.length] as stored:
                    if item.type is LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(stored))
                    else:
                        _fill(planner, item, stored_tensor(stored, known), partial(_read, file, info.offset))
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _fill(planner: LoadPlanner, item: ReadItem, stored: tuple[int, int, Any], read: Callable[[int, Tensor], None]) -> None:
    """Fill the tensor of `item` from a `stored_tensor`, whose memory may be used; `read` fills a tensor from a byte of it on."""
    start, _, whole = stored
    part = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item).detach()
    assert target.shape == part.shape, f"{item.storage_index} is of {tuple(part.shape)}, wanted as {tuple(target.shape)}"
    if not part.is_contiguous():
        read(start, torch.empty(0, dtype=torch.uint8).set_(whole.untyped_storage()))
        target.copy_(part)
    else:
        start += int(part.storage_offset()) * part.element_size()
        in_place = target.is_contiguous() and (target.device, target.dtype) == (part.device, part.dtype)
        read(start, target if in_place else part)
        if not in_place:
            target.copy_(part)
    planner.commit_tensor(item, target)


def _read(file: FileIO, base: int, start: int, numbers: Tensor) -> None:
    """Fill a contiguous tensor on the CPU from the bytes of `file` behind `base` + `start`. Raises EOFError."""
    left, start = raw_bytes(numbers), base + start
    while left:
        count = os.preadv(file.fileno(), [left], start)
        if not count:
            raise EOFError(f"{file.name} ends at byte {start:,}, {len(left):,} too early")
        left, start = left[count:], start + count


def without_merges(state: Any) -> Any:
    """Megatron's sharded `state` of a model whose parameters that are stored in parts, as gate and up, are not put together anew.

    The parts are read into the parameter itself; upstream makes another one of them.
    """
    if isinstance(state, dict):
        return {name: without_merges(entry) for name, entry in state.items()}
    if not isinstance(state, ShardedTensorFactory):
        return state
    merge, whole = state.merge_fn, state.data

    def merged(parts: Any) -> Any:
        return whole if isinstance(parts, list) and _in_place(parts, whole) else merge(parts)

    return replace(state, merge_fn=merged)


def _in_place(parts: list[Tensor], whole: Tensor) -> bool:
    """Whether `parts`, one behind the other, are the memory of `whole`."""
    starts = itertools.accumulate((part.nbytes for part in parts), initial=whole.data_ptr())
    same = all(part.data_ptr() == start and part.is_contiguous() for part, start in zip(parts, starts, strict=False))
    return same and whole.is_contiguous() and sum(part.nbytes for part in parts) == whole.nbytes


def load_what_is_apart(module: Module, loaded: dict[str, Any]) -> None:
    """`module.load_state_dict(loaded)` that leaves alone what was read into the module's own tensors."""
    own = module.state_dict(keep_vars=True)
    here = {name for name, value in loaded.items() if isinstance(value, Tensor) and name in own and _in_place([value], own[name])}
    missing, unexpected = module.load_state_dict({name: value for name, value in loaded.items() if name not in here}, strict=False)
    assert set(missing) <= here and not unexpected, f"the checkpoint lacks {sorted(set(missing) - here)}, or has {unexpected} too many"
