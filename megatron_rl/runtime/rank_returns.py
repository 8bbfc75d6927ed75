"""Ranks that die or hang: all ranks are started again, and the run goes on from its newest checkpoint."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray.exceptions import RayError

from megatron_rl.checkpoints.run_checkpoints import newest_checkpoint
from megatron_rl.errors import DeadlineError, MegatronRLError, UserError, counted
from megatron_rl.runtime.engines import HOUR_S
from megatron_rl.runtime.run import Run
from megatron_rl.runtime.start import RunStart
from megatron_rl.runtime.trainers import OWNER, TrainerGroup, printed_stacks
from megatron_rl.system.files import write_atomic


class RanksLostError(Exception):
    """A life of the run has ended with its ranks, and another one may begin."""


class RankReturns:
    """Starts all ranks again, `limit` times an hour; stacks of ranks that hang go to the run's `directory`."""

    def __init__(self, limit: int, *, directory: Path, note: Callable[[str], None]) -> None:
        self._limit, self._directory, self._note = limit, directory, note
        self._begun_s: list[float] = []  # of starts, in seconds of the clock

    @contextmanager
    def noticing(self, start: RunStart) -> Iterator[None]:
        """Raise RanksLostError for an error of the body that comes of ranks that died or hang, where new ones may start."""
        try:
            yield
        except (MegatronRLError, RayError) as error:
            assert start.ranks is not None, "a run has ranks"
            if start.ray.done() or not self._are_lost(start.ranks, error) or not self._may_start(error):
                raise
            raise RanksLostError from error

    def bring_back(self, start: RunStart, begin: Callable[..., Run], *, after: Run) -> Run:
        """Return the run that `begin` makes in place of the one `after` which it comes, until its start succeeds."""
        while True:
            start.end_life()
            try:
                with self.noticing(start):
                    run = begin(resume=True)
            except RanksLostError:
                continue
            run.engines_have_weights = start.engines_stay
            found = newest_checkpoint(self._directory)
            lost = counted(after.trained_steps - (found[1].step if found is not None else 0), "trained step")
            self._note(f"the ranks are back after {time.monotonic() - self._begun_s[-1]:.0f} s; {lost} to be done again")
            return run

    def _are_lost(self, ranks: TrainerGroup, error: Exception) -> bool:
        if ranks.has_died:
            return not isinstance(error, UserError)
        return isinstance(error, DeadlineError) and self._hang(ranks)

    def _hang(self, ranks: TrainerGroup) -> bool:
        """Return True when ranks are in a call or do not answer; keep and show where every rank is."""
        stacks = ranks.stacks()
        if not any(stack is None or stack for stack in stacks):
            return False
        path = self._directory / "logs" / "rank-stacks.txt"
        with suppress(UserError):  # of a full disk, which is not why
            write_atomic(path, "\n\n".join(printed_stacks(stacks)) + "\n")
        where = ["does not answer" if stack is None else f"is in {stack[-1]}" if stack else "is idle" for stack in stacks]
        self._note(f"{'; '.join(f'{OWNER} {rank} {words}' for rank, words in enumerate(where))}; whole stacks are in {path}")
        return True

    def _may_start(self, error: Exception) -> bool:
        now_s = time.monotonic()
        self._begun_s = [begun_s for begun_s in self._begun_s if now_s - begun_s < HOUR_S]
        if len(self._begun_s) >= self._limit:
            return False
        self._begun_s.append(now_s)
        self._note(f"all ranks are started again, {len(self._begun_s)} of runtime.restarts {self._limit} within an hour, because: {error}")
        return True
