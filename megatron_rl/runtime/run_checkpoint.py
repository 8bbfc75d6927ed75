"""Checkpoints of a run: one directory per saved step, complete or absent.

checkpoints/step-000050/megatron/   what the ranks continue from
                        hf/         the policy as a Hugging Face directory
                        run.json    step and prompt position
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import UserError
from megatron_rl.files import atomic_directory, write_atomic

if TYPE_CHECKING:
    # Ray must not be imported before the environment that it reads is set, and preflight looks at checkpoints earlier.
    from megatron_rl.runtime.trainers import TrainerGroup

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class RunState:
    """What the driver itself must remember: `step`, the rollout batches trained on, where the prompts continue, the first evaluation.

    `metrics` are those of the step as far as they were measured before the save, for a run that is killed before it logs them.
    """

    step: int
    source: dict[str, Any]
    first_evaluation: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)


def checkpoint_paths(directory: Path) -> list[Path]:
    """Complete checkpoints of the run in `directory`, oldest first."""
    found = [path for path in (directory / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def oldest_step(directory: Path) -> int:
    """Steps done at the oldest checkpoint that the run in `directory` still has, 0 when it has none."""
    return min(map(_step, checkpoint_paths(directory)), default=0)


def save_checkpoint(directory: Path, *, state: RunState, trainers: "TrainerGroup", keep: int) -> Path:
    """Write the checkpoint of `state.step`, then delete all but the `keep` newest ones; return its path."""
    path = directory / "checkpoints" / f"step-{state.step:06d}"
    path.parent.mkdir(exist_ok=True)
    with atomic_directory(path) as partial:
        trainers.save(partial / "megatron")
        trainers.save_hf(partial / "hf")
        write_atomic(partial / "run.json", json.dumps(asdict(state)))
    for old in checkpoint_paths(directory)[:-keep]:
        shutil.rmtree(old)
    return path


def newest_checkpoint(directory: Path) -> tuple[Path, RunState] | None:
    """The newest complete checkpoint of the run in `directory`, or None.

    Raises:
        UserError: its run.json cannot be read.
    """
    paths = checkpoint_paths(directory)
    if not paths:
        return None
    text = (paths[-1] / "run.json").read_text()
    try:
        return paths[-1], RunState(**json.loads(text))
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(
            f"{paths[-1] / 'run.json'} is not the state of a run ({error}); delete that checkpoint to resume from the one before"
        ) from error
