"""Checkpoints of a run: one directory per saved step, complete or absent, written while the run goes on.

checkpoints/step-000050/megatron/   what the ranks continue from
                        hf/         the policy as a Hugging Face directory
                        run.json    step and prompt position
exports/step-000050/                the policy alone, for good; of a step that has a checkpoint, too, the same files
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.settings import RunSettings
from megatron_rl.errors import CheckpointError, DamagedCheckpointError, UserError, counted
from megatron_rl.observe.summary import SETTINGS_FILE
from megatron_rl.system.files import (
    MANIFEST,
    atomic_directory,
    commit_partial,
    disk_errors,
    partial_path,
    read_record,
    remove_directory,
    start_partial,
    sync,
    write_atomic,
)

LOCK_FILE = "run.lock"
"""Held by the one run that writes there, where it has no buffer."""
POLICY_LINK = "huggingface"
"""Points to the policy of the newest checkpoint."""
BEST_LINK = "best-"
"""Points with the name of a set behind it to the best checkpoint, which is kept."""
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Best:
    """The largest `value` of a set's `metric`, after `step` steps; `num_since` later evaluations were not better."""

    metric: str
    step: int
    value: float
    num_since: int = 0


@dataclass(frozen=True, slots=True)
class RunState:
    """State of the driver after training on `step` rollout batches: prompt position, first evaluation, and the best before.

    `metrics` are the step's, measured before the save, for a run that is killed before logging them.
    """

    step: int
    source: dict[str, Any]
    first_evaluation: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Best] = field(default_factory=dict)


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return complete checkpoints of the run in `directory`, oldest first; two of one step in the order of writing."""
    return sorted((path for path in _named(directory) if _is_complete(path)), key=lambda path: (_step(path), path.stat().st_mtime_ns))


def _named(directory: Path) -> list[Path]:
    return [path for path in (directory / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)]


def _is_complete(path: Path) -> bool:
    """Return True for a complete checkpoint directory: written as a whole, but a user may have deleted a part since."""
    return (path / "run.json").is_file() and (path / "megatron" / MANIFEST).is_file()


def incomplete_checkpoints(directory: Path) -> list[Path]:
    """Return checkpoints and exports left incomplete by an interrupted write, copy or deletion; no run resumes there."""
    partial = (path for folder in ("checkpoints", "exports") for path in (directory / folder).glob(".step-*"))
    return sorted([*partial, *(path for path in _named(directory) if not _is_complete(path))])


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def oldest_step(directory: Path, *, among: int) -> int:
    """Return the steps of the oldest of the newest `among` checkpoints in `directory`, 0 without a checkpoint.

    From one that run.keep_interval keeps for good, a run makes its samples anew.
    """
    return min(map(_step, checkpoint_paths(directory)[-among:]), default=0)


class Ranks(Protocol):
    """The Megatron ranks, called together."""

    def call(self, method: str, *args: Any, **keywords: Any) -> list[Any]:
        """Return the results of a method of `Trainer`, by rank."""

    def load(self, directory: Path, *, weights_only: bool) -> Sequence[str]:
        """Continue from a checkpoint, as `Trainer.load`; return notes."""


class CheckpointWriter:
    """Writes a run's checkpoints and exports, one at a time from `begin` or `begin_export` to `finish`, as the run goes on."""

    def __init__(self, run: RunSettings, *, ranks: Ranks) -> None:
        self._run, self._ranks, self._directory_identity = run, ranks, _identity(run.directory)
        self._pending: Path | None = None
        """The checkpoint or export that has begun and is not in its place."""
        self._best: Mapping[str, Best] = {}
        self.may_be_best: Callable[[int], bool] = lambda step: False

    def has_directory(self) -> bool:
        """Return False where the run directory was deleted, moved or replaced by another one."""
        return (self._run.directory / SETTINGS_FILE).exists() and _identity(self._run.directory) == self._directory_identity

    def check_directory(self) -> None:
        """Raise UserError when the run's output would no longer be kept."""
        if not self.has_directory():
            happened = "replaced by another directory" if self._run.directory.exists() else "deleted or moved"
            raise UserError(
                f"run.directory {self._run.directory} was {happened} while the run was going, so that nothing it makes would be kept; "
                f"start it again in a directory that stays"
            )

    def checkpoint_is_due(self, step: int) -> bool:
        """Return True after every run.save_interval-th step, the last, and those whose evaluation may be the best."""
        at_interval = self._run.save_interval > 0 and step % self._run.save_interval == 0
        return step == self._run.num_steps or at_interval or self.may_be_best(step)

    def export_is_due(self, step: int) -> bool:
        """Return True after every run.export_interval-th step."""
        return self._run.export_interval > 0 and step % self._run.export_interval == 0

    @property
    def is_writing(self) -> bool:
        """Return True while a save has begun and `finish` has not put it in place."""
        return self._pending is not None

    def is_written(self) -> bool:
        """Return True when a save is pending, and `finish` would not wait for the disk."""
        return self.is_writing and all(self._ranks.call("save_is_written"))

    def begin(self, state: RunState) -> None:
        """Begin the checkpoint of `state.step`; training may go on when this returns. No other save may be pending."""
        with self._saving(self._run.directory / "checkpoints" / f"step-{state.step:06d}") as path:
            partial = start_partial(path)
            self._ranks.call("begin_save", partial / "megatron", hf=partial / "hf")
            write_atomic(partial / "run.json", json.dumps(asdict(state)))

    def begin_export(self, step: int) -> None:
        """Begin an export of the policy after `step` steps, as `begin`."""
        with self._saving(self._export(step)) as path:
            self._ranks.call("begin_save", hf=path)

    def _export(self, step: int) -> Path:
        return self._run.directory / "exports" / f"step-{step:06d}"

    @contextmanager
    def _saving(self, path: Path) -> Iterator[Path]:
        assert self._pending is None, f"{self._pending} is still being written"
        with disk_errors(path.parent):
            if not path.parent.is_dir():
                path.parent.mkdir()
                sync(path.parent.parent)
        self._pending = path
        with self._nothing_left_of(path):
            yield path

    def finish(self) -> list[str]:
        """Wait for the pending save, put it in place, also as a due export, and delete superseded checkpoints.

        Returns a sentence for each failed deletion, harmless to the run.
        """
        assert self._pending is not None, "nothing has begun"
        path, step = self._pending, _step(self._pending)
        is_checkpoint = path != self._export(step)
        with self._nothing_left_of(path):
            self._ranks.call("finish_save")
            if is_checkpoint and self.export_is_due(step):
                # Before the checkpoint: work after the link does not come back to this step.
                _copy_files(partial_path(path) / "hf", self._export(step))
            if is_checkpoint:
                commit_partial(path)
        self._pending = None
        if not is_checkpoint:
            return []
        # Before the deletion of the checkpoint that the link points to.
        link_policy(path)
        self.keep(self._best)
        return self._prune()

    def keep(self, best: Mapping[str, Best]) -> None:
        """Keep the `best` checkpoints until the next call, and link those that are complete, by the name of a set."""
        self._best = best
        for name, one in best.items():
            if _is_complete(path := self._run.directory / "checkpoints" / f"step-{one.step:06d}"):
                _link(self._run.directory / f"{BEST_LINK}{name}", path)

    def _prune(self) -> list[str]:
        said = []
        for old in checkpoint_paths(self._run.directory)[: -self._run.keep_checkpoints]:
            for_good = self._run.keep_interval and not _step(old) % self._run.keep_interval
            if not for_good and all(_step(old) != best.step for best in self._best.values()):
                try:
                    remove_directory(old)
                except OSError as error:
                    said.append(f"{old} is superseded, but could not all be deleted: {error}")
        return said

    @contextmanager
    def _nothing_left_of(self, path: Path) -> Iterator[None]:
        """Give up the save in progress when the body raises."""
        try:
            yield
        except BaseException:
            self._pending = None
            shutil.rmtree(partial_path(path), ignore_errors=True)
            raise


