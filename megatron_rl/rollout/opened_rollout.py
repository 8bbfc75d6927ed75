"""The rollout of the settings, with what it needs while a run lasts: environments, agents, an endpoint."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.plugins.kinds import Rollout
from megatron_rl.plugins.loader import load
from megatron_rl.rollout.agent_rollout import AgentRollout
from megatron_rl.rollout.agents import COMMAND, FUNCTION, check_program
from megatron_rl.rollout.endpoint import Endpoint
from megatron_rl.rollout.environment_host import Environments
from megatron_rl.rollout.environment_rollout import EnvironmentRollout
from megatron_rl.rollout.groups import single_turn
from megatron_rl.rollout.renderers import choose_renderer
from megatron_rl.system.leftovers import scratch_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_rollout(settings: RolloutSettings) -> Rollout:
    """Return the function of the settings, `single_turn` by default.

    Raises UserError, also for an environment or an agent that cannot be loaded or found.
    """
    agent = settings.agent
    if settings.environment is not None:
        load(settings.environment, kind="environment", args=settings.args)
    elif agent is not None and agent.function is not None:
        load(agent.function, kind="rollout", args=settings.args, as_agent=True)
    elif agent is not None:
        check_program(agent.command[0])
    return single_turn if settings.function is None else load(settings.function, kind="rollout", args=settings.args)


@asynccontextmanager
async def opened_rollout(
    settings: RolloutSettings,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    model_type: str | None,
    must_reward: bool,
    log_path: Path | None = None,
) -> AsyncIterator[Rollout]:
    """Yield the rollout of the settings. The processes of environments and agents print to `log_path` and end with the body."""
    own = load_rollout(settings)
    if not settings.is_hosted:
        yield own
        return
    path, args, agent = settings.environment, settings.args, settings.agent
    if agent is not None and agent.function is not None:
        path, args = FUNCTION, {"function": agent.function, "args": settings.args}
    elif agent is not None:
        path, args = COMMAND, {"command": list(agent.command)}
    assert path is not None, "an environment or an agent"
    with Environments(path, args, log_path=log_path) as environments:
        renderer = choose_renderer(tokenizer, model_type=model_type, name=settings.renderer)
        if agent is None:
            yield EnvironmentRollout(settings, environments, renderer, must_reward=must_reward)
            return
        with scratch_directory() as scratch:
            async with Endpoint(settings) as endpoint:
                yield AgentRollout(settings, environments, renderer, must_reward=must_reward, endpoint=endpoint, scratch=scratch.path)
