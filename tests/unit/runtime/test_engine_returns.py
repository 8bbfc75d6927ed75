"""Which engines a run may lose, and which it ends by itself: the engines' processes are stand-ins."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.errors import EngineDiedError, EngineError
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.runtime.engine_returns import EngineReturns


class Engines:
    """Engines of which those in `restartable` may be started again, which never ends."""

    def __init__(self, restartable: set[int]) -> None:
        self.may_restart = restartable.__contains__
        self.deaths: dict[int, Callable[[Exception], bool]] = {}
        self.ended: list[int] = []
        self.lost: set[int] = set()
        self.given_up: list[int] = []
        self.restarted: dict[int, EngineAddress] = {}

    def watch(self, number: int, *, goes_on: Callable[[Exception], bool]) -> None:
        self.deaths[number] = goes_on

    def end(self, number: int, fault: str) -> None:
        self.ended.append(number)

    async def restart(self, number: int) -> EngineAddress:
        if number not in self.restarted:
            await asyncio.Event().wait()
        return self.restarted[number]

    def give_up(self, number: int, error: Exception) -> None:
        self.given_up.append(number)

    async def dies(self, number: int) -> bool:
        """True where the run goes on."""
        return await asyncio.to_thread(self.deaths[number], EngineDiedError("killed by signal 9"))


def open_manager(num_engines: int) -> RolloutManager:
    addresses = [EngineAddress(f"http://127.0.1.{number}", "key", 32, 64, 64, has_tokenizer=False) for number in range(num_engines)]
    manager = RolloutManager.__new__(RolloutManager)
    manager.pool = EnginePool([EngineClient(address, request_timeout_s=5.0) for address in addresses], max_requests=1)
    manager._returning, manager._num_returned = set(), 0
    return manager


async def watch(engines: Any, manager: RolloutManager, notes: list[str], *dead: int) -> None:
    """Watch engines as at the start of ranks, the `dead` without an address."""
    loop = asyncio.get_running_loop()

    def wait(work: Awaitable[Any], *, name: str) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(5)  # type: ignore[arg-type]

    addresses: list[EngineAddress | None] = [client.address for client in manager.clients]
    for number in dead:
        addresses.insert(number, None)
    await asyncio.to_thread(EngineReturns, engines, manager, addresses, wait=wait, note=notes.append, serve_current=False)


@pytest.mark.parametrize("returning", [True, False])
def test_the_last_one_present_may_go_while_another_returns(returning: bool) -> None:
    """One of two is lost for good, which is not more than half; without the other one nothing is left."""

    async def test() -> None:
        engines, manager, notes = Engines({0} if returning else set()), open_manager(2), list[str]()
        await watch(engines, manager, notes)
        assert await engines.dies(0)
        assert await engines.dies(1) is returning
        assert len(manager.clients) == (0 if returning else 1)
        assert notes[0].startswith("engine 0 is started again, and the run goes on with 1 of 2 engines" if returning else "the run goes on")

    asyncio.run(test())


@pytest.mark.parametrize(("num_engines", "restartable", "ends"), [(2, set(), True), (1, {0}, True), (1, set(), False)])
def test_one_that_fails_is_ended_where_the_run_goes_on_without_it(num_engines: int, restartable: set[int], ends: bool) -> None:
    async def test() -> None:
        engines, manager = Engines(restartable), open_manager(num_engines)
        await watch(engines, manager, [])
        client = manager.clients[0]
        assert manager.pool.end_failed(client, EngineError("broken pipe")) is ends and engines.ended == [0] * ends
        manager.pool.leave(client, EngineError("gone"))
        assert not manager.pool.end_failed(client, EngineError("late")), "another one is at its address by now"

    asyncio.run(test())


def test_losses_for_good_count_in_all_lives_of_the_ranks() -> None:
    """One of four is lost in the first life, another one dies with the ranks, and a third one after they came back."""

    async def test() -> None:
        engines, notes = Engines({1, 2}), list[str]()
        manager = open_manager(4)
        await watch(engines, manager, notes)
        assert await engines.dies(0) and engines.lost == {0}
        # The ranks come back.
        manager, back = open_manager(2), EngineAddress("http://127.0.1.9", "key", 32, 64, 64, has_tokenizer=False)
        joined = list[EngineAddress]()

        async def join(addresses: list[EngineAddress], *, serve_current: bool) -> None:
            joined.extend(addresses)

        manager.join = join  # type: ignore[method-assign,assignment]
        engines.restarted[1] = back
        await watch(engines, manager, notes, 0, 1)
        await asyncio.wait_for(asyncio.gather(*manager._returning), 5)
        assert joined == [back] and manager._num_returned == 1 and engines.given_up == [] and engines.lost == {0}
        assert await engines.dies(3) and engines.lost == {0, 3}
        engines.may_restart = lambda number: False
        assert not await engines.dies(2)
        assert engines.lost == {0, 2, 3}

    asyncio.run(test())


def test_too_many_lost_engines_end_the_next_life_as_well() -> None:
    async def test() -> None:
        engines, manager = Engines(set()), open_manager(1)
        engines.lost = {0, 1}
        await watch(engines, manager, [], 0, 1)
        await asyncio.wait_for(asyncio.gather(*manager._returning), 5)
        assert engines.given_up == [0, 1]

    asyncio.run(test())
