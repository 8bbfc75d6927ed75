"""The run directory before a start: the checkpoint for `--resume`, the record for `--replay`, visible faults.

Nothing is hashed or started.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.objective import Objective
from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.run_checkpoints import (
    POLICY_LINK,
    checkpoint_paths,
    incomplete_checkpoints,
    naming_the_way_around,
    newest_checkpoint,
)
from megatron_rl.config.load import parse_yaml
from megatron_rl.config.settings import RunSettings, SamplingSettings
from megatron_rl.config.yaml_text import by_path, format_value
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.data.position import difference
from megatron_rl.data.recorded import Recorded
from megatron_rl.data.sqlite_file import check_database
from megatron_rl.errors import UserError, counted
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import parameter_shape, rules
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.observe.summary import SETTINGS_FILE
from megatron_rl.training.objective_checks import check_returns

_OF_FILES = {"names", "num_mtp_layers"}
"""Fields of a ModelSpec that an exported policy need not share with the model that it was made from."""
RECORDED_BEFORE = "recorded_before"
"""Key of a replay's position: the recorded steps before the first one that it trains on."""


def resume_rows(run: RunSettings, settings: str) -> dict[str, str]:
    """Return the checkpoint to resume from, and every change in the `settings`, as YAML. Raises UserError."""
    directory = run.directory
    found = newest_checkpoint(directory)
    skipped = {f"passed over, not complete ({number})": str(path) for number, path in enumerate(incomplete_checkpoints(directory), start=1)}
    if found is None:
        return {"checkpoint": f"none in {directory}: the run would start at step 1"} | skipped
    path, state = found
    rows = {"checkpoint": str(path), "steps": f"{state.step} of run.num_steps {run.num_steps} are done"} | skipped
    return rows | dict(_changes(directory / SETTINGS_FILE, by_path(parse_yaml(settings, origin="the settings"))))


