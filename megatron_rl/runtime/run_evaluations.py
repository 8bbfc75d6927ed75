"""The evaluations of a run: each is waited for, or goes on beside the training of the next step."""

import math
import shutil
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rl.config.derived import DEADLINE, FEWEST_REQUESTS, request_deadline_s, reward_workers
from megatron_rl.config.eval_sets import EvalSettings
from megatron_rl.config.settings import ModelSettings, RewardSettings, RolloutSettings, Settings
from megatron_rl.evaluation.best_steps import best_after
from megatron_rl.evaluation.evaluator import EVALUATION_DIRECTORY, Evaluator, SetResult, weight_files
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.rollout.groups import ATTEMPTS, CANCEL_S, most_alone
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.runtime.watchdog import Watchdog

GENERATION_SETTINGS = f"rollout.timeout_s, reward.timeout_s and {DEADLINE}"
"""Those that the deadlines of generation follow, for messages."""


@dataclass(frozen=True, slots=True)
class _Begun:
    step: int
    names: tuple[str, ...]
    progress: PhaseProgress
    running: "Future[list[SetResult]]"


class RunEvaluations:
    """Evaluates the weights after a step on sets, by `manager`; `wait` waits for samples."""

    def __init__(
        self, settings: Settings, manager: RolloutManager, *, watchdog: Watchdog, wait: Callable[..., Any], records: RunRecords
    ) -> None:
        run, rollout, reward = settings.run, settings.rollout, settings.reward
        self._settings, self._watchdog, self._wait, self._records = settings, watchdog, wait, records
        self._evaluator = make_evaluator(settings.eval, manager, rollout=rollout, reward=reward, seed=run.seed, say=records.say)
        self._deadline_s = partial(evaluation_deadline_s, settings.eval, settings.model, rollout, reward)
        self._begun: _Begun | None = None
        self._running: Future[list[SetResult]] | None = None

    def begin(self, names: tuple[str, ...], *, step: int, goes_on: bool) -> None:
        """Begin the evaluation of the sets `names` after `step` steps; one that was killed `goes_on` where it was."""
        run, model = self._settings.run, self._settings.model.path
        progress = PhaseProgress("eval", total=self._evaluator.num_prompts(names), unit="prompts")
        running = self._evaluator.run(
            names,
            directory=run.directory / EVALUATION_DIRECTORY / f"step-{step:06}",
            facts={"model": str(model), "files": weight_files(model), "steps": step},
            goes_on=goes_on,
            advance=progress.advance,
        )
        self._running = self._watchdog.begin(running)
        self._begun = _Begun(step, names, progress, self._running)

    def finish(self, *, late: bool = True) -> None:
        """Wait for the evaluation in progress, if any; a `late` one is of a step whose row is written."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        timeout_s = self._deadline_s(num_samples=self._evaluator.num_answers(begun.names))
        try:
            with self._records.phase("eval", progress=begun.progress):
                results = self._wait(begun.running, name=f"evaluation after step {begun.step}", timeout_s=timeout_s)
        except CancelledError:
            self._records.say(f"the evaluation after step {begun.step} is given up, because no engine has its weights any more")
            return
        self._records.add_evaluation(results, step=begun.step, late=late)
        self._records.best = best_after(self._records.best, results, sets=self._settings.eval.sets, step=begun.step)

    def give_up(self) -> None:
        """Cancel the evaluation in progress, if any, whose answers are kept."""
        if self._running is not None:
            self._running.cancel()

    def forget(self, *, after_step: int) -> None:
        """Delete the answers of later steps, which another life of the run made with weights of its own."""
        for path in (self._settings.run.directory / EVALUATION_DIRECTORY).glob("step-*"):
            if int(path.name.removeprefix("step-")) > after_step:
                shutil.rmtree(path, ignore_errors=True)


def make_evaluator(
    evaluation: EvalSettings, manager: RolloutManager, *, rollout: RolloutSettings, reward: RewardSettings, seed: int, **say: Any
) -> Evaluator:
    """Return the evaluator of a run's sets, on the engines of `manager`."""
    run: dict[str, Any] = {"rollout": rollout, "reward": reward, "seed": seed, **say}
    return Evaluator(evaluation, manager.answer, prompts=manager.prompts.held_out, tokenizer=manager.prompts.tokenizer, **run)


def generation_deadline_s(
    model: ModelSettings, rollout: RolloutSettings, reward: RewardSettings, *, num_samples: int, num_workers: int | None = None
) -> float:
    """Return the deadline in seconds for `num_samples` trajectories with rewards.

    Every call is assumed to keep its own deadline. One wave more than the samples fill is allowed,
    because groups end unevenly and a baseline may be generated first. Environments and agents also
    need a place of `most_alone`. `num_workers` score rewards, by default this machine's.
    """
    num_slots = rollout.num_engines * (rollout.max_concurrent_requests or FEWEST_REQUESTS)
    waves = 1 + math.ceil(num_samples / min(num_slots, most_alone(rollout) if rollout.is_hosted else num_slots))
    wave_s = max(request_deadline_s(model, rollout.sampling), ATTEMPTS * (rollout.timeout_s + CANCEL_S))
    return waves * wave_s + math.ceil(num_samples / (num_workers or reward_workers())) * reward.timeout_s


def evaluation_deadline_s(
    evaluation: EvalSettings, model: ModelSettings, rollout: RolloutSettings, reward: RewardSettings, *, num_samples: int
) -> float:
    """Return the deadline in seconds for `num_samples` answers of an evaluation, as long as the longest of any set."""
    longest = rollout.model_copy(update={"sampling": evaluation.longest_sampling(rollout.sampling)})
    return generation_deadline_s(model, longest, reward, num_samples=num_samples)