def _identity(directory: Path) -> tuple[int, int]:
    """Return device and inode; both stay the same when the directory is renamed."""
    found = directory.stat()
    return found.st_dev, found.st_ino


def load_newest(
    directory: Path,
    *,
    weights_only: bool,
    ranks: Ranks,
    rewind: Callable[..., Sequence[str]],
    before: Callable[[], None],
    phase: Callable[[str], AbstractContextManager[object]],
    say: Callable[..., None],
) -> RunState | None:
    """Continue from the newest checkpoint of the run in `directory`; return its state, None where there is none.

    The ranks take theirs with `weights_only`; `rewind` takes a step and a prompt position, and
    returns notes. `before` comes before both, and only where there is a checkpoint. Raises
    CheckpointError for one that cannot be loaded.
    """
    for path in incomplete_checkpoints(directory):
        say(f"{path} is not complete and is passed over; it can be deleted")
    found = newest_checkpoint(directory)
    if found is None:
        say(*rewind(step=0, position=None))
        return None
    path, state = found
    before()
    with phase("load"):
        try:
            with naming_the_way_around(directory):
                changes = ranks.load(path / "megatron", weights_only=weights_only)
            notes = rewind(step=state.step, position=state.source)
        except UserError as error:
            raise CheckpointError(str(error)) from error
    # A kill may have come between the checkpoint and the link.
    link_policy(path)
    say(f"resumed from {path} after {counted(state.step, 'step')}" + (", with a new optimizer" if weights_only else ""), *changes, *notes)
    return state


