"""Play a conversation of policy and environment, and return its samples with the reward."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError
from megatron_rl.plugins.kinds import Generator
from megatron_rl.rollout.conversation import Conversation
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.environment_host import Environments
from megatron_rl.rollout.renderers import ChosenRenderer
from megatron_rl.types import Message, Prompt, Reward, RewardOutcome, Sample, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EnvironmentRollout:
    """A `kinds.Rollout` whose trajectories each have a fresh environment of `environments`.

    A trajectory without an end after `rollout.max_turns` answers, or without room for another one,
    is truncated and keeps the rewards so far. All its samples have the sum of the rewards.
    `must_reward` is True without a reward function: a truncated trajectory without any then has 0.
    """

    def __init__(self, settings: RolloutSettings, environments: Environments, renderer: ChosenRenderer, *, must_reward: bool) -> None:
        self._environments, self._renderer, self._must_reward = environments, renderer, must_reward
        self._max_turns, self._step_timeout_s = settings.max_turns, settings.step_timeout_s

    async def __call__(
        self, *, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: "PreTrainedTokenizerBase"
    ) -> tuple[Sample, ...]:
        """Return the samples of `num_samples` trajectories. Raises TrajectoryError."""
        samples: list[Sample] = []
        for number in range(num_samples):
            conversation = Conversation(self._renderer, generator, tokenizer=tokenizer, session=f"trajectory {number}")
            notes = await self._play(conversation, prompt, sampling)
            reward = notes.reward(must=self._must_reward)
            own = conversation.samples(prompt, first_index=len(samples), trajectory=number)
            last = notes.last(own[-1], branches=own[:-1], num_turns=len(conversation.turns))
            samples += [replace(sample, reward=reward) for sample in (*own[:-1], last)]
        return tuple(samples)

    async def _play(self, conversation: Conversation, prompt: Prompt, sampling: Sampling) -> "Notes":
        """Take turns until the environment ends, none is left, or an answer does not stop."""
        notes = Notes()
        if "chat_template_kwargs" in prompt.metadata:
            raise TrajectoryError("template", "the row has chat_template_kwargs, which rollout.renderer does not take; drop the field")
        async with _Played(self._environments, timeout_s=self._step_timeout_s) as environment:
            messages = list((await environment.ask(prompt))["messages"])
            if not messages:
                raise TrajectoryError("contract", "reset returned no message, needs at least one for the policy, or None for the prompt's")
            while len(conversation.turns) < self._max_turns:
                turn = await conversation.ask(messages, sampling=sampling, tools=self._environments.tools)
                if turn is None and not conversation.turns:
                    raise TrajectoryError("context", f"the first messages leave no room for an answer in {conversation.context} tokens")
                if turn is None or turn.generation.stop_reason is not StopReason.STOP:
                    break
                answer = await environment.ask(turn.message)
                notes.add(answer, content=turn.message["content"])
                messages.append(turn.message)
                if answer["done"]:
                    notes.end(conversation.structure_difference(messages, tools=self._environments.tools))
                    break
                messages += answer["messages"]
        notes.facts |= {"num_replays": environment.num_replays} if environment.num_replays else {}
        return notes


class _Played(AbstractAsyncContextManager["_Played", None]):
    """A fresh one of `environments`, which answers within `timeout_s`.

    Where the process of a replayable one ends, another one is asked all again, and has to answer
    alike. A message that ends this process, too, fails the trajectory.
    """

    def __init__(self, environments: Environments, *, timeout_s: float) -> None:
        self._environments, self._timeout_s, self._stack = environments, timeout_s, AsyncExitStack()
        self._answered: list[tuple[Prompt | Message, Answer]] = []
        self.num_replays = 0

    async def __aenter__(self) -> "_Played":
        self._home = await self._stack.enter_async_context(self._environments.open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, said: Prompt | Message) -> Answer:
        """Return the first messages for the prompt, or the answer to a message.

        Raises TrajectoryError for a failure, or a late answer.
        """
        answer = await self._within_time(said)
        if "ended" in answer and self._environments.replayable:
            await self._replay()
            answer = await self._within_time(said)
        if "cause" in answer:
            raise TrajectoryError(answer["cause"], answer["headline"], answer["trace"])
        self._answered.append((said, answer))
        return answer

    async def _replay(self) -> None:
        """Ask another one all that was answered. Raises TrajectoryError for another answer."""
        await self._stack.aclose()
        await self.__aenter__()
        self.num_replays += 1
        for number, (said, before) in enumerate(self._answered):
            answer = await self._within_time(said)
            if answer != before:
                what = f"answered message {number} with {answer!r:.200}, before with {before!r:.200}" if number else "had another reset"
                message = f"given all again after its process had ended, it {what}; mend it, or set replayable = False"
                raise TrajectoryError("replay", message)

    async def _within_time(self, said: Prompt | Message) -> Answer:
        call = self._home.reset(said) if isinstance(said, Prompt) else self._home.answer(said)
        try:
            return await asyncio.wait_for(call, self._timeout_s)
        except TimeoutError:
            doing = "reset" if isinstance(said, Prompt) else "answer a message"
            message = f"the environment took more than {self._timeout_s:g} s to {doing} (rollout.step_timeout_s)"
            raise TrajectoryError("timeout", message) from None


class Notes:
    """Rewards, counts and `facts` of a trajectory; `ended` by its environment or truncated."""

    def __init__(self) -> None:
        self.ended = False
        self.facts: dict[str, Any] = {}
        self._parts: dict[str, float] = {}
        self._counts = {"num_tool_calls": 0, "num_tool_errors": 0}
        self._difference: str | None = None
        self._turn_rewards: list[dict[str, float]] = []
        self._content = ""

    def add(self, answer: dict[str, Any], *, content: str) -> None:
        """Add the environment's answer to one turn of this `content`."""
        for name, value in answer["parts"].items():
            self._parts[name] = self._parts.get(name, 0.0) + value
        self._turn_rewards.append(answer["parts"])
        self._counts["num_tool_calls"] += answer["num_calls"]
        self._counts["num_tool_errors"] += answer["num_errors"]
        self._content = content

    def end(self, structure_difference: str | None) -> None:
        """Note the end, and the conversation's first difference from the chat template."""
        self.ended, self._difference = True, structure_difference

    def reward(self, *, must: bool) -> Reward | None:
        """Return the sum of all parts, None without any. If it `must` be: 0 for a truncated one."""
        if not self._parts and must and self.ended:
            raise TrajectoryError("contract", "it ended without a reward, and reward.function is null; give one, or set it")
        if not self._parts and not must:
            return None
        return Reward(RewardOutcome.SCORED, sum(self._parts.values()), components=dict(self._parts))

    def last(self, sample: Sample, *, branches: Sequence[Sample], num_turns: int) -> Sample:
        """Return the last sample, with facts and the texts of other `branches` as metadata."""
        facts = self.facts | {"num_turns": num_turns, **self._counts, "turn_rewards": self._turn_rewards, "answer": self._content}
        facts |= {"branches": [branch.prompt.text + branch.response_text for branch in branches]} if branches else {}
        facts |= {"structure_difference": self._difference} if self._difference else {}
        reason = sample.stop_reason if self.ended or sample.stop_reason is not StopReason.STOP else StopReason.LENGTH
        return replace(sample, metadata={**sample.metadata, **facts}, stop_reason=reason)
