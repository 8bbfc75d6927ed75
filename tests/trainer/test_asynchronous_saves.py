"""A save whose files are written while the training goes on has the state of the moment at which it began."""

import io
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import UserError
from megatron_rl.models.checkpoint_manifest import entry_of
from megatron_rl.training import checkpoint_writer, policy_export
from megatron_rl.training.host_copies import HostCopies, host_copy
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

SUPERVISED = {"policy_loss": "sft"}


def train(trainer: Trainer) -> None:
    batch = TrainBatch.from_sequences(prompts=[[3, 4], [5]], responses=[[6, 7, 8], [9, 3]], rewards=[0.0, 0.0])
    trainer.train(batch)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the weights and of the optimizer's moments."""
    weights = {name: tensor.clone() for name, tensor in trainer.weights()}
    (part,) = trainer._model.optimizer.chained_optimizers
    states = enumerate(part.optimizer.state.values())
    return weights | {f"{index} {name}": tensor.clone() for index, state in states for name, tensor in state.items()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    gate = threading.Event()

    def held(function: Callable[..., None]) -> Callable[..., None]:
        def write(*arguments: object, **keywords: object) -> None:
            assert gate.wait(timeout=30)
            function(*arguments, **keywords)

        return write

    monkeypatch.setattr(checkpoint_writer.TwoHalves, "_write", held(checkpoint_writer.TwoHalves._write))
    monkeypatch.setattr(policy_export.Exporting, "_write", held(policy_export.Exporting._write))
    return gate


@pytest.mark.parametrize("training", [{}, {"optimizer": {"lr": 1e-2, "use_distributed_optimizer": True}}], ids=["", "distopt"])
def test_each_save_has_the_state_at_which_it_began(
    make_trainer: Callable[..., Trainer],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    gate: threading.Event,
    training: dict[str, object],
) -> None:
    model = tiny_model()
    trainer, handed_over = make_trainer(model, SUPERVISED, **training), []
    for number in range(2):
        gate.clear()
        train(trainer)
        handed_over.append(state_of(trainer))
        trainer.begin_save(tmp_path / f"{number}")
        trainer.begin_save_hf(tmp_path / f"{number}-hf")
        train(trainer)
        assert not trainer.saves_are_written and not (tmp_path / f"{number}").exists() and not (tmp_path / f"{number}-hf").exists()
        gate.set()
        trainer.finish_saves()
        assert trainer.saves_are_written
    resumed = make_trainer(model, SUPERVISED, **training)
    for number in range(2):
        resumed.load(tmp_path / f"{number}")
        assert_equal(state_of(resumed), handed_over[number])
        exported = load_file(tmp_path / f"{number}-hf" / "model.safetensors")
        assert_equal(exported, {name: tensor for name, tensor in handed_over[number].items() if name in exported})
        assert "model.embed_tokens.weight" in exported
    assert not any(torch.equal(tensor, handed_over[1][name]) for name, tensor in handed_over[0].items() if tensor.ndim > 1)


@pytest.mark.parametrize("which", ["begin_save", "begin_save_hf"])
def test_a_save_that_fails_is_told_by_its_end_and_leaves_nothing_under_its_name(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(checkpoint_writer, "write_items", full)
    monkeypatch.setattr("megatron_rl.models.hf_files._write_shards", full)
    getattr(trainer, which)(tmp_path / "saved")
    train(trainer)
    with pytest.raises(UserError, match="No space left on device"):
        trainer.finish_saves()
    assert not (tmp_path / "saved").exists()
    # Told once.
    trainer.finish_saves()
    monkeypatch.undo()
    getattr(trainer, which)(tmp_path / "saved")
    trainer.finish_saves()
    assert (tmp_path / "saved").is_dir()


def test_an_export_waits_for_the_disk_where_memory_is_short(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    want = {name: tensor.clone() for name, tensor in trainer.weights()}
    held = []
    append = policy_export.Exporting._next_weights

    def watched(self: policy_export.Exporting):  # type: ignore[no-untyped-def]
        for name, tensor in append(self):
            held.append(self._held_bytes)
            yield name, tensor

    monkeypatch.setattr(policy_export.Exporting, "_next_weights", watched)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 0}))
    trainer.save_hf(tmp_path / "hf")
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), want)
    assert max(held) <= max(tensor.nbytes for tensor in want.values())


def test_weights_that_cannot_be_gathered_are_not_written(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)

    def broken(**_):  # type: ignore[no-untyped-def]
        yield "model.norm.weight", torch.zeros(2)
        raise RuntimeError("a rank is gone")

    trainer.weights = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a rank is gone"):
        trainer.begin_save_hf(tmp_path / "hf")
    for thread in threading.enumerate():
        if thread.name == "export writer":
            thread.join(timeout=30)
    assert not (tmp_path / "hf").exists()


def test_one_save_after_the_other_has_the_same_host_memory_and_two_at_once_do_not() -> None:
    def taken(value: float, *sizes: int) -> list[torch.Tensor]:
        return copies.copies_of(torch.full((size,), value) for size in sizes)

    copies = HostCopies()
    first = taken(1, 3, 4)
    second = taken(2, 3, 4)
    assert [tensor.tolist() for tensor in first] == [[1] * 3, [1] * 4], "it is still being written"
    copies.give_back(first)
    third = taken(3, 3, 5, 6)
    assert third[0] is first[0] and taken(4, 3)[0] is not first[0]
    assert [tensor.tolist() for tensor in (*second, *third)] == [[2] * 3, [2] * 4, [3] * 3, [3] * 5, [3] * 6]


@pytest.mark.parametrize("numel", [0, 7, 2**21 + 1])
def test_a_copy_has_memory_of_its_own(numel: int) -> None:
    """In small pages or in large ones."""
    column = torch.arange(2 * numel, dtype=torch.int16).view(-1, 2)[:, 1]
    copy = host_copy(column)
    assert torch.equal(copy, column) and copy.is_contiguous() and copy.untyped_storage().nbytes() == copy.nbytes
    column += 1
    assert not numel or not torch.equal(copy, column)


def test_a_file_has_each_item_where_the_index_says_and_its_hash(tmp_path: Path) -> None:
    """A view without the memory around it, aligned so that it can be used where it is."""
    flat = torch.arange(4096, dtype=torch.int64)
    data = {"view": flat[8:20].view(3, 4), "empty": flat[:0], "object": io.BytesIO(b"more"), "column": flat.view(64, 64)[:, 1]}
    items: Any = [SimpleNamespace(index=name) for name in data]
    planner: Any = SimpleNamespace(resolve_data=lambda item: data[item.index])
    written, entry = checkpoint_writer.write_items(tmp_path / "file", items, planner)
    assert entry == entry_of(tmp_path / "file")
    content, parts = (tmp_path / "file").read_bytes(), {}
    for result in written:
        place = result.storage_data
        assert place.offset % 64 == 0 and place.relative_path == "file" and place.length == result.size_in_bytes
        parts[result.index] = content[place.offset : place.offset + place.length]
    assert parts["object"] == b"more" and all(len(part) < 4000 for part in parts.values())
    for name in ("view", "empty", "column"):
        assert torch.equal(torch.load(io.BytesIO(parts[name]), weights_only=True), data[name])
