"""Engines that die or fail: the run goes on without them, and each is started again on its place."""

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray.exceptions import RayError

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.errors import EngineDiedError, MegatronRLError
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.runtime.engines import EngineGroup

ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b")


class EngineReturns:
    """Watches `engines` at `addresses`, by number, which are members of the `manager`; None for one that died before.

    A failed engine is ended, and a dead one started again, as often as rollout.engine_restarts says.
    Others leave the run, which ends when that many have left that fewer than half remain.
    `serve_current`: a new engine has the weights from its start. `wait` takes a coroutine and its name.
    """

    def __init__(
        self,
        engines: EngineGroup,
        manager: RolloutManager,
        addresses: Sequence[EngineAddress | None],
        *,
        wait: Callable[..., Any],
        note: Callable[[str], None],
        serve_current: bool,
    ) -> None:
        self._engines, self._manager, self._wait, self._note, self._serve_current = engines, manager, wait, note, serve_current
        self._numbers = {address: number for number, address in enumerate(addresses) if address is not None}
        self._count = len(addresses)
        manager.pool.end_failed = self._end_failed
        manager.pool.end_hanging = self._end_hanging
        for number, address in enumerate(addresses):
            if address is not None:
                engines.watch(number, goes_on=partial(self._goes_on, number, address))
            else:
                died = EngineDiedError(f"engine {number} died before the ranks came back")
                wait(manager.expect(self._bring_back(number, died)), name="starting a dead engine again")

    def _end_failed(self, client: EngineClient, error: Exception) -> bool:
        """End an engine that the run can go on without; return True for such a one. One that has left is another one by now."""
        number, others = self._numbers[client.address], len(self._manager.clients) > 1
        ends = client in self._manager.clients and (others or self._engines.may_restart(number))
        if ends:
            self._engines.end(number, str(error))
        return ends

    def _end_hanging(self, client: EngineClient, answers: bool, waits: bool) -> None:
        """End an engine that makes no progress and does no work, where the run can go on without it; one that compiles goes on."""
        number = self._numbers[client.address]
        if self._engines.may_restart(number) or len(self._manager.clients) > 1:
            work = "a call of a weight sync" if client.pending.total() else "requests"
            fault = f"with {work} it made no step{'' if answers else ', did not answer'}, and its processes did no work"
            self._engines.end(number, fault, hangs=True, answers=answers, waits=waits)

    def _goes_on(self, number: int, address: EngineAddress, error: Exception) -> bool:
        """Return True when the run goes on without the dead engine `number`, for now or for good."""
        returns = self._engines.may_restart(number)
        if not returns and self._is_one_too_many(number, num_left=len(self._manager.clients) - 1):
            return False
        returning = self._bring_back(number, error) if returns else None
        left: bool = self._wait(self._manager.leave(address, error, returning=returning), name="going on without an engine")
        if left:
            again = "" if returning is None else f"engine {number} is started again, and "
            count = f"{len(self._manager.clients)} of {self._count} engines"
            self._note(f"{again}the run goes on with {count}, because one ended: {_sentence(error)}")
        return left

    def _is_one_too_many(self, number: int, *, num_left: int) -> bool:
        """Count an engine lost for good, with `num_left` others; return True, and note it, where the run ends by that."""
        self._engines.lost.add(number)
        ends = 2 * len(self._engines.lost) > self._count
        if ends and num_left:
            self._note(f"the run ends, because {len(self._engines.lost)} of {self._count} engines are lost, more than half")
        return ends

    async def _bring_back(self, number: int, death: Exception) -> bool:
        """Start the engine, dead of `death`, until it joins; return False where it may not be started once more."""
        begun_s = time.monotonic()
        while self._engines.may_restart(number):
            try:
                address = await self._engines.restart(number)
                self._numbers[address] = number
                await self._manager.join([address], serve_current=self._serve_current)
            except (MegatronRLError, RayError, TimeoutError) as error:
                self._note(f"engine {number} could not be started again: {_sentence(error)}")
                continue
            self._engines.watch(number, goes_on=partial(self._goes_on, number, address))
            self._note(f"engine {number} is back after {time.monotonic() - begun_s:.0f} s, and gets the current weights")
            return True
        if self._is_one_too_many(number, num_left=len(self._manager.clients)):
            self._engines.give_up(number, death)
        return False


def _sentence(error: Exception) -> str:
    """Return the first line of the message, and of the end of a log below it the last error."""
    first, *log = str(error).splitlines() or [repr(error)]
    found = [line for line in log if ERROR_LINE.match(line)]
    return f"{first} {found[-1]}" if found else first.removesuffix(":")
