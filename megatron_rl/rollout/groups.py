"""Make a group from one prompt: call the rollout, check its samples, score them."""

import asyncio
import itertools
import os
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.data.batch import GREEDY_BASELINE
from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling, make_sampling
from megatron_rl.errors import MegatronRLError, TrajectoryError, UserError
from megatron_rl.plugins.kinds import Generator, Rollout
from megatron_rl.rollout.agent_rollout import AgentRollout
from megatron_rl.rollout.agents import AgentNode
from megatron_rl.rollout.generator import KeptAnswers, PoolGenerator, cancel, together
from megatron_rl.rollout.sample_checks import check_samples, without_outdated_experts
from megatron_rl.types import Failure, Group, Prompt, Reward, RewardOutcome, Sample, last_samples, trajectories

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Score = Callable[[Sample], Awaitable[Reward]]
Samples = tuple[Sample, ...]

ATTEMPTS = 3
"""Attempts at a trajectory, each with new seeds. Alone with an environment or an agent; else
the first is together with the other trajectories of the prompt."""
MOST_ALONE = 256
"""Trajectories made alone at the same time, and as many more in an evaluation, each with a process
where it has an environment."""
AGENTS_PER_CORE = 4
"""Commands of agents at the same time: each starts an interpreter, and mostly waits for engines."""
SLOW_REWARD_S = 1.0  # waits for rewards shorter than this are not worth a write to the disk
CANCEL_S = 5.0  # a cancelled rollout that goes on for longer is left to itself


async def single_turn(
    *, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: "PreTrainedTokenizerBase"
) -> Samples:
    """Ask once, and train on every token of the answer: the rollout without `rollout.function`."""
    generations = await generator.generate(prompt.token_ids, sampling=sampling, num_samples=num_samples)
    return tuple(sample_of(generation, prompt, index=index, tokenizer=tokenizer) for index, generation in enumerate(generations))


def sample_of(generation: Generation, prompt: Prompt, *, index: int, tokenizer: "PreTrainedTokenizerBase", shared: int = 0) -> Sample:
    """Return the answer `generation` to `prompt` as a sample that trains on all but its first `shared` tokens."""
    return Sample(
        group_id=prompt.id,
        index=index,
        prompt=prompt,
        response_ids=generation.token_ids,
        loss_mask=np.arange(len(generation.token_ids)) >= shared,
        rollout_log_probs=generation.log_probs,
        weight_versions=generation.weight_versions,
        stop_reason=generation.stop_reason,
        response_text=tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=True),
        routed_experts=generation.routed_experts,
        candidates=generation.candidates,
    )


def most_alone(settings: RolloutSettings, *, num_cores: int | None = None) -> int:
    """Return the places on `num_cores`, by default this node's.

    A wait for a place does not count as time of the rollout.
    """
    if settings.agent is None or not settings.agent.command:
        return MOST_ALONE
    return settings.agent.max_processes or (num_cores or len(os.sched_getaffinity(0))) * AGENTS_PER_CORE


def _places(count: int) -> dict[Urgency, asyncio.Semaphore]:
    return {urgency: asyncio.Semaphore(count) for urgency in Urgency}


