"""Rewards in isolated worker processes: a call that fails or hangs is an outcome of its own, never a score of zero."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from megatron_rl.config.settings import RewardSettings
from megatron_rl.deadlines import REWARD_IMPORT_S
from megatron_rl.errors import UserError
from megatron_rl.files import disk_errors
from megatron_rl.plugins import KINDS
from megatron_rl.rewards.processes import WorkerContext, lead_session, start_tracker
from megatron_rl.rewards.worker import call_all, check_function
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample, StopReason

SETTING = KINDS["reward"].setting

MAX_ATTEMPTS = 3
"""How often a call is begun whose workers are killed before it is at work."""
POLL_S = 1.0
TASK_S = 0.02
"""Seconds of work that a worker is given at once: long against the 0.2 ms that giving costs, short against what anybody waits for."""
MAX_CALLS = 64
"""Calls that a worker is given at once, however fast they are."""


class RewardRunner:
    """Worker processes that call `reward.function`; use as a context manager, or call `close`.

    The function is a `plugins.Reward`; of a mapping, the item `reward` counts and the others are recorded. One worker makes one call at
    a time; a call that runs longer than `timeout_s` loses its worker, with every process that it started, and the worker is replaced.
    Calls that are asked for in the same moment go to a worker together, as many as take `TASK_S` at the pace of those before. Where one
    of them stops the worker, or hangs, all are made again, each by itself, so that every call has its own outcome.
    What the function prints goes to the file `log_path`, where one is given.
    """

    def __init__(self, settings: RewardSettings, *, log_path: Path | None = None) -> None:
        self._settings = settings
        self._log_path = log_path
        if log_path is not None:
            with disk_errors(log_path):
                log_path.parent.mkdir(parents=True, exist_ok=True)
        self._noted: set[str] = set()
        self._call_s = TASK_S
        # The calls that are being collected, and the task that makes them.
        self._together: tuple[list[Sample], asyncio.Task[list[Reward]]] | None = None
        self._pool = self._make_pool()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, and every process that they started, and reap them."""
        self._pool.stop()
        self._pool.join()

    def probe(self, prompt: Prompt, *, response: str = "") -> Reward:
        """Import the function, check its signature and call it once, for a `prompt` of the data, before anything expensive starts.

        Raises:
            UserError: the function cannot be imported or called, raises, hangs, or returns something other than finite numbers.
        """
        path = self._settings.function
        try:
            problem = self._begin(check_function, timeout_s=REWARD_IMPORT_S).result()
        except FutureTimeout as error:
            raise UserError(f"{SETTING} {path} is not imported after {REWARD_IMPORT_S:.0f} s; move slow work out of its module") from error
        except ProcessExpired as error:
            raise UserError(f"{SETTING} {path} ended its process while it was imported (exit status {error.exitcode})") from error
        except BrokenProcessPool as error:
            raise UserError(
                f"the reward workers end as soon as they start; look for the reason in {self._log_path or 'what they print'}"
            ) from error
        if problem is not None:
            raise UserError(problem)
        sample = probe_sample(prompt, response)
        (reward,) = self._read(self._begin(call_all, timeout_s=self._settings.timeout_s, samples=[sample])) or [_killed(1)]
        if reward.outcome is not RewardOutcome.SCORED:
            raise UserError(
                f"{SETTING} {path} gave no reward for a probe (prompt {prompt.id}, response {response!r}, label {prompt.label!r}):"
                f" it needs to return a finite number, or a mapping with the key 'reward', within {self._settings.timeout_s:g} s;"
                f"\n{reward.message}"
            )
        return reward

    async def score(self, sample: Sample) -> Reward:
        """The reward of one sample. Never raises for what the user's function does."""
        if self._together is None:
            collected: list[Sample] = []
            self._together = collected, asyncio.create_task(self._score_collected(collected))
        samples, task = self._together
        index = len(samples)
        # Experts are megabytes of a long sample, which no reward needs.
        samples.append(sample if sample.routed_experts is None else replace(sample, routed_experts=None))
        if len(samples) >= MAX_CALLS or len(samples) * self._call_s >= TASK_S:
            self._together = None
        return (await asyncio.shield(task))[index]

    async def _score_collected(self, samples: list[Sample]) -> list[Reward]:
        """The rewards of `samples`, complete when this task has its first turn, after all that is asked for in the same moment."""
        if self._together is not None and self._together[0] is samples:
            self._together = None
        return await self._score(samples)

    async def _score(self, samples: Sequence[Sample]) -> list[Reward]:
        # When all workers are lost while none is at work (the system may kill idle ones for memory), again.
        for _ in range(MAX_ATTEMPTS):
            future = self._begin(call_all, timeout_s=self._settings.timeout_s, samples=samples)
            rewards = await self._outcome(future, pool=self._pool)
            if rewards is not None:
                break
        else:
            rewards = [_killed(MAX_ATTEMPTS)] * len(samples)
        if len(rewards) == len(samples):
            return rewards
        return [reward for alone in await asyncio.gather(*(self._score([sample]) for sample in samples)) for reward in alone]

    def _begin(self, function: Callable[..., Any], *, timeout_s: float, **arguments: Any) -> ProcessFuture[Any]:
        if not self._pool.active:
            self.close()
            self._pool = self._make_pool()
        own = json.dumps(self._settings.args)
        return self._pool.schedule(function, args=[self._settings.function, own], kwargs=arguments, timeout=timeout_s)

    def _make_pool(self) -> ProcessPool:
        start_tracker()
        return ProcessPool(
            max_workers=self._settings.num_workers, context=WorkerContext(), initializer=lead_session, initargs=[self._log_path]
        )

    async def _outcome(self, future: ProcessFuture[Any], *, pool: ProcessPool) -> list[Reward] | None:
        """What became of scheduled calls, as `_read` says it; None when their `pool` broke before they were at work."""
        finished = asyncio.wrap_future(future)
        # A pool that breaks can forget a call that no worker has taken yet.
        while not finished.done() and pool.active:
            await asyncio.wait([finished], timeout=POLL_S)
        if not finished.done():
            finished.cancel()
            return None
        # Asked for, because asyncio prints the traceback of each failure that nobody has looked at.
        finished.exception()
        return self._read(future)

    def _read(self, future: ProcessFuture[Any]) -> list[Reward] | None:
        """What became of calls, waiting for it where they are not done: a reward each, or one for all where the worker was lost.

        None when they were never at work.
        """
        try:
            rewards, self._call_s = future.result()
        except FutureTimeout:
            return [Reward(outcome=RewardOutcome.TIMEOUT, message=f"no reward after {self._settings.timeout_s:g} s (reward.timeout_s)")]
        except ProcessExpired as error:
            message = f"the worker process ended during the call (exit status {error.exitcode})"
            return [Reward(outcome=RewardOutcome.ERROR, message=message)]
        except BrokenProcessPool:
            return None
        return list(rewards)

    def note_failures(self, rewards: Sequence[Reward], *, step: int) -> None:
        """Write into the log how often each cause let a call of `step` fail, with the traceback of one that is new in this run.

        Raises UserError when the disk is full or the log's directory is gone.
        """
        if self._log_path is None:
            return
        if not self._log_path.parent.is_dir():
            raise UserError(
                f"{self._log_path} cannot be written: its directory was deleted or moved while the run was going; start the run again in a "
                "directory that stays"
            )
        with disk_errors(self._log_path), self._log_path.open("a") as log:
            for cause, failed in _by_cause(rewards).items():
                log.write(f"step {step}: {len(failed)} of {len(rewards)} reward calls: {cause}\n")
                if cause not in self._noted:
                    self._noted.add(cause)
                    log.write(f"{failed[0].message.strip()}\n")


