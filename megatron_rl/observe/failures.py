"""Failed calls of plug-ins in a step: logged, counted by cause, and fatal beyond a share."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rl.config.settings import RewardSettings, RolloutSettings
from megatron_rl.errors import UserError, counted
from megatron_rl.system.files import disk_errors
from megatron_rl.types import Failure, Group, RewardOutcome, last_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLog:
    """The failures of `calls`, such as "reward calls", made by the plug-in `owner`.

    A share beyond `max_error_rate`, of `setting`, ends the run. `say` gets a sentence about each
    step with a new failure.
    """

    path: Path
    calls: str
    owner: str
    setting: str
    max_error_rate: float
    say: Callable[[str], None] = lambda words: None
    _noted: set[str] = field(default_factory=set)

    @classmethod
    def of_rollouts(cls, rollout: RolloutSettings, directory: Path, *, owner: str, say: Callable[[str], None]) -> "FailureLog":
        """Return the log of a run's trajectories in its `directory`."""
        rate, path = rollout.max_error_rate, directory / "logs" / "rollout.log"
        return cls(path=path, calls="trajectories", owner=owner, setting="rollout.max_error_rate", max_error_rate=rate, say=say)

    @classmethod
    def of_rewards(cls, reward: RewardSettings, path: Path, *, say: Callable[[str], None]) -> "FailureLog":
        """Return the log at `path` of a run's reward calls."""
        rate, owner = reward.max_error_rate, f"reward.function {reward.function}"
        return cls(path=path, calls="reward calls", owner=owner, setting="reward.max_error_rate", max_error_rate=rate, say=say)

    def note(self, failures: Sequence[Failure], *, total: int, step: int) -> None:
        """Write the failed calls of `step` by cause, each new one with its trace. Raises UserError of the disk."""
        if not failures:
            return
        if not self.path.parent.is_dir():
            raise UserError(
                f"{self.path} cannot be written: its directory was deleted or moved while the run was going; start the run again in a "
                "directory that stays"
            )
        new = [(headline, count) for headline, count in _headlines(failures) if headline not in self._noted]
        if new:
            others = f" and {counted(len(new) - 1, 'other cause')}" if len(new) > 1 else ""
            self.say(f"step {step}: {new[0][1]} of {total} {self.calls} failed: {new[0][0]}{others}; see {self.path}")
        with disk_errors(self.path), self.path.open("a") as log:
            for headline, count in _headlines(failures):
                log.write(f"step {step}: {count} of {total} {self.calls}: {headline}\n")
                if headline not in self._noted:
                    self._noted.add(headline)
                    log.write(f"{next(each.trace for each in failures if each.headline == headline)}\n")

    def check(self, failures: Sequence[Failure], *, total: int) -> None:
        """Raise UserError, with every cause and the first trace, for too many failed calls."""
        if len(failures) <= self.max_error_rate * total:
            return
        causes = ", ".join(f"{count} {cause}" for cause, count in Counter(failure.cause for failure in failures).most_common())
        headlines = "".join(f"\n{count} x {headline}" for headline, count in _headlines(failures))
        raise UserError(
            f"{len(failures)} of {total} {self.calls} failed ({causes}) = {len(failures) / total:.1%}, more than {self.setting} "
            f"{self.max_error_rate:.1%}; mend {self.owner}, or raise {self.setting}{headlines}\nthe first failure is:\n{failures[0].trace}"
        )


def _headlines(failures: Sequence[Failure]) -> list[tuple[str, int]]:
    """Return the causes and their counts, the most frequent first."""
    return Counter(failure.headline for failure in failures).most_common()


def rollout_failures(groups: Iterable[Group], *, owner: str) -> list[Failure]:
    """Return the failed trajectories, each with prompt and plug-in in the trace."""
    return [
        replace(failure, trace=f"{owner} failed for prompt {group.id}: {failure.headline}\n{failure.trace}".rstrip())
        for group in groups
        for failure in group.failures
    ]


def reward_failures(groups: Iterable[Group]) -> tuple[list[Failure], int]:
    """Return the failed reward calls, and the number of all."""
    rewards = [sample.reward for group in groups for sample in last_samples(group.samples) if sample.reward is not None]
    failed = [reward for reward in rewards if reward.outcome is not RewardOutcome.SCORED]
    return [Failure(reward.outcome.value, reward.message.partition("\n")[0], reward.message) for reward in failed], len(rewards)