class GroupMaker:
    """Makes groups by `rollout` of the `settings`, on engines of `pool`, with rewards by `score`.

    `max_tokens` bounds prompt and response of a sample together, as a micro-batch does.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        rollout: Rollout,
        *,
        pool: EnginePool,
        tokenizer: "PreTrainedTokenizerBase",
        score: Score | None,
        seed: int,
        max_tokens: int,
    ) -> None:
        self.name = settings.name
        self.retries = Counter[str]()
        """Attempts that failed and were followed by another one, by cause, over all groups."""
        self.generation_s = self.reward_s = 0.0  # seconds of training groups so far, all of them together
        self._rollout, self._pool, self._tokenizer, self._score = rollout, pool, tokenizer, score
        self._seed, self._max_tokens, self._timeout_s = seed, max_tokens, settings.timeout_s
        # Evaluation waits for no training trajectory, which may stand still until the next step.
        self._settings, self._places = settings, _places(most_alone(settings))
        ends = [tokenizer.eos_token_id]
        self._samplings = {greedy: make_sampling(settings.sampling, eos_token_ids=ends, greedy=greedy) for greedy in (False, True)}

    async def spread_agents(self, nodes: Sequence[AgentNode], *, host: str) -> None:
        """Let agents play on other `nodes`, too, and more of them at once; before the first one."""
        assert isinstance(self._rollout, AgentRollout), "only agents ask by a URL"
        await self._rollout.spread(nodes, host=host)
        self._places = _places(most_alone(self._settings, num_cores=self._rollout.num_cores))

    async def make(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        greedy: bool = False,
        sampling: Sampling | None = None,
        score: Score | None = None,
        urgency: Urgency = Urgency.TRAINING,
        buffer: Buffer | None = None,
    ) -> Group:
        """Generate `num_samples` trajectories; score each by the last sample.

        An evaluation may have a `sampling` and a `score` of its own. A trajectory that fails
        ATTEMPTS times is one of the group's failures. Answers of a slow group, and samples with
        slow rewards, are kept in `buffer` meanwhile, for a killed run. Raises the reason why the
        last engine failed.
        """
        group = None if buffer is None else self._kept(buffer.finished(prompt), num_samples)
        if group is not None:
            return await self._scored(group, None, self._score)
        begun_s = time.monotonic()
        with KeptAnswers(buffer, prompt.id) as kept:
            group = await self._generate(prompt, num_samples, sampling=sampling or self._samplings[greedy], urgency=urgency, kept=kept)
        generated_s = time.monotonic()
        self._pool.spans.add("groups", f"group {prompt.id}", seconds=generated_s - begun_s, count=num_samples)
        scored = await self._scored(group, buffer, score or self._score)
        reward_s = time.monotonic() - generated_s
        self._pool.spans.add("rewards", f"group {prompt.id}", seconds=reward_s, count=num_samples)
        if urgency is not Urgency.EVALUATION:
            self.generation_s += generated_s - begun_s
            self.reward_s += reward_s
        return scored

    async def make_with_baseline(self, prompt: Prompt, *, num_samples: int, buffer: Buffer) -> Group:
        """Make a group whose rewards have the greedy response's as component `greedy_baseline`."""
        greedy = await self.make(prompt, num_samples=1, greedy=True)
        if greedy.failures:
            return replace(greedy, failures=greedy.failures * num_samples)
        group = await self.make(prompt, num_samples=num_samples, buffer=buffer)
        return with_baseline(group, {sample.role: sample.reward for sample in last_samples(greedy.samples)})

    def _kept(self, group: Group | None, num_samples: int) -> Group | None:
        """Return the group kept by an interrupted run, without a reward, if the present settings ask for it.

        A whole group comes back where a reward failed. All its rewards are given anew, but the rollout's
        own part of them is not kept: where there may be one, the samples are made anew, too.
        """
        if group is None or group.num_made + len(group.failures) != num_samples:
            return None
        if any(sample.reward is not None and sample.reward.value is None for sample in group.samples):
            if self._settings.is_hosted or self._settings.function is not None:
                return None
            group = replace(group, samples=tuple(replace(sample, reward=None) for sample in group.samples))
        lacks_experts = self._pool.address.mixture is not None and any(sample.routed_experts is None for sample in group.samples)
        return None if lacks_experts else group

    async def _scored(self, group: Group, buffer: Buffer | None, score: Score | None) -> Group:
        """Return the group with rewards; while rewards are slow, keep the samples in `buffer`."""
        if score is None:
            return group
        parts = trajectories(group.samples)
        scoring = asyncio.gather(*(score(part[-1]) for part in parts))
        try:
            if buffer is not None:
                await asyncio.wait([scoring], timeout=SLOW_REWARD_S)
                if not scoring.done():
                    buffer.put_samples(group)
            rewards = await scoring
        finally:
            if not scoring.done():
                # A wait alone does not end the calls.
                await cancel([scoring])
        rewards = [_total(part[-1].reward, reward) for part, reward in zip(parts, rewards, strict=True)]
        by_index = {sample.index: reward for part, reward in zip(parts, rewards, strict=True) for sample in part}
        return replace(group, samples=tuple(replace(sample, reward=by_index[sample.index]) for sample in group.samples))

    async def _generate(self, prompt: Prompt, num_samples: int, *, sampling: Sampling, urgency: Urgency, kept: KeptAnswers) -> Group:
        """Call the rollout for all trajectories together; alone where hosted, or again.

        A rollout of the user's own is called for each answer of an evaluation alone: the estimates are
        of independent answers.
        """
        alone_first = self._settings.is_hosted or (urgency is Urgency.EVALUATION and self._settings.function is not None)
        arrival, seed = self._pool.arrival(), f"{self._seed} {prompt.id}"

        async def attempt(count: int, seed: str) -> Samples | Failure:
            generator = PoolGenerator(
                self._pool,
                seed=seed,
                # No micro-batch has to hold what is not trained on.
                max_tokens=self._pool.address.context_length if urgency is Urgency.EVALUATION else self._max_tokens,
                max_answer=sampling.max_tokens,
                urgency=urgency,
                arrival=arrival,
                kept=kept,
                decode=self._tokenizer.decode,
            )
            async with generator:
                return await self._call(generator, prompt, sampling, count)

        async def alone(number: int) -> Samples | Failure:
            async with self._places[urgency]:  # for all attempts: none waits behind later trajectories
                for again in range(0 if alone_first else 1, ATTEMPTS):
                    # No session name begins with a zero character.
                    found = await attempt(1, f"{seed}\0\0{number} {again}")
                    if not isinstance(found, Failure):
                        break
                    self.retries[found.cause] += again + 1 < ATTEMPTS and urgency is not Urgency.EVALUATION
            return found

        made = None if alone_first else await attempt(num_samples, seed)
        if made is not None and not isinstance(made, Failure):
            return Group(id=prompt.id, prompt=prompt, samples=made)
        if made is not None and urgency is not Urgency.EVALUATION:
            self.retries[made.cause] += num_samples
        parts = await together(alone(number) for number in range(num_samples))
        failures = tuple(part for part in parts if isinstance(part, Failure))
        samples = _numbered([part for part in parts if not isinstance(part, Failure)])
        return Group(id=prompt.id, prompt=prompt, samples=samples, failures=failures)

    async def _call(self, generator: PoolGenerator, prompt: Prompt, sampling: Sampling, num_samples: int) -> Samples | Failure:
        """Call the rollout once within `rollout.timeout_s` of its own time; check the result."""
        rollout = self._rollout(prompt=prompt, generator=generator, sampling=sampling, num_samples=num_samples, tokenizer=self._tokenizer)
        # The watchdog names a task that blocks the event loop.
        calling = asyncio.create_task(without_exit(rollout), name=f"{self.name} for prompt {prompt.id}")
        try:
            while not calling.done() and (left_s := self._timeout_s - generator.own_s) > 0:
                await asyncio.wait([calling], timeout=left_s)
            if not calling.done():
                return Failure("timeout", f"no samples after {self._timeout_s:g} s (rollout.timeout_s)")
            if calling.cancelled():
                return Failure("error", "it was cancelled, but not by the run")
            samples = calling.result()
        except TrajectoryError as error:
            return Failure(error.cause, str(error), error.trace)
        except Exception as error:  # a user's rollout can fail in any way
            if generator.engines_failed is not None:
                raise generator.engines_failed from error
            text = f"{'' if isinstance(error, MegatronRLError) else f'{type(error).__name__}: '}{error}".strip().replace("\n", " ")
            trace = "" if isinstance(error, UserError) else "".join(traceback.format_exception(error)).rstrip()
            return Failure("error", text, trace)
        finally:
            calling.add_done_callback(lambda call: call.cancelled() or call.exception())
            calling.cancel()
            await asyncio.wait([calling], timeout=CANCEL_S)
        try:
            checked = check_samples(
                samples,
                prompt=prompt,
                num_samples=num_samples,
                vocab_size=self._pool.address.vocab_size,
                max_tokens=generator.context,
                need_experts=self._pool.address.mixture is not None,
                need_candidates=sampling.records_candidates,
            )
        except UserError as error:
            return Failure("contract", str(error))
        return tuple(map(without_outdated_experts, checked))


