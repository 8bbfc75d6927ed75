"""What a trajectory is told whose agent's node or process is gone, by actors that raise what Ray does."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnschedulableError, NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError

from megatron_rl.runtime.agent_nodes import _play_there
from megatron_rl.types import Prompt


def play(error: Exception) -> Any:
    """Let an agent play on an actor whose call ends with `error`."""
    failed: Future[Any] = Future()
    failed.set_exception(error)
    worker = SimpleNamespace(play=SimpleNamespace(remote=lambda prompt, message: SimpleNamespace(future=lambda: failed)))
    return asyncio.run(_play_there(worker, "10.0.0.2", Prompt(id="p", token_ids=np.array([1]), text="Hi."), {}))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RayActorError(), "is gone"),
        (OutOfMemoryError("15.1GB used / 16.0GB"), "was ended by Ray, because the machine runs out of memory"),
        # Of an actor that has to be on its node, where Ray knows that the node is dead.
        (ActorUnschedulableError("the node is dead\nand more"), "is gone (The actor is not schedulable: the node is dead)"),
        (NodeDiedError("the node died"), "is gone (the node died)"),
    ],
    ids=["actor", "memory", "unschedulable", "node"],
)
def test_an_agent_is_lost_whatever_ray_calls_it(error: Exception, said: str) -> None:
    """Its node then gets no agents for a while: it has the least load of all."""
    answer = play(error)
    assert answer["lost"] is True and answer["cause"] == "error"
    assert answer["headline"].startswith(f"the process for agents on 10.0.0.2 {said}")


def test_what_an_actor_raises_by_itself_is_no_loss() -> None:
    fault = RayTaskError("play", "trace", ZeroDivisionError("of the code")).as_instanceof_cause()
    with pytest.raises(ZeroDivisionError, match="trace"):
        play(fault)
