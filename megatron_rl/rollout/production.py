"""Groups in the making: a task for each, from the buffer's pending prompts to its done groups, also while the trainer trains.

How many may be in the making is arithmetic, by which no token is ever too old to train on: groups are trained on in the order of their
prompts, so how many come before a group says by which step at the latest it is trained on.
Legend: step s trains the weights of version s into those of version s + 1; k is the staleness allowed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megatron_rl.data.buffer import Buffer
from megatron_rl.data.source import PromptSource
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.rollout.generator import cancel
from megatron_rl.types import Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`groups_per_step` groups with a signal make a step; a token is at most `max_staleness` versions old; `num_steps` steps in all."""

    groups_per_step: int
    max_staleness: int
    num_steps: int

    def num_admitted(self, *, step: int, missing: int, version: int) -> int:
        """How many groups not trained on yet, counted in their order, may be generated while the engines serve `version` or later.

        `step` is the first that has not got all its groups; it takes the first `missing` of them, and every `groups_per_step` behind those
        are one step later, or earlier where some are filtered out before them. So the last group admitted is trained on at step
        `version` + k at the latest, while all its tokens have `version` or a later one. With k = 0 nothing is made ahead.
        """
        last_step = min(version + self.max_staleness, self.num_steps - 1)
        return missing + (last_step - step) * self.groups_per_step if last_step >= step else 0

    def oldest_version(self, step: int) -> int:
        """The oldest weights whose tokens `step` may train on."""
        return step - self.max_staleness


class Production:
    """Makes the groups that it is allowed to, and puts each into the buffer when it is finished, whoever waits for it by then.

    What `make` raises is raised by the next `wait`. Lives on one event loop.
    """

    def __init__(self, source: PromptSource, buffer: Buffer, make: Callable[[Prompt], Awaitable[Group]]) -> None:
        self._source, self._buffer, self._make = source, buffer, make
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        # Of the groups that are waited for, those that are not done yet.
        self._missing: set[str] = set()
        self._finished = asyncio.Event()
        self._busy_since_s = self._busy_before_s = 0.0
        self.num_tokens = 0
        """Response tokens of all groups finished so far."""

    @property
    def busy_s(self) -> float:
        """Seconds so far in which at least one group was being made. May be asked from any thread."""
        return self._busy_before_s + (time.monotonic() - self._busy_since_s if self._tasks else 0.0)

    def admit(self, num_groups: int) -> None:
        """Let the first `num_groups` groups that are not trained on yet, in the order of their prompts, be made."""
        lacking = num_groups - self._buffer.counts().waiting
        if lacking > 0:
            self._buffer.add_prompts(self._source.next_prompts(lacking))
        for prompt in self._buffer.take_pending(num_groups, among=num_groups):
            if not self._tasks:
                self._busy_since_s = time.monotonic()
            task = asyncio.create_task(self._produce(prompt))
            self._tasks.add(task)
            task.add_done_callback(self._finish)

    async def _produce(self, prompt: Prompt) -> None:
        group = await self._make(prompt)
        self._buffer.put_done(group)
        self._missing.discard(group.id)
        self.num_tokens += sum(len(sample.response_ids) for sample in group.samples)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        if len(self._tasks) == 1:
            now_s = time.monotonic()
            self._busy_before_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        self._tasks.discard(task)
        if not task.cancelled():
            # Asked of every task: asyncio prints the traceback of each failure that nobody has looked at.
            error = task.exception()
            self._failure = self._failure or error
        self._finished.set()

    async def wait(self, num_groups: int, *, progress: PhaseProgress) -> None:
        """Until the first `num_groups` groups that are not trained on yet are done; they have been admitted. Raises why one cannot be."""
        # Read once: in front of those that are waited for nothing comes or goes meanwhile.
        self._missing = self._buffer.unfinished(among=num_groups)
        shown = 0
        while True:
            self._finished.clear()
            if self._failure is not None:
                raise self._failure
            ready = num_groups - len(self._missing)
            progress.advance(ready - shown)
            shown = ready
            if not self._missing:
                return
            await self._finished.wait()

    async def stop(self) -> None:
        """Abort what is being made; it stays in flight in the buffer, so that whoever opens that next makes it again."""
        await cancel(self._tasks)