def _total(own: Reward | None, scored: Reward) -> Reward:
    """Return the sum of a rollout's `own` reward and the reward function's, each a component, or by its own ones."""
    if own is None or own.value is None or scored.value is None:
        return scored
    of_function = scored.components or {"function": scored.value}
    if both := own.components.keys() & of_function.keys():
        message = f"the rollout and reward.function both give a component {min(both)!r}, of which one would be lost; rename one of them"
        return Reward(RewardOutcome.ERROR, message=message)
    parts = {**own.components, **of_function}
    return Reward(scored.outcome, own.value + scored.value, components=parts, answer=scored.answer)


async def without_exit(call: Awaitable[Sequence[Sample]]) -> Sequence[Sample]:
    """Await `call`. Raises RuntimeError for an exit, which would end the event loop."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the rollout raised {type(error).__name__}") from error


def _numbered(parts: Iterable[Samples]) -> Samples:
    """Number trajectories made one by one, and their samples."""
    made = itertools.chain(*map(trajectories, parts))
    samples = [(number, len(part) > 1, sample) for number, part in enumerate(made) for sample in part]
    return tuple(
        replace(sample, index=index, trajectory=number if several else None) for index, (number, several, sample) in enumerate(samples)
    )


def with_baseline(group: Group, baselines: Mapping[str | None, Reward | None]) -> Group:
    """Return the group with the greedy response's reward as a component of every scored sample of its role.

    The outcome of a greedy response without a score becomes that of every such sample.
    """

    def compared(sample: Sample) -> Sample:
        no_role = Reward(RewardOutcome.ERROR, message=f"the rollout made no greedy trajectory of role {sample.role!r}")
        baseline = baselines.get(sample.role, no_role)
        if baseline is None or sample.reward is None or sample.reward.value is None:
            return sample
        if baseline.value is None:
            message = f"the greedy response that is the baseline was not scored: {baseline.message}"
            return replace(sample, reward=Reward(outcome=baseline.outcome, message=message))
        components = {**sample.reward.components, GREEDY_BASELINE: baseline.value}
        return replace(sample, reward=replace(sample.reward, components=components))

    return replace(group, samples=tuple(map(compared, group.samples)))
