"""The rollout of runs with `rollout.agent`: trajectories of agents that know only a URL and a key."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError
from megatron_rl.rollout.conversation import Conversation
from megatron_rl.rollout.endpoint import Endpoint, Session
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.environment_host import Environments, Home
from megatron_rl.rollout.environment_rollout import EnvironmentRollout, Notes
from megatron_rl.rollout.renderers import ChosenRenderer
from megatron_rl.types import Prompt


class AgentRollout(EnvironmentRollout):
    """A rollout, see `kinds.Rollout`, whose trajectories each have a fresh agent of `agents`, who asks `endpoint`."""

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
        self._endpoint, self._scratch = endpoint, scratch if settings.agent is not None and settings.agent.command else None

    async def _play(self, home: Home, conversation: Conversation, prompt: Prompt, sampling: Sampling) -> Notes:
        """Let the agent play. Raises TrajectoryError where it fails or asks nothing, and the error of an answer."""
        async with self._endpoint.open(conversation, sampling) as session:
            answer = await self._played(home, session, prompt)
        if "cause" in answer and session.cause is not None:
            raise TrajectoryError(str(session.cause.cause), f"the agent failed after a refusal: {session.cause}", answer["trace"])
        if "cause" in answer:
            raise TrajectoryError("agent", answer["headline"].partition("\n")[0], answer["trace"])
        if not conversation.turns:
            raise TrajectoryError("no_request", "the agent ended without an answer of the policy; is OPENAI_BASE_URL what it asks?")
        last = conversation.turns[-1]
        calls = [call for turn in conversation.turns for call in turn.message.get("tool_calls", ())]
        notes = Notes()
        counts = {"num_calls": len(calls), "num_errors": sum("error" in call for call in calls)}
        notes.add({**answer, **counts}, content=last.message["content"])
        messages, tools = session.last
        finished = messages and last.stop is None and last in conversation.finished
        notes.end(conversation.structure_difference([*messages, last.message], tools=tools) if finished else None)
        notes.facts |= {"num_refused": session.num_refused, "num_overridden": session.num_overridden}
        return notes

    async def _played(self, home: Home, session: Session, prompt: Prompt) -> Answer:
        """Return the agent's reply."""
        with _written(prompt, self._scratch) as path:
            url, key = self._endpoint.url, session.key
            variables = {**_variables(url, key), "MEGATRON_RL_PROMPT": str(path)} if path else {}
            message = {"base_url": f"{url}/v1", "api_key": key, "variables": variables}
            begun = await home.reset(prompt)
            if "cause" in begun:
                return begun
            playing = asyncio.ensure_future(home.answer(message))
            waited: list[asyncio.Future[Any]] = [playing, session.failed]
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    session.failed.result()
                return playing.result()
            finally:
                playing.cancel()
                await asyncio.wait([playing])


def _variables(url: str, key: str) -> dict[str, str]:
    """Return what unmodified clients read, which no proxy is to see."""
    local = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in ("NO_PROXY", "no_proxy")}
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, **local}


@contextmanager
def _written(prompt: Prompt, scratch: Path | None) -> Iterator[Path | None]:
    """Yield a file in `scratch` with the prompt in JSON, None without `scratch`."""
    if scratch is None:
        yield None
        return
    values = {name: getattr(prompt, name) for name in ("id", "messages", "text", "label", "metadata")}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=scratch, suffix=".json") as file:
        json.dump(values, file, default=dict)
        file.flush()
        yield Path(file.name)
