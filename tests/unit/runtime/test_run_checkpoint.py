import json
from pathlib import Path

import pytest

from megatron_rl.errors import UserError
from megatron_rl.runtime.run_checkpoint import RunState, checkpoint_paths, newest_checkpoint, oldest_step, save_checkpoint


class Trainers:
    """Writes what the ranks would write, or fails on the way."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "metadata.json").write_text("{}")

    def save_hf(self, directory: Path) -> None:
        if self._fails:
            raise UserError("cannot write: the disk is full")
        directory.mkdir()


def state(step: int) -> RunState:
    return RunState(step=step, source={"epoch": 0, "cursor": 8 * step}, first_evaluation={"eval/accuracy_greedy": 0.25})


def save(directory: Path, step: int, *, keep: int = 2, fails: bool = False) -> Path:
    return save_checkpoint(directory, state=state(step), trainers=Trainers(fails=fails), keep=keep)  # type: ignore[arg-type]


def test_the_newest_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    for step in (2, 4, 1_000_002):
        save(tmp_path, step)
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step-000004", "step-1000002"]
    path, found = newest_checkpoint(tmp_path) or (None, None)
    assert path == tmp_path / "checkpoints" / "step-1000002"
    assert found == state(1_000_002)
    assert oldest_step(tmp_path) == 4


def test_a_failed_save_keeps_the_old_checkpoint_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    save(tmp_path, 2, keep=1)
    with pytest.raises(UserError, match="disk is full"):
        save(tmp_path, 4, keep=1, fails=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_run_without_checkpoint_starts_anew(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert oldest_step(tmp_path) == 0


@pytest.mark.parametrize("text", ["{", json.dumps({"step": 3})])
def test_a_broken_state_is_named(tmp_path: Path, text: str) -> None:
    (save(tmp_path, 2) / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json is not the state of a run"):
        newest_checkpoint(tmp_path)
