"""The rollout of runs with `rollout.agent`: trajectories of agents that know only a URL and a key."""

import asyncio
import os
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError
from megatron_rl.rollout.agents import AgentNode, play
from megatron_rl.rollout.conversation import Conversation
from megatron_rl.rollout.endpoint import Endpoint, Session
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.environment_host import Environments
from megatron_rl.rollout.environment_rollout import EnvironmentRollout, Notes
from megatron_rl.rollout.renderers import ChosenRenderer
from megatron_rl.types import Message, Prompt


class AgentRollout(EnvironmentRollout):
    """A `kinds.Rollout` whose trajectories each have a fresh agent, who asks `endpoint`.

    They are `agents` on this node and those of further nodes, where the fewest are for each core.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        agents: Environments,
        renderer: ChosenRenderer,
        *,
        must_reward: bool,
        endpoint: Endpoint,
        scratch: Path,
    ) -> None:
        super().__init__(settings, agents, renderer, must_reward=must_reward)
        # A function is given the prompt itself.
        directory = scratch if settings.agent is not None and settings.agent.command else None

        async def play_here(prompt: Prompt, message: Message) -> Answer:
            return await play(agents, prompt, message, scratch=directory)

        self._endpoint = endpoint
        self._nodes = [AgentNode(play_here, len(os.sched_getaffinity(0)), url=endpoint.url)]

    @property
    def num_cores(self) -> int:
        """Cores of all nodes."""
        return sum(node.num_cores for node in self._nodes)

    async def spread(self, nodes: Sequence[AgentNode], *, host: str) -> None:
        """Let agents play on other `nodes`, too, which reach this one at its address `host`."""
        url = await self._endpoint.listen(host)
        for node in nodes:
            node.url = url
        self._nodes += nodes

    async def _play(self, conversation: Conversation, prompt: Prompt, sampling: Sampling) -> Notes:
        """Let the agent play. Raises TrajectoryError where it fails or asks nothing, and the error of an answer."""
        node = min(self._nodes, key=lambda each: each.load)
        async with self._endpoint.open(conversation, sampling) as session:
            answer = await _played(node, session, prompt)
        if "lost" in answer:
            node.lost_s = time.monotonic()
        if "cause" in answer and session.cause is not None:
            raise TrajectoryError(str(session.cause.cause), f"the agent failed after a refusal: {session.cause}", answer["trace"])
        if "cause" in answer:
            raise TrajectoryError("error" if "lost" in answer else "agent", answer["headline"].partition("\n")[0], answer["trace"])
        if not conversation.turns:
            raise TrajectoryError("no_request", "the agent ended without an answer of the policy; is OPENAI_BASE_URL what it asks?")
        conversation.order()
        last = conversation.turns[-1]
        request = session.requests[last]
        notes, num_unread = Notes(), sum(turn.num_unread for turn in conversation.turns)
        num_read = sum(len(turn.message.get("tool_calls", ())) for turn in conversation.turns)
        counts = {"num_calls": num_read + num_unread, "num_errors": num_unread}
        notes.add({**answer, **counts}, content=last.message["content"])
        finished = request.messages and last.stop is None and last in conversation.finished
        notes.end(conversation.structure_difference([*request.messages, last.message], tools=request.tools) if finished else None)
        notes.facts |= {"num_refused": session.num_refused, "num_overridden": session.num_overridden}
        return notes


async def _played(node: AgentNode, session: Session, prompt: Prompt) -> Answer:
    """Return the agent's reply. Raises the error of an answer that could not be made."""
    message = {"base_url": f"{node.url}/v1", "api_key": session.key, "variables": _variables(node.url, session.key)}
    node.num_playing += 1
    playing = asyncio.ensure_future(node.play(prompt, message))
    waited: list[asyncio.Future[Any]] = [playing, session.failed]
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if session.failed.done():
            session.failed.result()
        return playing.result()
    finally:
        playing.cancel()
        await asyncio.wait([playing])
        node.num_playing -= 1


def _variables(url: str, key: str) -> dict[str, str]:
    """Return what unmodified clients read, which no proxy is to see."""
    hosts = dict.fromkeys(("127.0.0.1", str(urllib.parse.urlsplit(url).hostname)))
    local = {name: ",".join(filter(None, (os.environ.get(name), *hosts))) for name in ("NO_PROXY", "no_proxy")}
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, **local}
