"""Rewards in isolated worker processes: a failing or hanging call is an outcome, never a zero."""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool
from pebble.pool import process

from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.config.settings import RewardSettings
from megatron_rl.errors import UserError
from megatron_rl.plugins.kinds import KINDS
from megatron_rl.rewards.processes import WorkerContext, lead_session, start_tracker, worker_states
from megatron_rl.rewards.worker import Form, call_all, form_of, late
from megatron_rl.system.deadlines import NAMED_S, PLUGIN_IMPORT_S, REWARD_TAKE_S
from megatron_rl.system.files import disk_errors
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample

SETTING = KINDS["reward"].setting

MAX_ATTEMPTS = 3  # how often a call is begun whose workers are killed before it is at work
POLL_S = 1.0
TASK_S = 0.02
"""Seconds of work that a worker is given at once: long against the 0.2 ms that giving costs, short against what anybody waits for."""
MAX_CALLS = 64  # calls that a worker is given at once, however fast they are
ASYNC_END_S = 5.0  # from the deadline of async calls to the end of a worker whose event loop is blocked


_LOST = ("the worker process ended", "the reward workers were killed")
"""The begins of messages of calls whose workers are gone."""


class RewardRunner(AbstractContextManager["RewardRunner", None]):
    """Worker processes that call `reward.function`; use as a context manager, or call `close`.

    A call longer than `timeout_s` ends the worker and every process started there, and the worker
    is replaced. Calls requested in the same moment go to a worker together, as many as take `TASK_S`
    at the recent pace, async ones up to MAX_CALLS; those requested while all workers have async calls
    go to the next free one. Where one call stops the worker, or hangs, all are repeated, each alone,
    so that every call has a separate outcome. Workers are replaced when none takes a call for
    REWARD_TAKE_S seconds; `note` is called before. Printed output goes to `log_path`, where given.
    `probe` finds out if the function is async, or takes the samples of a group, which are requested in
    the same moment.
    """

    def __init__(
        self, settings: RewardSettings, *, num_workers: int = 1, log_path: Path | None = None, note: Callable[[str], None] = print
    ) -> None:
        self._settings, self._num_workers, self._log_path, self._note = settings, num_workers, log_path, note
        if log_path is not None:
            with disk_errors(log_path):
                log_path.parent.mkdir(parents=True, exist_ok=True)
        self._call_s = TASK_S
        # Awaited calls, the time when one was last begun or finished, and if a lack was noted.
        self._num_calls, self._progress_s, self._noted = 0, 0.0, False
        # Calls that no worker has, with their rewards to come; the task that gives them; those that wait for workers.
        self._waiting: dict[asyncio.Future[Reward], Sample] = {}
        self._giving: asyncio.Task[None] | None = None
        self._given: set[asyncio.Task[None]] = set()
        self.form: Form = "sample"
        """Found by `probe`."""
        self._pool = self._make_pool()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill and reap the workers, and every process started by workers."""
        self._pool.stop()
        self._pool.join()

    def find_form(self) -> None:
        """Import the function and check the signature. Raises UserError."""
        path = self._settings.function
        try:
            form = self._begin(form_of, timeout_s=PLUGIN_IMPORT_S).result()
        except FutureTimeout as error:
            raise UserError(f"{SETTING} {path} is not imported after {PLUGIN_IMPORT_S:.0f} s; move slow work out of its module") from error
        except ProcessExpired as error:
            raise UserError(f"{SETTING} {path} ended its process while it was imported (exit status {error.exitcode})") from error
        except BrokenProcessPool as error:
            where = self._log_path or "what they print"
            raise UserError(f"the reward workers end as soon as they start; look for the reason in {where}") from error
        if isinstance(form, UserError):
            raise form
        self.form = form

    def probe(self, prompt: Prompt, *, response: str = "") -> Reward:
        """Import the function, check the signature and call it once. Raises UserError."""
        path = self._settings.function
        self.find_form()
        (reward,) = self._read(self._call([Sample.written(prompt, text=response)])) or [_killed(1)]
        if reward.outcome is not RewardOutcome.SCORED:
            raise UserError(
                f"{SETTING} {path} gave no reward for a probe (prompt {prompt.id}, response {response!r}, label {prompt.label!r}):"
                f" it needs to return a finite number, or a mapping with the key 'reward', within {self._settings.timeout_s:g} s;"
                f"\n{reward.message}"
            )
        return reward

    async def score(self, sample: Sample) -> Reward:
        """Return the reward of one sample. Never raises for what the user's function does."""
        # Experts are megabytes of a long sample, and no reward needs records of an engine.
        records = sample.routed_experts is not None or sample.candidates is not None
        made: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._waiting[made] = replace(sample, routed_experts=None, candidates=None) if records else sample
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give())
        try:
            return await made
        finally:
            self._waiting.pop(made, None)  # of a caller that no longer waits

    async def _give(self) -> None:
        """Give workers the calls requested until this task has its first turn, and async ones until a worker is free."""
        while self._waiting:
            while self.form == "async" and len(self._given) >= self._num_workers:
                await asyncio.wait(self._given, return_when=asyncio.FIRST_COMPLETED)
            for calls in self._parts():
                task = asyncio.create_task(self._score_part({made: self._waiting.pop(made) for made in calls}))
                self._given.add(task)
                task.add_done_callback(self._given.discard)

    def _parts(self) -> list[list[asyncio.Future[Reward]]]:
        """Return the waiting calls, by those that go to a worker together."""
        calls = list(self._waiting)
        if self.form == "group":
            ids = [self._waiting[made].group_id for made in calls]
            return [[made for made, name in zip(calls, ids, strict=True) if name == group] for group in dict.fromkeys(ids)]
        size = MAX_CALLS if self.form == "async" else max(1, min(MAX_CALLS, math.ceil(TASK_S / self._call_s)))
        return [calls[begin : begin + size] for begin in range(0, len(calls), size)]

    async def _score_part(self, calls: Mapping[asyncio.Future[Reward], Sample]) -> None:
        try:
            rewards = await self._score(list(calls.values()))
        except Exception as error:  # every caller gets it
            for made in calls:
                if not made.done():
                    made.set_exception(error)
            return
        for made, reward in zip(calls, rewards, strict=True):
            if not made.done():
                made.set_result(reward)

    async def _score(self, samples: Sequence[Sample]) -> list[Reward]:
        # When all workers are lost while none is at work (the system may kill idle ones for memory), again.
        for _ in range(MAX_ATTEMPTS):
            rewards = await self._outcome(self._call(samples), pool=self._pool)
            if rewards is not None:
                break
        else:
            rewards = [_killed(MAX_ATTEMPTS)] * len(samples)
        if len(rewards) == len(samples):
            return rewards
        if self.form == "group":
            return rewards * len(samples)
        return [reward for alone in await asyncio.gather(*(self._score([sample]) for sample in samples)) for reward in alone]

    def _call(self, samples: Sequence[Sample]) -> ProcessFuture[Any]:
        timeout_s = self._settings.timeout_s
        # Async calls end by themselves.
        of_worker_s = timeout_s + ASYNC_END_S * (self.form == "async")
        options = {"samples": samples, "form": self.form, "call_timeout_s": timeout_s}
        return self._begin(call_all, timeout_s=of_worker_s, **options)

    def _begin(self, function: Callable[..., Any], *, timeout_s: float, **arguments: Any) -> ProcessFuture[Any]:
        if not self._pool.active:
            self.close()
            self._pool = self._make_pool()
        own = json.dumps(self._settings.args)
        return self._pool.schedule(function, args=[self._settings.function, own], kwargs=arguments, timeout=timeout_s)

    def _make_pool(self) -> ProcessPool:
        start_tracker()
        # Pebble (5.2.3) ends calls by the wall clock: all in progress where that is set forward.
        process.time = SimpleNamespace(time=time.monotonic, sleep=time.sleep)
        return ProcessPool(max_workers=self._num_workers, context=WorkerContext(), initializer=lead_session, initargs=[self._log_path])

    async def _outcome(self, future: ProcessFuture[Any], *, pool: ProcessPool) -> list[Reward] | None:
        """Return outcomes as `_read` does; None when the `pool` broke before work began."""
        finished = asyncio.wrap_future(future)
        if not self._num_calls:
            self._progress_s = time.monotonic()
        self._num_calls += 1
        try:
            # A pool that breaks can forget a call that no worker has taken yet.
            while not finished.done() and pool.active:
                await asyncio.wait([finished], timeout=POLL_S)
                self._check_progress(future, pool)
        finally:
            self._num_calls -= 1
        if not finished.done():
            finished.cancel()
            return None
        # Read here, because asyncio prints the traceback of each unread failure.
        finished.exception()
        return self._read(future)

    def _check_progress(self, future: ProcessFuture[Any], pool: ProcessPool) -> None:
        """Give up a pool where no worker takes a call: one stopped worker blocks all others."""
        now_s = time.monotonic()
        if future.running() or future.done():
            self._progress_s, self._noted = now_s, False
            return
        waited_s = now_s - self._progress_s
        if waited_s > REWARD_TAKE_S:
            self._progress_s, self._noted = now_s, False
            self._note(f"the reward workers are replaced: none has taken a call for {waited_s:.0f} s")
            pool.stop()
        elif waited_s > NAMED_S and not self._noted:
            self._noted = True
            workers = ", ".join(f"{pid} ({state})" for pid, state in worker_states())
            self._note(
                f"no reward worker has taken a call for {waited_s:.0f} s, though some wait; processes: {workers or 'none'}; they are "
                f"replaced after {REWARD_TAKE_S:.0f} s"
            )

    def _read(self, future: ProcessFuture[Any]) -> list[Reward] | None:
        """Return a reward for each call, or one for all of a lost worker; None if none began."""
        try:
            rewards, call_s = future.result()
            self._call_s = max(call_s, TASK_S / MAX_CALLS)
        except FutureTimeout:
            return [Reward(outcome=RewardOutcome.TIMEOUT, message=late(self._settings.timeout_s))]
        except ProcessExpired as error:
            message = f"{_LOST[0]} during the call (exit status {error.exitcode})"
            return [Reward(outcome=RewardOutcome.ERROR, message=message)]
        except BrokenProcessPool:
            return None
        return list(rewards)


def scores_of_sets(
    sets: Mapping[str, EvalSet], reward: RewardSettings, *, prompts: Mapping[str, Sequence[Prompt]], stack: ExitStack, **options: Any
) -> dict[str, Callable[[Sample], Awaitable[Reward]]]:
    """Return the reward functions of the sets with one of their own, tried on a prompt. Workers end with `stack`."""
    scores: dict[str, Callable[[Sample], Awaitable[Reward]]] = {}
    for name, each in sets.items():
        if each.reward is not None:
            runner = stack.enter_context(RewardRunner(each.reward.of(reward), **options))
            runner.probe(prompts[name][0])
            scores[name] = runner.score
    return scores


def was_lost(reward: Reward) -> bool:
    """Return True for a call that timed out, or whose worker died: the next one may have a reward."""
    return reward.outcome is RewardOutcome.TIMEOUT or reward.message.startswith(_LOST)


def _killed(num_attempts: int) -> Reward:
    return Reward(outcome=RewardOutcome.ERROR, message=f"{_LOST[1]} before this call was at work, in {num_attempts} attempts")