def link_policy(checkpoint: Path) -> None:
    """Point the run's link at the policy of `checkpoint`, in one step."""
    _link(checkpoint.parents[1] / POLICY_LINK, checkpoint / "hf")


def _link(link: Path, target: Path) -> None:
    partial = link.with_name(f".{link.name}.partial")
    with disk_errors(link):
        partial.unlink(missing_ok=True)
        partial.symlink_to(target.relative_to(link.parent), target_is_directory=True)
        os.replace(partial, link)


def _copy_files(source: Path, target: Path) -> None:
    """Hard-link the files of `source` into the directory `target`, or copy without hard links."""

    def link(file: str, name: str) -> None:
        try:
            os.link(file, name)
        except OSError:
            shutil.copyfile(file, name)

    with atomic_directory(target) as partial:
        shutil.copytree(source, partial, copy_function=link, dirs_exist_ok=True)


def newest_checkpoint(directory: Path) -> tuple[Path, RunState] | None:
    """Return the newest complete checkpoint of the run in `directory`, or None. Raises UserError for its run.json."""
    paths = checkpoint_paths(directory)
    if not paths:
        return None
    try:
        return paths[-1], read_record(paths[-1] / "run.json", RunState)
    except ValueError as error:
        raise UserError(f"{paths[-1] / 'run.json'} is not the state of a run ({error}); {way_around(directory)}") from error


@contextmanager
def naming_the_way_around(directory: Path) -> Iterator[None]:
    """Add to the body's error of a damaged checkpoint how to go on without it. Raises CheckpointError."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise CheckpointError(f"{error}, or {way_around(directory)}") from error


def way_around(directory: Path) -> str:
    """Return advice on going on without the newest checkpoint of the run in `directory`, which must exist."""
    *earlier, newest = checkpoint_paths(directory)
    if earlier:
        return f"delete {newest} to go on from {earlier[-1]} (step {_step(earlier[-1])})"
    return f"start a new run from its weights with model.path={newest / 'hf'} and another run.directory, because no checkpoint is before it"
