"""A save whose files are written while the training goes on has the state of the moment at which it began."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter

from megatron_rl.checkpoints import saving
from megatron_rl.checkpoints.optimizer_shards import parts_of
from megatron_rl.checkpoints.saving import HostCopies, Saving
from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.errors import UserError
from megatron_rl.training.trainer import Trainer

SUPERVISED = {"policy_loss": "sft"}
WITH_CRITIC = {"advantage": {"kind": "gae"}}
BATCH = batch_from_sequences(prompts=[[3, 4], [5]], responses=[[6, 7, 8], [9, 3]], rewards=[0.0, 1.0])


def train(trainer: Trainer) -> None:
    trainer.train(BATCH)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the weights and of the optimizers' moments."""
    state = {name: tensor.clone() for name, tensor in trainer.weights()}
    for model, trained in trainer.trained_models().items():
        for chunk in trained.chunks:
            state |= {f"{model} {name}": parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        for part in parts_of(trained.optimizer):
            for index, moments in enumerate(part.optimizer.state.values()):
                state |= {f"{model} {index} {name}": tensor.clone() for name, tensor in moments.items()}
    return state


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []


def held(function: Callable[..., Any], gate: threading.Event) -> Callable[..., Any]:
    """`function`, which begins when the gate is open."""

    def wait_and_call(*arguments: object, **keywords: object) -> object:
        assert gate.wait(timeout=30)
        return function(*arguments, **keywords)

    return wait_and_call


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    gate = threading.Event()
    monkeypatch.setattr(FileSystemWriter, "write_data", held(FileSystemWriter.write_data, gate))
    monkeypatch.setattr(saving, "save_hf", held(saving.save_hf, gate))
    return gate


class Asked:
    """Nothing is copied until somebody has waited for the copies for a moment: whoever does not wait is too early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_copy = threading.Event()
        self.waited = False
        wait_for_copies = Saving.wait_for_copies

        def wait(saved: Saving) -> None:
            self.waited = True
            threading.Timer(0.05, self._may_copy.set).start()
            wait_for_copies(saved)

        monkeypatch.setattr(Saving, "wait_for_copies", wait)
        monkeypatch.setattr(HostCopies, "copy", held(HostCopies.copy, self._may_copy))

    def forget(self) -> None:
        self.waited = False
        self._may_copy.clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


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
        trainer.begin_save(tmp_path / f"{number}", hf=tmp_path / f"{number}-hf")
        train(trainer)
        assert not trainer.save_is_written and not (tmp_path / f"{number}").exists() and not (tmp_path / f"{number}-hf").exists()
        gate.set()
        trainer.finish_save()
        assert trainer.save_is_written
    resumed = make_trainer(model, SUPERVISED, **training)
    for number in range(2):
        resumed.load(tmp_path / f"{number}")
        assert_equal(state_of(resumed), handed_over[number])
        exported = load_file(tmp_path / f"{number}-hf" / "model.safetensors")
        assert_equal(exported, {name: tensor for name, tensor in handed_over[number].items() if name in exported})
        assert "model.embed_tokens.weight" in exported
    assert not any(torch.equal(tensor, handed_over[1][name]) for name, tensor in handed_over[0].items() if tensor.ndim > 1)


@pytest.mark.parametrize("which", ["directory", "hf"])
def test_a_failed_save_is_reported_at_its_end_and_leaves_nothing(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    monkeypatch.setattr("megatron_rl.checkpoints.hugging_face.save_file", full)
    trainer.begin_save(**{which: tmp_path / "saved"})
    train(trainer)
    with pytest.raises(UserError, match="No space left on device"):
        trainer.finish_save()
    assert not (tmp_path / "saved").exists()
    # Told once.
    trainer.finish_save()
    monkeypatch.undo()
    trainer.begin_save(**{which: tmp_path / "saved"})
    trainer.finish_save()
    assert (tmp_path / "saved").is_dir()


CHANGES: dict[str, Callable[[Trainer, Path], object]] = {
    "train": lambda trainer, _: trainer.train(BATCH),
    # A router's bias moves in the backward pass, and back again.
    "forward_backward": lambda trainer, _: trainer.forward_backward(BATCH),
    "put_away": lambda trainer, _: trainer.put_away(),
    "load": lambda trainer, earlier: trainer.load(earlier),
}
"""Public methods after which, or while which, the state is another one or elsewhere."""
READS: dict[str, Callable[[Trainer, Path], object]] = {
    "log_probs": lambda trainer, _: trainer.log_probs(BATCH),
    "own_log_probs": lambda trainer, _: trainer.own_log_probs(BATCH, temperature=1.0),
    "values": lambda trainer, _: trainer.values(BATCH),
    "weights": lambda trainer, _: list(trainer.weights()),
    "save": lambda trainer, path: trainer.save(path / "other"),
    "save_hf": lambda trainer, path: trainer.save_hf(path / "other-hf", durable=False),
    "save_is_written": lambda trainer, _: trainer.save_is_written,
    "trained_models": lambda trainer, _: trainer.trained_models(),
}
ELSEWHERE = {
    "of": "makes another one",
    "train_shard": "train calls it",
    "take_back": "follows on put_away",
    "begin_save": "tested by all of them",
    "finish_save": "ends the copying",
    "optimizer_step": "a test of its own, as no checkpoint may begin before it",
    "close": "a test of its own, as nothing can be loaded after it",
}


def test_every_method_of_a_trainer_is_known_as_reader_or_writer() -> None:
    assert {name for name in vars(Trainer) if not name.startswith("_")} == CHANGES.keys() | READS.keys() | ELSEWHERE.keys()


def test_writers_of_the_state_wait_for_copies_and_readers_do_not(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, asked: Asked
) -> None:
    trainer = make_trainer(tiny_model(), WITH_CRITIC)
    trainer.save(tmp_path / "earlier")
    train(trainer)
    for name, change in CHANGES.items():
        asked.forget()
        want = state_of(trainer)
        trainer.begin_save(tmp_path / "saved", hf=tmp_path / "saved-hf")
        for read in READS.values():
            read(trainer, tmp_path)
        assert_equal(state_of(trainer), want)
        assert not asked.waited, "reading has waited"
        change(trainer, tmp_path / "earlier")
        assert asked.waited, f"{name} has not waited"
        trainer.finish_save()
        trainer.take_back()
        trainer.load(tmp_path / "saved")
        assert_equal(state_of(trainer), want)
        exported = load_file(tmp_path / "saved-hf" / "model.safetensors")
        assert_equal(exported, {name: want[name] for name in exported})


def test_the_reference_replaces_a_policy_that_is_copied(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, asked: Asked
) -> None:
    trainer = make_trainer(tiny_model(), {"kl": {"coef": 0.1}})
    trainer.begin_save(tmp_path / "saved")
    trainer.log_probs(BATCH, reference=True)
    assert asked.waited
    trainer.finish_save()


def test_an_optimizer_step_waits_for_copies_of_an_earlier_export(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, asked: Asked
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    want = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.forward_backward(BATCH)
    trainer.begin_save(hf=tmp_path / "hf")
    trainer.optimizer_step()
    assert asked.waited
    trainer.finish_save()
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), want)


@pytest.mark.parametrize("which", ["directory", "hf"])
def test_a_trainer_that_is_closed_reads_nothing_any_more(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, asked: Asked, which: str
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    trainer.begin_save(**{which: tmp_path / "saved"})
    trainer.close()
    assert asked.waited


@pytest.mark.parametrize("which", ["directory", "hf"])
def test_failed_copies_are_reported_at_the_end_and_block_nobody(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    trainer, own, there_is_memory = make_trainer(tiny_model(), SUPERVISED), HostCopies.copy, iter([True])

    def short(self: HostCopies, name: object, tensor: torch.Tensor) -> torch.Tensor:
        if not next(there_is_memory, False):
            raise MemoryError("no memory for copies")
        return own(self, name, tensor)

    monkeypatch.setattr(HostCopies, "copy", short)
    trainer.begin_save(**{which: tmp_path / "saved"})
    train(trainer)
    with pytest.raises(MemoryError, match="no memory for copies"):
        trainer.finish_save()
    assert not (tmp_path / "saved").exists()
    trainer.finish_save()


def test_an_export_is_written_at_once_where_memory_is_short(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    want = {name: tensor.clone() for name, tensor in trainer.weights()}
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 0}))
    trainer.begin_save(hf=tmp_path / "hf")
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), want)
    (tmp_path / "other").touch()
    trainer.finish_save()
    trainer.begin_save(hf=tmp_path / "other")
    train(trainer)
    with pytest.raises(UserError, match="other"):
        trainer.finish_save()


def test_a_save_does_not_begin_before_the_end_of_the_last(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    trainer.begin_save(tmp_path / "saved")
    with pytest.raises(UserError, match=r"begin_save was called while an earlier save .*; call finish_save\(\) first"):
        trainer.begin_save(hf=tmp_path / "hf")
    trainer.finish_save()
    assert (tmp_path / "saved").is_dir() and not (tmp_path / "hf").exists()


def test_weights_that_cannot_be_gathered_are_not_written(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)

    def broken(**_):  # type: ignore[no-untyped-def]
        yield "model.norm.weight", torch.zeros(2)
        raise RuntimeError("a rank is gone")

    trainer.weights = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a rank is gone"):
        trainer.begin_save(hf=tmp_path / "hf")
    trainer.finish_save()
    assert not (tmp_path / "hf").exists()


def test_consecutive_saves_share_host_memory() -> None:
    copies = HostCopies()
    first = copies.copy("a", torch.full((3,), 1.0))
    assert copies.copy("a", torch.full((3,), 2.0)) is first and first.tolist() == [2] * 3
    others = [copies.copy("b", torch.full((3,), 3.0)), copies.copy("a", torch.full((4,), 4.0)), copies.copy("a", torch.full((4,), 5))]
    assert [tensor.tolist() for tensor in (first, *others)] == [[2] * 3, [3] * 3, [4] * 4, [5] * 4]


@pytest.mark.parametrize("numel", [0, 7, 2**21 + 1])
def test_a_copy_has_memory_of_its_own(numel: int) -> None:
    """In small pages or in large ones."""
    column = torch.arange(2 * numel, dtype=torch.int16).view(-1, 2)[:, 1]
    copy = HostCopies().copy("column", column)
    assert torch.equal(copy, column) and copy.is_contiguous() and copy.untyped_storage().nbytes() == copy.nbytes
    column += 1
    assert not numel or not torch.equal(copy, column)
