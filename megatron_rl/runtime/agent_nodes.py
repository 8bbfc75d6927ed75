"""Commands of agents on the other nodes of a run: an actor on each starts their processes.

Imports no torch and no transformers, which an actor would wait for.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.rollout.agents import COMMAND, AgentNode, check_program, play
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.environment_host import Environments
from megatron_rl.runtime.cluster import Reservation, enter_directory
from megatron_rl.runtime.watchdog import Watchdog, exit_of
from megatron_rl.system.deadlines import AGENTS_START_S, ENGINE_CONTROL_S, ENGINE_STOP_S
from megatron_rl.system.leftovers import scratch_directory
from megatron_rl.types import Message, Prompt

if TYPE_CHECKING:
    from megatron_rl.rollout.manager import RolloutManager


@ray.remote
class AgentWorker:
    """The agents of one node, each with a process below this actor, as below the driver."""

    def __init__(self, command: Sequence[str], *, directory: Path, log_path: Path) -> None:
        self._command, self._directory, self._log_path = list(command), directory, log_path
        self._stack = ExitStack()
        self._agents: Environments | None = None
        self._scratch = Path()

    async def start(self) -> tuple[str, int]:
        """Start the server of processes, once; return the node's address and cores.

        Raises UserError where the program is missing.
        """
        if self._agents is None:
            enter_directory(self._directory)
            check_program(self._command[0])
            # A spawned process would import the main program, which is Ray's, where that has a file.
            vars(sys.modules["__main__"]).pop("__file__", None)
            self._scratch = self._stack.enter_context(scratch_directory()).path
            self._agents = self._stack.enter_context(Environments(COMMAND, {"command": self._command}, log_path=self._log_path))
        return ray.util.get_node_ip_address(), len(os.sched_getaffinity(0))

    async def play(self, prompt: Prompt, message: Message) -> Answer:
        """Return the reply of a fresh agent, which ends with this call."""
        # Ray makes an actor anew whose process ended.
        await self.start()
        assert self._agents is not None, "started right above"
        return await play(self._agents, prompt, message, scratch=self._scratch)

    async def stop(self) -> None:
        """End all agents."""
        self._stack.close()


def spread_agents(manager: "RolloutManager", command: Sequence[str], *, reservation: Reservation, logs: Path, watchdog: Watchdog) -> None:
    """Let the agents of `manager` play on every node of `reservation`, until it ends.

    Those of the i-th other node print to `agents-i.log` in `logs`. Raises as `AgentWorker.start`.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in reservation.node_ids if node != here]
    if not nodes:
        return
    workers = []
    for number, node in enumerate(nodes, start=1):
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        options = AgentWorker.options(num_cpus=0, max_restarts=-1, scheduling_strategy=strategy)  # type: ignore[attr-defined]
        workers.append(options.remote(command, directory=Path.cwd(), log_path=logs / f"agents-{number}.log"))
    starting = [worker.start.remote() for worker in workers]
    started = watchdog.wait_for_all(starting, name="starting agents on other nodes", owner="the actor of agents", timeout_s=AGENTS_START_S)
    places = [
        AgentNode(partial(_play_there, worker, address), num_cores) for worker, (address, num_cores) in zip(workers, started, strict=True)
    ]
    spreading = manager.spread_agents(places, host=ray.util.get_node_ip_address(), end=partial(_end, workers))
    watchdog.wait(spreading, name="listening for agents", owner="the endpoint", timeout_s=ENGINE_CONTROL_S)


async def _end(workers: Sequence[Any]) -> None:
    """End all agents and actors; one that does not answer is killed with what it has started."""
    stopping = asyncio.gather(*(asyncio.wrap_future(worker.stop.remote().future()) for worker in workers), return_exceptions=True)
    with suppress(TimeoutError):
        await asyncio.wait_for(stopping, ENGINE_STOP_S)
    for worker in workers:
        ray.kill(worker)


async def _play_there(worker: Any, address: str, prompt: Prompt, message: Message) -> Answer:
    """Let an agent of `worker`, on the node at `address`, play; with it lost, the trajectory fails."""
    playing = worker.play.remote(prompt, message)
    try:
        answer: Answer = await asyncio.wrap_future(playing.future())
    except RayTaskError:
        raise
    except RayError as error:  # an actor of a dead node may also be called unschedulable, or its answer lost
        return {"cause": "error", "headline": f"the process for agents on {address} {exit_of(error)}", "trace": "", "lost": True}
    except asyncio.CancelledError:
        ray.cancel(playing)
        raise
    return answer
