"""A save whose files are written while the training goes on has the state of the moment at which it began."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter

from megatron_rl.checkpoints import policy_export, training_state
from megatron_rl.checkpoints.host_copies import HostCopies, host_copy
from megatron_rl.checkpoints.optimizer_shards import parts_of
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
    monkeypatch.setattr(policy_export, "save_hf", held(policy_export.save_hf, gate))
    return gate


class Asked:
    """Nothing is copied until somebody has waited for the copies of its save for a moment: whoever does not wait is too early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_copy = {kind: threading.Event() for kind in (training_state.Saving, policy_export.Exporting)}
        # The one that is waited for first takes longer: the wait for the other does not hide that nobody waited for it.
        self._moments_s = dict(zip(self._may_copy, (0.2, 0.02), strict=True))
        self.kinds: set[str] = set()
        """Whose copies were waited for."""
        for kind in self._may_copy:
            monkeypatch.setattr(kind, "wait_for_copies", self._asking(kind))
        of_checkpoint, of_export = self._may_copy.values()
        monkeypatch.setattr(HostCopies, "copies_of", held(HostCopies.copies_of, of_checkpoint))
        monkeypatch.setattr(policy_export, "host_copy", held(policy_export.host_copy, of_export))

    def _asking(self, kind: Any) -> Callable[..., None]:
        wait_for_copies = kind.wait_for_copies

        def wait(saving: object) -> None:
            self.kinds.add(kind.__name__)
            threading.Timer(self._moments_s[kind], self._may_copy[kind].set).start()
            wait_for_copies(saving)

        return wait

    def forget(self) -> None:
        self.kinds.clear()
        for event in self._may_copy.values():
            event.clear()


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
def test_a_failed_save_is_reported_at_its_end_and_leaves_nothing(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    monkeypatch.setattr("megatron_rl.checkpoints.hugging_face.save_file", full)
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
    "saves_are_written": lambda trainer, _: trainer.saves_are_written,
    "trained_models": lambda trainer, _: trainer.trained_models(),
    "critic": lambda trainer, _: trainer.critic,
    "dp_rank": lambda trainer, _: trainer.dp_rank,
}
ELSEWHERE = {
    "of": "makes another one",
    "train_shard": "train calls it",
    "take_back": "follows on put_away",
    "begin_save": "tested by all of them",
    "begin_save_hf": "tested by all of them",
    "finish_saves": "ends the copying",
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
        trainer.begin_save(tmp_path / "saved")
        trainer.begin_save_hf(tmp_path / "saved-hf")
        for read in READS.values():
            read(trainer, tmp_path)
        assert_equal(state_of(trainer), want)
        assert asked.kinds == set(), "reading has waited"
        change(trainer, tmp_path / "earlier")
        assert asked.kinds == {"Saving", "Exporting"}, f"{name} has not waited"
        trainer.finish_saves()
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
    assert asked.kinds == {"Saving"}
    trainer.finish_saves()


def test_an_optimizer_step_waits_for_copies_of_an_earlier_export(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, asked: Asked
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    want = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.forward_backward(BATCH)
    trainer.begin_save_hf(tmp_path / "hf")
    trainer.optimizer_step()
    assert asked.kinds == {"Exporting"}
    trainer.finish_saves()
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), want)


@pytest.mark.parametrize("which", ["begin_save", "begin_save_hf"])
def test_a_trainer_that_is_closed_reads_nothing_any_more(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, asked: Asked, which: str
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    getattr(trainer, which)(tmp_path / "saved")
    trainer.close()
    assert asked.kinds == {{"begin_save": "Saving", "begin_save_hf": "Exporting"}[which]}


@pytest.mark.parametrize(("which", "where"), [("begin_save", "host_copies.host_copy"), ("begin_save_hf", "policy_export.host_copy")])
def test_failed_copies_are_reported_at_the_end_and_block_nobody(
    make_trainer: Callable[..., Trainer],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    where: str,
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)

    there_is_memory = iter([True])

    def short(tensor: torch.Tensor) -> torch.Tensor:
        if not next(there_is_memory, False):
            raise MemoryError("no memory for copies")
        return tensor.clone()

    monkeypatch.setattr(f"megatron_rl.checkpoints.{where}", short)
    getattr(trainer, which)(tmp_path / "saved")
    train(trainer)
    with pytest.raises(MemoryError, match="no memory for copies"):
        trainer.finish_saves()
    assert not (tmp_path / "saved").exists()
    trainer.finish_saves()


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


def test_consecutive_saves_share_host_memory_and_two_at_once_not() -> None:
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
