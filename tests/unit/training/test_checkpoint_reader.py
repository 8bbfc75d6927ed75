"""What a checkpoint's file holds is read into the memory that it is for, whatever part of it is wanted and however that lies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType

from megatron_rl.training.checkpoint_reader import load_what_is_apart, reading_in_place, without_merges
from megatron_rl.training.checkpoint_writer import write_items

STORED = {"a": torch.randn(6, 8), "b": torch.arange(24).view(4, 6).T, "c": torch.randn(5).bfloat16(), "like a": torch.randn(6, 8)}
DTYPES = (torch.float32, torch.bfloat16)
TARGETS = {
    "whole": ("a", (0, 0), torch.empty(6, 8)),
    "rows": ("a", (2, 0), torch.empty(3, 8)),
    "columns": ("a", (0, 5), torch.empty(6, 2)),
    "a view": ("a", (1, 0), torch.empty(4, 9)[:, :8]),
    "another dtype": ("a", (4, 0), torch.empty(2, 8, dtype=torch.bfloat16)),
    "stored by columns": ("b", (0, 1), torch.empty(6, 2, dtype=torch.int64)),
    "one row of those": ("b", (2, 0), torch.empty(1, 4, dtype=torch.int64)),
    "bfloat16": ("c", (1,), torch.empty(3, dtype=torch.bfloat16)),
}


def read(directory: Path, wanted: dict[str, tuple[str, tuple[int, ...], Tensor]]) -> list[str]:
    """Read what is `wanted`; the names in the order in which they were committed."""
    stored: Any = [SimpleNamespace(index=name) for name in STORED]
    written, _ = write_items(directory / "file", stored, STORED.values())
    items, committed = [], []
    for name, (key, offsets, target) in wanted.items():
        kind = LoadItemType.TENSOR
        items.append(SimpleNamespace(storage_index=key, storage_offsets=offsets, lengths=tuple(target.shape), type=kind, name=name))
    planner: Any = SimpleNamespace(
        resolve_tensor=lambda item: wanted[item.name][2], commit_tensor=lambda item, tensor: committed.append(item.name)
    )
    with reading_in_place():
        reader = FileSystemReader(directory)
        reader.storage_data = {result.index: result.storage_data for result in written}
        reader.read_data(SimpleNamespace(items=items), planner).value()  # type: ignore[arg-type]
    return committed


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_gets_its_part(tmp_path: Path, name: str) -> None:
    key, offsets, target = TARGETS[name]
    assert read(tmp_path, {name: TARGETS[name]}) == [name]
    part = STORED[key][tuple(slice(start, start + size) for start, size in zip(offsets, target.shape, strict=True))]
    assert torch.equal(target, part.to(target.dtype))


def test_a_file_is_read_from_its_start_to_its_end_and_torch_has_its_reader_back(tmp_path: Path) -> None:
    before = FileSystemReader.read_data
    assert read(tmp_path, {name: TARGETS[name] for name in ("bfloat16", "stored by columns", "whole")}) == [
        "whole",
        "stored by columns",
        "bfloat16",
    ]
    assert FileSystemReader.read_data is before


def test_tensors_of_one_shape_and_dtype_are_told_apart_although_their_description_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: loads.append(load(*arguments, **options)) or loads[-1])
    wanted: dict[str, Any] = {
        f"{key} as {dtype}": (key, (0, 0), torch.empty(6, 8, dtype=dtype)) for key in ("a", "like a") for dtype in DTYPES
    }
    read(tmp_path, wanted)
    assert all(torch.equal(target, STORED[key].to(target.dtype)) for key, _, target in wanted.values()) and len(loads) == 1


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(EOFError, match=r"file ends at byte [0-9,]+, 192 too early"):
        read(tmp_path, {"whole": TARGETS["whole"]})


def test_parts_that_were_read_in_place_are_not_put_together_anew() -> None:
    whole = torch.randn(4, 3)
    factory = ShardedTensorFactory("key", whole, lambda *_: None, torch.cat)
    merge = without_merges({"chunk": {"name": factory, "other": 3}})["chunk"]["name"].merge_fn
    assert merge(list(whole.chunk(2))) is whole
    first, second = whole.chunk(2)
    for parts in ([first, second.clone()], [second, first], [first]):
        assert merge(parts) is not whole and torch.equal(merge(parts), torch.cat(parts))


def test_only_what_is_apart_is_copied_and_nothing_may_lack() -> None:
    module = torch.nn.Linear(3, 2)
    weight, other = module.weight, torch.randn(2)
    load_what_is_apart(module, {"weight": weight, "bias": other})
    assert module.weight is weight and torch.equal(module.bias, other)
    load_what_is_apart(module, {"weight": torch.ones(2, 3), "bias": other})
    assert torch.equal(module.weight, torch.ones(2, 3))
    with pytest.raises(AssertionError, match=r"lacks \['bias'\]"):
        load_what_is_apart(module, {"weight": weight})
    with pytest.raises(AssertionError, match=r"has \['more'\] too many"):
        load_what_is_apart(module, {"weight": weight, "bias": other, "more": other})
