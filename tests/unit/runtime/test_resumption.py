"""What --resume would go on from, and what is wrong with it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.checkpoints import manifest
from megatron_rl.cli import main
from megatron_rl.config.load import dump_settings, load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.data.buffer import Buffer
from megatron_rl.errors import UserError
from megatron_rl.runtime.preflight import preflight
from megatron_rl.runtime.resumption import check_is_not_a_copy, resume_rows, resumption_checks
from megatron_rl.types import Prompt


@pytest.fixture
def words(tiny_model: Callable[..., Path], tmp_path: Path) -> list[str]:
    """Overrides of a run that has saved after steps 2 and 4 of 6."""
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, run = tiny_model(), tmp_path / "run"
    words = [
        f"run={{directory: {run}, num_steps: 6}}",
        f"model.path={model}",
        f"data={{train: {tmp_path / 'train.jsonl'}, prompts_per_step: 4, max_prompt_tokens: 16}}",
        "training.optimizer.lr=1e-4",
        "rollout.sampling.max_response_tokens=8",
    ]
    for step in (2, 4):
        checkpoint = run / "checkpoints" / f"step-{step:06d}"
        (checkpoint / "megatron").mkdir(parents=True)
        for name in (".metadata", "metadata.json", "common.pt", "__0_0.distcp"):
            (checkpoint / "megatron" / name).write_bytes(name.encode() * 100)
        manifest.write(checkpoint / "megatron")
        (checkpoint / "hf").mkdir()
        shutil.copyfile(model / "config.json", checkpoint / "hf" / "config.json")
        (checkpoint / "run.json").write_text(json.dumps({"step": step, "source": {}, "first_evaluation": {}}))
    (run / "huggingface").symlink_to("checkpoints/step-000004/hf")
    (run / "settings.yaml").write_text(dump_settings(load_settings(None, [*words, "run.directory=elsewhere"])))
    (run / "metrics.jsonl").write_text('{"step": 4, "time": 1.0}\n{"step": 5, "ti')
    with Buffer(run / "buffer.sqlite"):
        pass
    return words


def asked(words: list[str], *overrides: str) -> Settings:
    return load_settings(None, [*words, *overrides])


def rows_of(settings: Settings) -> dict[str, str]:
    return resume_rows(settings.run, dump_settings(settings))


def notes(settings: Settings) -> list[str]:
    checks = resumption_checks(settings.run, settings.model.path, has_buffer=not settings.supervised)
    return [note for check in checks for note in check() or []]


def problem(settings: Settings) -> str:
    with pytest.raises(UserError) as caught:
        notes(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_that_can_go_on_is_told_from_where(words: list[str], tmp_path: Path) -> None:
    """A torn last row of metrics.jsonl is what a kill leaves: the next start drops it."""
    run = tmp_path / "run"
    assert notes(asked(words)) == []
    assert rows_of(asked(words)) == {
        "checkpoint": str(run / "checkpoints" / "step-000004"),
        "steps": "4 of run.num_steps 6 are done",
        "settings": f"all as in {run / 'settings.yaml'}",
    }


def test_settings_that_are_others_now_are_told_with_both_values(words: list[str], tmp_path: Path) -> None:
    other = asked(words, "training.optimizer={lr: 2e-4, weight_decay: 0.1}", "run.num_steps=9", "rollout.sampling.temperature=0.5")
    assert list(rows_of(other).items())[2:] == [
        ("run.num_steps", "9, was 6"),
        ("rollout.sampling.temperature", "0.5, was 1.0"),
        ("training.optimizer.lr", "0.0002, was 0.0001"),
        ("training.optimizer.weight_decay", "0.1, was not set"),
    ]
    (tmp_path / "run" / "settings.yaml").unlink()
    assert rows_of(other)["settings of the last start"] == f"not known: {tmp_path / 'run' / 'settings.yaml'} is gone"


def test_a_checkpoint_that_is_passed_over_is_named(words: list[str], tmp_path: Path) -> None:
    newest = tmp_path / "run" / "checkpoints" / "step-000004"
    (newest / "run.json").unlink()
    rows = rows_of(asked(words))
    assert (rows["checkpoint"], rows["passed over, not complete (1)"]) == (str(newest.with_name("step-000002")), str(newest))


def _cut(file: Path) -> None:
    os.truncate(file, 50)


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("__0_0.distcp", _cut, "is damaged: __0_0.distcp has 50 bytes, its manifest says 1,200; copy it again from where it came, or "),
        (
            ".metadata",
            Path.unlink,
            ".metadata is in its manifest, but not there; copy it again from where it came, or ",
        ),
        ("manifest.json", _cut, "is not a complete checkpoint: its manifest.json cannot be read"),
        ("../run.json", lambda file: file.write_bytes(b"\xff{"), "run.json is not the state of a run"),
    ],
)
def test_a_damaged_checkpoint_is_told_with_the_one_before(
    words: list[str], tmp_path: Path, name: str, damage: Callable[[Path], Any], told: str
) -> None:
    newest = tmp_path / "run" / "checkpoints" / "step-000004"
    damage(newest / "megatron" / name)
    message = problem(asked(words))
    assert told in message and message.endswith(f"delete {newest} to go on from {newest.with_name('step-000002')} (step 2)")
    shutil.rmtree(newest.with_name("step-000002"))
    assert f"start a new run from its weights with model.path={newest / 'hf'} and another run.directory" in problem(asked(words))
    shutil.rmtree(newest)
    assert "put its checkpoints back" in problem(asked(words))


def test_a_run_without_its_checkpoints_does_not_begin_again(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints")
    message = problem(asked(words))
    assert "there is nothing to resume" in message and "points to checkpoints/step-000004/hf" in message
    (run / "huggingface").unlink()
    assert notes(asked(words)) == [f"there is no checkpoint in {run}: the run starts at step 1"]
    assert rows_of(asked(words)) == {"checkpoint": f"none in {run}: the run would start at step 1"}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"vocab_size": 64}, "vocab_size 64, checkpoint "),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "architecture Qwen2ForCausalLM, checkpoint "),
    ],
)
def test_another_model_than_that_of_the_checkpoint_is_refused(
    words: list[str], tmp_path: Path, overrides: dict[str, Any], told: str
) -> None:
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | overrides))
    message = problem(asked(words))
    assert told in message and message.endswith("give the model.path that the run began with, or another run.directory for a new run")


def test_other_numbers_of_a_model_of_the_same_shapes_are_noted(words: list[str], tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    [note] = notes(asked(words))
    assert "has norm_epsilon 0.001, checkpoint " in note and note.endswith("what was trained is computed otherwise from now on")


def test_a_file_that_is_no_buffer_is_refused_a_killed_run_s_kept(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Buffer(run / "buffer.sqlite") as buffer:
        buffer.add_prompts([Prompt(id="p", token_ids=np.array([1]), text="a")])
        shutil.copytree(run, tmp_path / "killed", symlinks=True)
    killed = {path.name: path.read_bytes() for path in (tmp_path / "killed").glob("buffer.sqlite*")}
    assert killed["buffer.sqlite-wal"] and notes(asked(words, f"run.directory={tmp_path / 'killed'}")) == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "killed").glob("buffer.sqlite*")} == killed
    (run / "buffer.sqlite").write_bytes(b"garbage" * 1000)
    assert "file is not a database; choose another run.directory, or move this file away: groups since" in problem(asked(words))
    assert notes(asked(words, "objective.policy_loss=sft")) == []
    (run / "buffer.sqlite").unlink()
    assert notes(asked(words)) == [] and not (run / "buffer.sqlite").exists()


def test_a_kill_inside_a_checkpoint_of_sqlite_is_no_damage(words: list[str], tmp_path: Path) -> None:
    """SQLite writes the first page, which counts them all, before the others, which are then in the write-ahead log alone."""
    killed = tmp_path / "killed"
    with Buffer(tmp_path / "run" / "buffer.sqlite") as buffer:
        prompts = [Prompt(id=str(row), token_ids=np.arange(1000), text="a" * 1000) for row in range(50)]
        buffer.add_prompts(prompts)
        shutil.copytree(tmp_path / "run", killed, symlinks=True)
    log = (killed / "buffer.sqlite-wal").read_bytes()
    page = int.from_bytes(log[8:12])
    frames = [log[start : start + 24 + page] for start in range(32, len(log), 24 + page)]
    first = [frame for frame in frames if int.from_bytes(frame[:4]) == 1][-1]
    with (killed / "buffer.sqlite").open("r+b") as file:
        file.write(first[24:])
    assert notes(asked(words, f"run.directory={killed}")) == []
    with Buffer(killed / "buffer.sqlite") as again:
        assert [prompt.id for prompt in again.take_pending(99)] == [prompt.id for prompt in prompts]


def test_a_copy_that_followed_the_link_to_the_policy_is_refused(words: list[str], tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert f"{tmp_path}/copy/huggingface is a directory, needs to be a link" in problem(asked(words, f"run.directory={tmp_path / 'copy'}"))


def test_a_line_of_metrics_that_is_none_is_refused(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 4, "ti\n{"step": 5, "time": 1.0}\n')
    assert "metrics.jsonl:1: not a line of metrics" in problem(asked(words))


def test_check_prints_the_resume_or_only_the_errors(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*words, "objective.policy_loss=sft"]
    assert main(["train", "--check", "--resume", *given]) == 0
    told = capsys.readouterr().out
    assert f"# What would be resumed\n#   checkpoint                         {tmp_path}/run/checkpoints/step-000004\n" in told
    assert re.search(r"objective\.policy_loss\.kind +sft, was clip\n", told)
    _cut(tmp_path / "run" / "checkpoints" / "step-000004" / "megatron" / "__0_0.distcp")
    assert main(["train", "--check", "--resume", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "delete" in printed.err
    with pytest.raises(UserError, match="delete"):
        preflight(load_settings(None, given), resume=True, probe=False)


def test_a_copied_run_does_not_continue_in_the_original(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    (run / "settings.yaml").write_text(dump_settings(load_settings(None, words)))
    shutil.copytree(run, copy, symlinks=True)
    config = copy / "settings.yaml"
    assert main(["train", str(config), "--resume", "--check"]) == 2
    assert f"names another as run.directory, {run}; add run.directory={copy} to continue the run here" in capsys.readouterr().err
    for given, overrides in ((config, [f"run.directory={copy}"]), (config, ["run.directory=new"]), (run / "settings.yaml", [])):
        check_is_not_a_copy(given, load_settings(given, overrides).run.directory)
