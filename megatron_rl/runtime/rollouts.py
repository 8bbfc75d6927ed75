"""The rollout side of a run: prompts, generation, rewards and the buffer, all on the background loop.

Every method is a coroutine for `BackgroundLoop.submit`; the buffer and the clients belong to that one thread.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.settings import Settings
from megatron_rl.data.baseline import with_baseline
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.source import PromptSource
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.group_metrics import evaluation_metrics, has_one_reward, rollout_metrics
from megatron_rl.observe.metrics import Metric, merge_metrics
from megatron_rl.rewards.runner import RewardRunner, check_error_rate
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.rollout.generate import load_rollout
from megatron_rl.rollout.loop import generate_groups
from megatron_rl.rollout.sampling import make_sampling
from megatron_rl.types import Floats, Group, Prompt, Reward, Sample, TrainBatch
from megatron_rl.weights.parity import sequences

MAX_RESAMPLING_ROUNDS = 10


class Rollouts:
    """Open with `await Rollouts.open(...)`, close with `await rollouts.close()`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._tokenizer = load_tokenizer(settings.model.path)
        data = settings.data
        self.source = PromptSource(data.train, self._tokenizer, settings=data, seed=settings.run.seed)
        eval_source = PromptSource(data.eval, self._tokenizer, settings=data, seed=settings.run.seed) if data.eval is not None else None
        self.eval_prompts: list[Prompt] = eval_source.all() if eval_source is not None else []
        self.vocab_size = len(self._tokenizer)
        self._rollout = load_rollout(settings.rollout.function)
        self.clients: list[EngineClient] = []

    async def start_rewards(self) -> None:
        """Start the reward workers and call the function on a probe, before anything expensive starts."""
        self._rewards = self._stack.enter_context(RewardRunner(self._settings.reward))
        prompts = self.eval_prompts or self.source.first(1)
        self._rewards.probe(prompts[0])

    async def open_buffer(self, path: Path) -> None:
        """Open the buffer, in which this run alone may write."""
        self._buffer = self._stack.enter_context(Buffer(path))

    async def connect(self, addresses: Sequence[EngineAddress]) -> None:
        """Open a client to every engine."""
        for address in addresses:
            client = EngineClient(address, request_timeout_s=self._settings.rollout.request_timeout_s)
            self.clients.append(await self._stack.enter_async_context(client))

    async def close(self) -> None:
        """Close clients, reward workers and buffer."""
        await self._stack.aclose()

    async def rewind(self, *, step: int, source_state: dict[str, Any]) -> None:
        """Continue where the checkpoint after `step` steps stood."""
        self.source.restore(source_state)
        self._buffer.rewind(step, version=step)

    async def flush(self) -> None:
        """Bring the buffer to the disk itself."""
        self._buffer.flush()

    async def prune(self, before_step: int) -> None:
        """Drop the token arrays of groups that no kept checkpoint can come back to."""
        self._buffer.prune(before_step)

    async def next_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """The groups of one step, generated as far as they are not in the buffer already, and what they say of the rollout.

        Raises:
            UserError: too many reward calls failed, or resampling found no groups with a signal.
        """
        start = time.monotonic()
        wanted = self._settings.data.prompts_per_step
        kept: list[Group] = []
        seen: list[Group] = []
        for _ in range(MAX_RESAMPLING_ROUNDS):
            groups = await self._groups(wanted - len(kept), step=step, progress=progress)
            seen += groups
            kept += [group for group in groups if not self._rejects(group)]
            if len(kept) == wanted or self._settings.objective.zero_variance != "resample":
                break
        else:
            raise UserError(
                f"step {step}: {len(kept)} of {len(seen)} groups have different rewards after {MAX_RESAMPLING_ROUNDS} rounds of resampling,"
                f" needs {wanted}; use prompts of other difficulty or objective.zero_variance drop"
            )
        metrics = rollout_metrics(seen, version=step, seconds=time.monotonic() - start)
        return make_train_batch(kept) if kept else _without_signal(make_train_batch(seen)), metrics

    def _rejects(self, group: Group) -> bool:
        return self._settings.objective.zero_variance in ("drop", "resample") and has_one_reward(group)

    async def _groups(self, count: int, *, step: int, progress: PhaseProgress) -> list[Group]:
        self._buffer.add_prompts(self.source.next_prompts(count))
        prompts = self._buffer.take_pending(count - self._buffer.counts().done)
        baselines = await self._greedy_rewards(prompts) if self._settings.objective.advantage.estimator == "remax" else {}
        async with aclosing(self._generate(prompts, num_samples=self._settings.data.samples_per_prompt)) as finished:
            async for group in finished:
                self._buffer.put_done(with_baseline(group, baselines[group.id]) if baselines else group)
                progress.advance()
        groups = self._buffer.take_done(count, step=step)
        rewards = [sample.reward for group in groups for sample in group.samples if sample.reward is not None]
        check_error_rate(rewards, max_error_rate=self._settings.reward.max_error_rate)
        return groups

    async def _greedy_rewards(self, prompts: Sequence[Prompt]) -> dict[str, Reward]:
        """The reward of the greedy response to each prompt, by the prompt's id."""
        async with aclosing(self._generate(prompts, num_samples=1, greedy=True)) as finished:
            return {group.id: group.samples[0].reward async for group in finished}

    def _generate(self, prompts: Sequence[Prompt], *, num_samples: int, greedy: bool = False) -> Any:
        rollout = self._settings.rollout
        return generate_groups(
            prompts,
            clients=self.clients,
            sampling=make_sampling(rollout.sampling, eos_token_ids=[self._tokenizer.eos_token_id], greedy=greedy),
            num_samples=num_samples,
            decode=lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)),
            score=self._rewards.score,
            max_concurrent_requests=rollout.max_concurrent_requests,
            rollout=self._rollout,
        )

    async def evaluate(self, *, progress: PhaseProgress) -> dict[str, Metric]:
        """Every held-out prompt once at temperature 0 and once at the training temperature."""
        shares = []
        for kind in ("greedy", "sampled"):
            samples: list[Sample] = []
            async with aclosing(self._generate(self.eval_prompts, num_samples=1, greedy=kind == "greedy")) as finished:
                async for group in finished:
                    samples += group.samples
                    progress.advance()
            shares.append(evaluation_metrics(samples, kind=kind))
        return merge_metrics(shares)

    async def score(self, batch: TrainBatch) -> list[Floats]:
        """Log-probs [T] at temperature 1 of the batch's sequences, from each engine."""
        return [np.concatenate([await client.score(tokens) for tokens in sequences(batch)]) for client in self.clients]


def _without_signal(batch: TrainBatch) -> TrainBatch:
    """The batch with nothing to train on: what is left of a step when every group of it is dropped."""
    return replace(batch, loss_mask=np.zeros(len(batch.tokens), np.bool_))
