"""Rewards in isolated worker processes: a call that fails or hangs is an outcome of its own, never a score of zero."""

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from megatron_rl.config.settings import RewardSettings
from megatron_rl.errors import UserError
from megatron_rl.rewards.worker import SETTING, call, check_function
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample

LOAD_TIMEOUT_S = 120.0
"""Deadline of importing the user's module, in seconds."""


class RewardRunner:
    """Worker processes that call `reward.function`; use as a context manager, or call `close`.

    The function is `def score(*, prompt: str, response: str, label: str | None, metadata: Mapping) -> float | dict[str, float]`, sync or
    async; of a dict, the item `reward` counts and the others are recorded. One worker makes one call at a time;
    a call that runs longer than `timeout_s` loses its worker, which is replaced.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        # Spawned: a fork of the driver would inherit its threads and its memory.
        self._pool = ProcessPool(max_workers=settings.num_workers, context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and reap them."""
        self._pool.stop()
        self._pool.join()

    def probe(self, prompt: Prompt, *, response: str = "") -> Reward:
        """Import the function, check its signature and call it once, for a `prompt` of the data, before anything expensive starts.

        Raises:
            UserError: the function cannot be imported or called, raises, hangs, or returns something other than finite numbers.
        """
        path = self._settings.function
        try:
            problem = self._pool.schedule(check_function, args=[path], timeout=LOAD_TIMEOUT_S).result()
        except FutureTimeout as error:
            raise UserError(f"{SETTING} {path} is not imported after {LOAD_TIMEOUT_S:.0f} s; move slow work out of its module") from error
        except ProcessExpired as error:
            raise UserError(f"{SETTING} {path} ended its process while it was imported (exit status {error.exitcode})") from error
        if problem is not None:
            raise UserError(problem)
        arguments = _arguments(prompt, response)
        future = self._pool.schedule(call, args=[path], kwargs=arguments, timeout=self._settings.timeout_s)
        reward = self._outcome(future)
        if reward.outcome is not RewardOutcome.SCORED:
            raise UserError(
                f"{SETTING} {path} gave no reward for a probe (prompt {prompt.id}, response {response!r}, label {prompt.label!r}):"
                f" it needs to return a finite number, or a dict with the key 'reward', within {self._settings.timeout_s:g} s;"
                f"\n{reward.message}"
            )
        return reward

    async def score(self, sample: Sample) -> Reward:
        """The reward of one sample. Never raises for what the user's function does."""
        arguments = _arguments(sample.prompt, sample.response_text, sample.metadata)
        future = self._pool.schedule(call, args=[self._settings.function], kwargs=arguments, timeout=self._settings.timeout_s)
        await asyncio.wait([asyncio.wrap_future(future)])
        return self._outcome(future)

    def _outcome(self, future: Any) -> Reward:
        """The outcome of a scheduled call, waiting for it where it is not done."""
        try:
            return future.result()
        except FutureTimeout:
            return Reward(outcome=RewardOutcome.TIMEOUT, message=f"no reward after {self._settings.timeout_s:g} s (reward.timeout_s)")
        except ProcessExpired as error:
            return Reward(outcome=RewardOutcome.ERROR, message=f"the worker process ended during the call (exit status {error.exitcode})")


def check_error_rate(rewards: Sequence[Reward], *, max_error_rate: float) -> None:
    """Check the outcomes of one batch.

    Raises:
        UserError: the share of errors and timeouts is above `max_error_rate`; with the first traceback.
    """
    failed = [reward for reward in rewards if reward.outcome is not RewardOutcome.SCORED]
    if len(failed) > max_error_rate * len(rewards):
        timeouts = sum(reward.outcome is RewardOutcome.TIMEOUT for reward in failed)
        raise UserError(
            f"{len(failed) - timeouts} errors and {timeouts} timeouts in {len(rewards)} reward calls = {len(failed) / len(rewards):.1%},"
            f" more than reward.max_error_rate {max_error_rate:.1%}; mend the reward function, the first failure is:\n{failed[0].message}"
        )


def _arguments(prompt: Prompt, response: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the reward function gets: the prompt's metadata, overlaid by what the rollout recorded."""
    return {"prompt": prompt.text, "response": response, "label": prompt.label, "metadata": {**prompt.metadata, **(extra or {})}}