def check_error_rate(rewards: Sequence[Reward], *, max_error_rate: float) -> None:
    """Check the outcomes of one batch.

    Raises:
        UserError: the share of errors and timeouts is above `max_error_rate`; with every cause, and the first traceback.
    """
    failed = [reward for reward in rewards if reward.outcome is not RewardOutcome.SCORED]
    if len(failed) > max_error_rate * len(rewards):
        timeouts = sum(reward.outcome is RewardOutcome.TIMEOUT for reward in failed)
        causes = "".join(f"\n{len(same)} x {cause}" for cause, same in _by_cause(rewards).items())
        raise UserError(
            f"{len(failed) - timeouts} errors and {timeouts} timeouts in {len(rewards)} reward calls = {len(failed) / len(rewards):.1%},"
            f" more than reward.max_error_rate {max_error_rate:.1%}; mend the reward function{causes}\n"
            f"the first failure is:\n{failed[0].message}"
        )


def _killed(num_attempts: int) -> Reward:
    return Reward(
        outcome=RewardOutcome.ERROR, message=f"the reward workers were killed before this call was at work, in {num_attempts} attempts"
    )


def _by_cause(rewards: Sequence[Reward]) -> dict[str, list[Reward]]:
    """The calls that failed, by the last line of what they said, the most frequent cause first."""
    causes: dict[str, list[Reward]] = {}
    for reward in rewards:
        if reward.outcome is not RewardOutcome.SCORED:
            causes.setdefault(reward.message.strip().rpartition("\n")[2], []).append(reward)
    return dict(sorted(causes.items(), key=lambda item: -len(item[1])))


def probe_sample(prompt: Prompt, response: str) -> Sample:
    """A sample as a rollout would return it, of a response without tokens."""
    ids = np.empty(0, np.int64)
    return Sample(
        group_id=prompt.id,
        index=0,
        prompt=prompt,
        response_ids=ids,
        loss_mask=np.empty(0, np.bool_),
        rollout_log_probs=np.empty(0, np.float32),
        weight_versions=ids,
        stop_reason=StopReason.STOP,
        response_text=response,
    )
