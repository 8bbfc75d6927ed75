"""Groups in the making: a task for each, from the buffer's pending prompts to its done groups, also while the trainer trains."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from megatron_rl.data.buffer import Buffer
from megatron_rl.data.source import PromptSource
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.rollout.generator import cancel
from megatron_rl.types import Group, Prompt


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