def _changes(file: Path, now: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return a row for each setting that differs from the `file` of the run's last start."""
    if not file.exists():
        yield "settings of the last start", f"not known: {file} is gone"
        return
    saved = parse_yaml(file.read_text(encoding="utf-8", errors="replace"), origin=str(file))
    then = by_path(saved) if isinstance(saved, Mapping) else {}
    # The run's directory may have a new name.
    changed = [name for name in (now | then) if now.get(name) != then.get(name) and name != "run.directory"]
    for name in changed:
        yield name, f"{_value(now, name)}, was {_value(then, name)}"
    if not changed:
        yield "settings", f"all as in {file}"


def _value(values: Mapping[str, Any], name: str) -> str:
    return format_value(values[name]) if name in values else "not set"


def check_is_not_a_copy(config: Path | None, directory: Path) -> None:
    """Raise UserError when `config` lies in a run's directory and names another one: the run's was copied.

    `directory` is the run.directory of the settings that came from `config`.
    """
    if config is None or config.name != SETTINGS_FILE or not checkpoint_paths(config.parent):
        return
    place = config.parent
    values = parse_yaml(config.read_text(encoding="utf-8"), origin=str(config))
    given = by_path(values).get("run.directory") if isinstance(values, Mapping) else None
    # A directory on the command line has priority.
    if given is not None and Path(given) == directory and directory.resolve() != place.resolve():
        raise UserError(
            f"--resume was given with {config}, which lies in a run's directory and names another as run.directory, {directory}; add "
            f"run.directory={place} to continue the run here, or give {directory / SETTINGS_FILE} to continue that one"
        )


START_FILES = ("settings.yaml", "run.lock", "buffer.sqlite", "logs", "engine-", ".engine-", "status.json", ".status.json.")
"""What a start writes before the first step. A directory with nothing else is that of a start that failed, and may be used again."""


def check_run_directory(directory: Path, *, resume: bool) -> list[str]:
    """Refuse an unwritable directory or one with another run; return a note without a run to resume."""
    for folder in (directory, *directory.absolute().parents):
        if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
            kind = "a file" if folder.exists() else "a link to nothing"
            raise UserError(f"run.directory is {directory}, but {folder} is {kind}; choose another directory")
        if folder.is_dir():
            if not os.access(folder, os.W_OK | os.X_OK):
                raise UserError(
                    f"run.directory is {directory}, but {folder} is not writable; choose another directory, or mend its permissions"
                )
            break
    present = directory.is_dir() and any(not path.name.startswith(START_FILES) for path in directory.iterdir())
    if present and not resume:
        raise UserError(
            f"run.directory {directory} holds a run already, needs an empty or new directory; continue that run with --resume, "
            f"or set another run.directory"
        )
    return [f"there is nothing to resume in {directory}: a new run starts"] if resume and not present else []


def resumption_checks(run: RunSettings, model: Path, *, has_buffer: bool) -> list[Callable[[], list[str] | None]]:
    """Return the checks of a run to resume; each returns notes, if any, and raises UserError."""
    return [
        partial(_check_has_checkpoint, run.directory),
        partial(_check_steps_left, run.directory, num_steps=run.num_steps),
        partial(_check_checkpoint_files, run.directory),
        partial(_check_same_model, run.directory, model),
        partial(_check_written_files, run.directory, has_buffer=has_buffer),
    ]


def _check_has_checkpoint(directory: Path) -> list[str]:
    """Refuse to begin again where checkpoints were and are gone; a note where there never was one."""
    link = directory / POLICY_LINK
    if checkpoint_paths(directory):
        return []
    if link.is_symlink():
        raise UserError(
            f"there is nothing to resume in {directory}, although it had a checkpoint ({link} points to {os.readlink(link)}); put its "
            f"checkpoints back, or delete {link} to start again at step 1, without what metrics.jsonl has of the steps"
        )
    return [f"there is no checkpoint in {directory}: the run starts at step 1"] if (directory / SETTINGS_FILE).exists() else []


def _check_steps_left(directory: Path, *, num_steps: int) -> None:
    """Refuse to resume a run whose steps are all done."""
    found = newest_checkpoint(directory)
    if found is not None and found[1].step >= num_steps:
        raise UserError(
            f"{directory} has done {counted(found[1].step, 'step')}, so nothing is left of run.num_steps {num_steps}; "
            f"its policy is {found[0] / 'hf'}; set run.num_steps above {found[1].step} to continue"
        )


def _check_checkpoint_files(directory: Path) -> None:
    """Refuse a checkpoint with a missing file, or a file of another size than in the manifest."""
    found = newest_checkpoint(directory)
    if found is not None:
        with naming_the_way_around(directory):
            manifest.check(found[0] / "megatron", "sizes")


def _check_same_model(directory: Path, model: Path) -> list[str]:
    """Refuse a model.path with other parameters than the checkpoint; note another computation on equal ones."""
    found = newest_checkpoint(directory)
    if found is None or not (found[0] / "hf" / "config.json").is_file():
        return []
    now, then = read_model_spec(model), read_model_spec(found[0] / "hf")
    fields, saved = by_path(dataclasses.asdict(now)), by_path(dataclasses.asdict(then))
    names = [name for name in (fields | saved) if name.split(".")[0] not in _OF_FILES]
    changed = next((name for name in names if fields.get(name) != saved.get(name)), None)
    if changed is None:
        return []
    what = f"model.path {model} has {changed} {fields.get(changed)}, checkpoint {found[0]} has {saved.get(changed)}"
    if _parameters(now) != _parameters(then):
        raise UserError(f"{what}; give the model.path that the run began with, or another run.directory for a new run")
    return [f"{what}: what was trained is computed otherwise from now on"]


def _parameters(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {rule.megatron: parameter_shape(rule) for rule in rules(spec) if rule.exported}


def _check_written_files(directory: Path, *, has_buffer: bool) -> None:
    """Refuse metrics.jsonl with an invalid line, a buffer that is no database, and a directory in place of the policy's link.

    A torn last line is dropped. A copy that follows links makes a directory of the link.
    """
    link, metrics = directory / POLICY_LINK, directory / METRICS_FILE
    if link.is_dir() and not link.is_symlink():
        raise UserError(f"{link} is a directory, needs to be a link to the policy of a checkpoint, which the run makes; move it away")
    if metrics.exists():
        read_metrics(metrics)
    if has_buffer:
        check_database(directory / BUFFER_FILE)


def open_record(
    replay: Path, directory: Path, *, sampling: SamplingSettings, objective: Objective, resume: bool, note: Callable[[str], None]
) -> tuple[Recorded, int]:
    """Return the record at `replay`, and the number of its steps before the first of the run in `directory`, in a note.

    Raises UserError for one that does not fit: without a step, of the run itself, sampled from
    another distribution than the one to train, or of samples that the estimator cannot take.
    """
    recorded = Recorded(replay)
    if recorded.path.parent.resolve() == directory.resolve():
        raise UserError(f"--replay is {replay}, which is run.directory itself; give run.directory a new one")
    steps = recorded.recorded_steps()
    if not steps:
        raise UserError(f"{recorded.path} has no step to replay, needs one that a run has taken; see megatron-rl buffer ls")
    found = newest_checkpoint(directory) if resume else None
    before = steps[0] - 1 if found is None else int(found[1].source.get(RECORDED_BEFORE, 0))
    done = 0 if found is None else found[1].step
    if done + before >= steps[-1]:
        raise UserError(
            f"{recorded.path} ends with step {steps[-1]}, and the checkpoint is of step {done + before}: nothing is left to replay"
        )
    own = {f"rollout.sampling.{name}": value for name, value in sampling.model_dump(mode="json").items()}
    for (made_by,) in recorded.read("SELECT DISTINCT made_by FROM groups WHERE made_by IS NOT NULL AND consumed_step IS NOT NULL"):
        then, now = ({name: one.get(name) for name in _DISTRIBUTION} for one in (json.loads(made_by), own))
        if then != now:
            raise UserError(f"{recorded.path} cannot be trained on: {difference(json.dumps(then), json.dumps(now))}; set what it was")
    if recorded.read(_SEVERAL, (done + before,)):
        check_returns(objective)
    note(f"step {done + 1} trains on step {done + 1 + before} of {recorded.path}, whose record ends with step {steps[-1]}")
    return recorded, before


_DISTRIBUTION = tuple(f"rollout.sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "entropy"))
"""Settings of the distribution whose log-probs are trained."""
_SEVERAL = (
    "SELECT 1 FROM samples JOIN groups ON id = group_id WHERE consumed_step > ? GROUP BY group_id, trajectory "
    "HAVING count(trajectory) > 1 LIMIT 1"
)
"""A trajectory of several samples, behind a step."""
