"""A checkpoint with a file that is not the one that was saved is named as such, before anything of it is read."""

import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoints import manifest, training_state
from megatron_rl.checkpoints.manifest import entry_of
from megatron_rl.checkpoints.optimizer_shards import num_updates
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.errors import UserError
from megatron_rl.system.device import megatron_version
from megatron_rl.system.files import MANIFEST
from megatron_rl.training.trainer import Trainer

SUPERVISED = {"policy_loss": "sft"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for name, content in (("a", b"abc"), ("b", b""), ("c", b"third" * 2_000_000)):
        (tmp_path / name).write_bytes(content)
    known = {"c": entry_of(tmp_path / "c")}
    with pytest.raises(UserError, match=r"/d, which a rank has written, is not there .* directory that all nodes share"):
        manifest.write(tmp_path, known=known | {"d": known["c"]})
    manifest.write(tmp_path, known=known)
    return tmp_path


def check(directory: Path, num_shares: int = 1) -> None:
    for share in range(num_shares):
        manifest.check(directory, "state", share=(share, num_shares))


def test_the_manifest_has_the_hash_of_every_file(saved: Path) -> None:
    check(saved)
    files = json.loads((saved / MANIFEST).read_text())["files"]
    assert {path.name for path in saved.iterdir()} == {*files, MANIFEST} == {"a", "b", "c", MANIFEST}
    # Vectors of BLAKE3's authors.
    assert files["b"] == {"bytes": 0, "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}
    assert files["a"] == {"bytes": 3, "blake3": "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"}


@pytest.mark.parametrize("name", ["a", "c"])
def test_one_changed_byte_is_found_by_exactly_one_rank(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[-1] ^= 1
    (saved / name).write_bytes(content)
    found = 0
    for share in range(3):
        try:
            manifest.check(saved, "state", share=(share, 3))
        except UserError as error:
            assert f"the content of {name} is not that of its manifest" in str(error)
            found += 1
    assert found == 1


def test_a_cut_a_missing_and_a_foreign_file_are_named(saved: Path) -> None:
    (saved / "c").write_bytes(b"third")
    with pytest.raises(UserError, match=r"c has 5 bytes, its manifest says 10,000,000"):
        check(saved)
    (saved / "c").unlink()
    with pytest.raises(UserError, match="c is in its manifest, but not there"):
        check(saved)
    (saved / "c").write_bytes(b"third" * 2_000_000)
    (saved / "d").touch()
    with pytest.raises(UserError, match="d is there, but not in its manifest; remove it, or copy"):
        check(saved)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"files": {"../a": {"bytes": 1, "blake3": ""}}}', '{"files": {"a": {}}}', '{"files": {"a": {"bytes": 3}}}']
)
def test_a_manifest_that_is_none_is_an_error(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        check(saved)


def test_nothing_is_unpickled_from_a_checkpoint_that_is_wrong(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, directory = make_trainer(tiny_model(), SUPERVISED), tmp_path / "checkpoint"
    trainer.save(directory)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read, or a file twice")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "check", never)
        trainer.load(directory, checked=True)
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, never)
    names = [path.name for path in directory.iterdir() if path.name != MANIFEST]
    assert len(names) >= 3
    for name in names:
        original = (directory / name).read_bytes()
        (directory / name).write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with pytest.raises(UserError, match=r"the content of .* is not that of its manifest"):
            trainer.load(directory)
        (directory / name).write_bytes(original)


@pytest.mark.parametrize("largest", [0, 5000])
def test_a_file_that_cannot_be_written_is_one_sentence(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, largest: int
) -> None:
    """Of common.pt, which megatron-core wrote before 0.19, and of a rank's own."""
    trainer, (soft, hard) = make_trainer(tiny_model(), SUPERVISED), resource.getrlimit(resource.RLIMIT_FSIZE)
    of_rank = largest or megatron_version() >= (0, 19)
    message = "File too large .*; raise the file size limit" if of_rank else "cannot write .*; free space"
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        with pytest.raises(UserError, match=message):
            trainer.save(tmp_path / "checkpoint")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trainer.save(tmp_path / "checkpoint")
    trainer.load(tmp_path / "checkpoint")


def test_weights_alone_are_resumed_only_when_asked_for(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    trainer = make_trainer(model, SUPERVISED, dtype="bfloat16")
    want = {name: tensor.clone().mul_(2) for name, tensor in trainer.weights()}
    with torch.no_grad():
        for parameter in trainer._model.chunks[0].parameters():
            parameter.mul_(2)
    monkeypatch.setattr(training_state, "sharded_optimizer", lambda *_: [])
    trainer.save(tmp_path / "checkpoint")
    resumed = make_trainer(model, SUPERVISED, dtype="bfloat16")
    with pytest.raises(UserError, match="has the weights of policy alone, without the optimizer's state; give --weights-only"):
        resumed.load(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint", weights_only=True)
    for name, tensor in resumed.weights():
        assert torch.equal(tensor, want[name]), name
    for parameter in resumed._model.chunks[0].parameters():
        assert torch.equal(parameter.main_param, parameter.float())
    assert num_updates(resumed._model.optimizer) == 0


def test_hyperparameters_come_from_settings_and_both_are_named(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model()
    trainer = make_trainer(model, SUPERVISED, optimizer={"lr": 1e-3, "weight_decay": 0.1})
    trainer.save(tmp_path / "checkpoint")
    assert trainer.load(tmp_path / "checkpoint") == ()
    resumed = make_trainer(model, SUPERVISED, optimizer={"lr": 2e-3, "weight_decay": 0.0})
    assert resumed.load(tmp_path / "checkpoint") == (
        "training.optimizer.lr is 0.002 from now on, was 0.001 in the checkpoint",
        "training.optimizer.weight_decay is 0 from now on, was 0.1 in the checkpoint",
    )
    groups = resumed._model.optimizer.param_groups
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(2e-3, 0.0)}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-600] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_weights_unlike_their_manifest_are_not_trained_on(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, to: Any
) -> None:
    """Neither as the policy nor as the teacher; a teacher that the objective does not ask is not read."""
    sound, made = tiny_model(), tmp_path / "made"
    convert(sound, made, Options(to=to))
    flip(next(made.glob("*.distcp" if to == "megatron" else "*.safetensors")))
    words = f"checkpoint {made} is damaged: the content of .* is not that of its manifest; copy it again"
    with pytest.raises(UserError, match=words):
        make_trainer(made, SUPERVISED)
    with pytest.raises(UserError, match=words):
        make_trainer(sound, {"distillation_coef": 1.0}, teacher=made)
    make_trainer(sound, {}, teacher=made)
