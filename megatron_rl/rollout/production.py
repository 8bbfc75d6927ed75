"""Groups in the making, also while the trainer trains: how many there are, and which ones a step gets.

prompts ──► in flight ──► done ──► the groups of a step, chosen by `rollout.order`
                │  ▲
                ▼  │
              the tail, which goes on in later steps
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from megatron_rl.config.order import InOrder, Quota
from megatron_rl.config.settings import RolloutSettings
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.source import PromptSource
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.metrics import Metric, Sum
from megatron_rl.rollout.generator import cancel
from megatron_rl.types import Group, Prompt

FORECAST_STEPS = 4
"""Steps whose groups say how many of the next ones will have a signal, and the most steps to make at once for one."""


class Production:
    """Groups made by `make` from the prompts of `source`, in `buffer`, for `num_steps` steps of `per_step` groups.

    `forecasts` makes as many groups at once as the share of trained ones among the last consumed
    ones lets expect a step to need.
    """

    def __init__(
        self,
        make: Callable[[Prompt], Awaitable[Group]],
        rollout: RolloutSettings,
        *,
        pool: EnginePool,
        source: PromptSource,
        buffer: Buffer,
        per_step: int,
        num_steps: int,
        forecasts: bool,
    ) -> None:
        self._make_group, self._pool, self._source, self._buffer = make, pool, source, buffer
        self._order, self._max_staleness = rollout.order, rollout.max_staleness
        self._per_step, self._num_steps, self._forecasts = per_step, num_steps, forecasts
        self.tasks: set[asyncio.Task[None]] = set()
        """Groups in the making."""
        self.num_tokens = 0
        """Response tokens of all groups so far."""
        self._begun: dict[str, int] = {}  # steps done when a group in the making was begun
        self._done: list[str] = []  # in the order of completion
        self._failure: BaseException | None = None  # the first one
        self._finished = asyncio.Event()
        self._is_busy, self._busy_since_s, self._busy_before_s = False, 0.0, 0.0

    @property
    def busy_s(self) -> float:
        """Return the seconds so far with a group on its way. Safe in any thread."""
        return self._busy_before_s + (time.monotonic() - self._busy_since_s if self._is_busy else 0.0)

    def _take_time(self) -> None:
        """Count the time since the last call, and note whether time counts from now on."""
        now_s = time.monotonic()
        self._busy_before_s += now_s - self._busy_since_s if self._is_busy else 0.0
        self._busy_since_s, self._is_busy = now_s, bool(self.tasks) and not self._pool.is_interrupted

    async def make(self, count: int, *, step: int, progress: PhaseProgress) -> list[str]:
        """Return the ids of `count` done groups for the step after `step` steps; begin later ones.

        In the order of prompts, the last begun group is trained on `max_staleness` steps later at
        the latest, as every step takes `per_step` groups or more: with tokens of version `step` or
        later. Step s trains the weights of version s. Raises the failure of any group.
        """
        steps_left = self._num_steps - 1 - step
        ahead = self._order.ahead(self._per_step, max_staleness=self._max_staleness, steps_left=steps_left)
        self._begin_groups(max(count + ahead, self._forecast(count)), step=step)
        waiting = self._buffer.waiting()
        self._done = [group.id for group in sorted(waiting, key=lambda group: group.moved_at) if group.state == "done"]
        begun = {group.id: min(self._begun.get(group.id, step), group.oldest_version) for group in waiting if group.state != "pending"}
        quotas = self._order.quotas(begun, count=count, per_step=self._per_step, max_staleness=self._max_staleness, step=step)
        lacking, seen, shown = [(needed, set(among)) for needed, among in quotas], 0, 0
        while True:
            self._finished.clear()
            if self._failure is not None:
                raise self._failure
            # Only what is new is looked at: there may be 100,000 groups.
            new, seen = self._done[seen:], len(self._done)
            lacking = [(needed - len(among.intersection(new)), among) for needed, among in lacking]
            ready = count - max(0, count - seen, *(needed for needed, _ in lacking))
            progress.advance(ready - shown)
            shown = ready
            if ready == count:
                return self._first_done([*quotas, (count, self._done)])
            await self._finished.wait()

    def _first_done(self, quotas: Sequence[Quota]) -> list[str]:
        """Return the ids that meet `quotas`, each of the groups that were done first."""
        chosen: list[str] = []
        for needed, among in quotas:
            counting = set(among).difference(chosen)
            chosen += [group_id for group_id in self._done if group_id in counting][: max(0, needed - len(chosen))]
        return chosen

    def _forecast(self, count: int) -> int:
        """Return the number of groups of which `count` will probably be trained on, from recent groups."""
        if not self._forecasts:
            return count
        num_trained, num_consumed = self._buffer.recently_trained(FORECAST_STEPS * self._per_step)
        # As if one trained group had come before: the first step asks for `count`, and none ever for infinitely many.
        expected = -(-count * (num_consumed + 1) // (num_trained + 1))
        return min(expected, max(count, FORECAST_STEPS * self._per_step))

    def _begin_groups(self, num_groups: int, *, step: int) -> None:
        """Begin the first `num_groups` untrained groups, in the order of prompts."""
        lacking = num_groups - self._buffer.counts().waiting
        if lacking > 0:
            # Rewards of whole steps alone: rounds of resampling and a resumed step choose the same prompts.
            mean_reward = partial(self._buffer.mean_reward, until=step)
            self._buffer.add_prompts(self._source.next_prompts(lacking, mean_reward=mean_reward))
        for prompt in self._buffer.take_pending(num_groups, among=num_groups):
            self._begun[prompt.id] = step
            task = asyncio.create_task(self._produce(prompt))
            self.tasks.add(task)
            task.add_done_callback(self._finish)
        self._take_time()

    async def leave_tail(self, *, step: int, shared: bool, num_surplus: int) -> dict[str, Metric]:
        """End the making for the step after `step` steps, and return metrics of the groups that are left.

        Engines go on where later steps train on their tokens. On devices that engines `shared` with
        ranks, and where later steps need newer tokens, requests are aborted: for the next step to
        continue, or in vain where a forecast was too high. Such groups are made anew, and counted with
        the `num_surplus` that already were.
        """
        order = self._order
        if order.partial and (shared or not self._max_staleness):
            await self._pool.interrupt()
        elif self.tasks and not self._max_staleness:
            num_surplus += len(self.tasks)
            await cancel(self.tasks)
            self._buffer.recover()
        self._take_time()
        if isinstance(order, InOrder) and not self._forecasts:
            return {}
        oldest = step + 1 - self._max_staleness
        num_surplus += self._buffer.renew(self._buffer.counts().done, oldest_version=oldest, by_newest=order.partial)
        return {"rollout/surplus_groups": Sum(num_surplus), "rollout/carried_groups": Sum(len(self.tasks))}

    async def _produce(self, prompt: Prompt) -> None:
        """Put a group into the buffer, even when no caller waits any more."""
        group = await self._make_group(prompt)
        self._buffer.put_done(group)
        self._done.append(group.id)
        del self._begun[group.id]
        self.num_tokens += sum(len(sample.response_ids) for sample in group.samples)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        self._take_time()
        if not task.cancelled():
            # asyncio prints the traceback of each exception that is not read.
            error = task.exception()
            self._failure = self._failure or error
        self._finished.set()
