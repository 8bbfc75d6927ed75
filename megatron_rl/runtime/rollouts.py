"""The rollout side of a run: prompts, generation, rewards and the buffer, all on the background loop.

Every method is a coroutine for `BackgroundLoop.submit`; the buffer and the clients belong to that one thread.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.objective import AdvantageSettings
from megatron_rl.algorithms.token_advantage import without_signal
from megatron_rl.config.settings import Settings
from megatron_rl.data.baseline import GREEDY_BASELINE, with_baseline
from megatron_rl.data.batch import make_train_batch, with_records
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.source import PromptSource
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.group_metrics import evaluation_metrics, rollout_metrics
from megatron_rl.observe.metrics import Mean, Metric, Sum, merge_metrics
from megatron_rl.rewards.runner import RewardRunner, check_error_rate
from megatron_rl.rollout.admission import Admission
from megatron_rl.rollout.client import EngineClient, EnginePart
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.rollout.engine_pool import EnginePool, Urgency
from megatron_rl.rollout.group_filter import load_filter
from megatron_rl.rollout.groups import GroupMaker, load_rollout, make_groups
from megatron_rl.rollout.identical_groups import IdenticalGroups
from megatron_rl.rollout.sampling import make_sampling
from megatron_rl.runtime.production import Production
from megatron_rl.types import Floats, Group, Prompt, Sample, TrainBatch
from megatron_rl.weights.parity import sequences

MAX_RESAMPLING_ROUNDS = 10
NO_SIGNAL = "no signal (objective.zero_variance)"
NO_REWARD = "no sample has a reward"
"""Why a group was not trained on, in the buffer's words."""


class Rollouts:
    """Made before anything is started; ready for training after `start_rewards`, `open_buffer`, `connect` and `begin_production`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._tokenizer = load_tokenizer(settings.model.path)
        data = settings.data
        self.source = PromptSource(data.train, self._tokenizer, settings=data, seed=settings.run.seed)
        eval_source = PromptSource(data.eval, self._tokenizer, settings=data, seed=settings.run.seed) if data.eval is not None else None
        self.eval_prompts: list[Prompt] = eval_source.all() if eval_source is not None else []
        sources = [self.source] if eval_source is None else [self.source, eval_source]
        self.label_notes = [note for source in sources if (note := source.label_note()) is not None]
        self.vocab_size = len(self._tokenizer)
        self._rollout = load_rollout(settings.rollout)
        self._rollout_name = f"rollout.function {settings.rollout.function or 'single_turn'}"
        self._filter = load_filter(settings.rollout.filter)
        self._admission = Admission(
            groups_per_step=data.prompts_per_step,
            max_staleness=settings.rollout.max_staleness,
            num_steps=settings.run.num_steps,
        )
        self.clients: list[EngineClient] = []
        self._identical = IdenticalGroups()
        # Seconds of making groups and tokens made, at the end of the last step.
        self._measured = (0.0, 0)

    def probe_prompts(self, count: int) -> list[Prompt]:
        """At most `count` prompts for probes, at least one: held-out ones, or without data.eval those of the training file."""
        return self.eval_prompts[:count] or self.source.first(count)

    async def start_rewards(self) -> None:
        """Start the reward workers and call the function on a probe, before anything expensive starts."""
        self._rewards = self._stack.enter_context(RewardRunner(self._settings.reward, log_path=self.reward_log))
        for prompt in [*self.eval_prompts[:1], *self.source.probes()]:
            self._rewards.probe(prompt)

    async def open_buffer(self, path: Path) -> None:
        """Open the buffer, in which this run alone may write."""
        self._buffer = self._stack.enter_context(Buffer(path))

    async def connect(self, addresses: Sequence[EngineAddress]) -> None:
        """Open a client to every engine; from now on `next_batch` and `evaluate` can generate."""
        timeout_s = self._settings.rollout.request_timeout_s
        for address in addresses:
            # A weight sync is the one control call that takes long: an engine may read all of a large model in it.
            client = EngineClient(address, request_timeout_s=timeout_s, control_timeout_s=self._settings.weights.sync_timeout_s)
            self.clients.append(await self._stack.enter_async_context(client))
        self.pool = EnginePool(self.clients, max_requests=self._settings.rollout.max_concurrent_requests)

    async def begin_production(self) -> None:
        """Be ready to make groups for training; nothing is made before `next_batch` asks."""
        self._production = Production(self.source, self._buffer, self._make_group)
        self._stack.push_async_callback(self._production.stop)

    @property
    def reward_log(self) -> Path:
        """The file that gets what reward functions print."""
        return self._settings.run.directory / "logs" / "rewards.log"

    @property
    def busy_s(self) -> float:
        """Seconds so far in which groups for training were being made. May be asked from any thread."""
        return self._production.busy_s

    async def close(self) -> None:
        """Close clients, reward workers and buffer."""
        await self._stack.aclose()

    async def rewind(self, *, step: int, source_state: dict[str, Any] | None) -> None:
        """Continue where the checkpoint after `step` steps stood, at the first prompt when it has no `source_state`.

        Groups that were finished since then are kept where their weights still exist.
        """
        if source_state is not None:
            self.source.restore(source_state)
        self._buffer.rewind(step, version=step)
        # Prompts that were taken after the checkpoint are in the buffer: the next ones come behind them.
        known = self._buffer.counts().total
        self._buffer.add_prompts(self.source.next_prompts(max(0, known - self.source.num_taken)))

    async def flush(self) -> None:
        """Bring the buffer to the disk itself."""
        self._buffer.flush()

    async def prune(self, before_step: int) -> None:
        """Drop the token arrays of groups that the first `before_step` steps consumed, to which no kept checkpoint comes back."""
        self._buffer.prune(before_step)

    async def next_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """The groups of one step, for which the engines serve weights of version `step`, and what they say of the rollout.

        `step` steps are done, so users know this one, and the buffer notes it, as step `step` + 1. Waits for those that the buffer does
        not hold yet. Up to `rollout.max_staleness` later steps are generated in the meantime, and go on when this returns.

        Raises:
            UserError: too many reward calls failed, resampling found no groups with a signal, tokens are of weights that this step must
                not train on, or samples of one prompt are copies of each other.
        """
        production = self._production
        self.pool.readmit()
        busy_before_s, tokens_before = self._measured
        wanted = self._settings.data.prompts_per_step
        kept: list[Group] = []
        seen: list[Group] = []
        num_renewed = num_filtered = 0
        for _ in range(MAX_RESAMPLING_ROUNDS):
            groups, reasons, renewed = await self._groups(wanted - len(kept), step=step, progress=progress)
            num_renewed += renewed
            num_filtered += sum(reason not in (None, NO_REWARD, NO_SIGNAL) for reason in reasons.values())
            seen += groups
            kept += [group for group in groups if self._keeps(reasons[group.id])]
            if len(kept) == wanted or self._settings.objective.zero_variance != "resample":
                break
        else:
            passed = "" if self._settings.rollout.filter is None else f" and passed rollout.filter {self._settings.rollout.filter.function}"
            raise UserError(
                f"step {step + 1}: {len(kept)} of {len(seen)} groups have different rewards{passed} after {MAX_RESAMPLING_ROUNDS} "
                f"rounds of resampling, needs {wanted}; use prompts of other difficulty or objective.zero_variance drop"
            )
        self._measured = production.busy_s, production.num_tokens
        speed = Mean(production.num_tokens - tokens_before, self._measured[0] - busy_before_s)
        metrics = {**rollout_metrics(seen, version=step), "rollout/tokens_per_second": speed, "rollout/renewed_groups": Sum(num_renewed)}
        if self._settings.rollout.filter is not None:
            metrics["rollout/filtered_groups"] = Sum(num_filtered)
        return make_train_batch(kept) if kept else _without_signal(make_train_batch(seen)), metrics

    def _rejection(self, group: Group) -> str | None:
        """Why a step does not train on a group, as the buffer notes it; None when it does."""
        if not any(sample.reward is not None and sample.reward.value is not None for sample in group.samples):
            return NO_REWARD
        if self._drops and not has_signal(group, self._settings.objective.advantage):
            return NO_SIGNAL
        return self._filter(group)

    def _keeps(self, reason: str | None) -> bool:
        """Whether a group with this rejection is in the batch: one without rewards is, where nothing is dropped, as what was generated."""
        return reason is None or (reason == NO_REWARD and not self._drops)

    @property
    def _drops(self) -> bool:
        return self._settings.objective.zero_variance in ("drop", "resample")

    async def _groups(self, count: int, *, step: int, progress: PhaseProgress) -> tuple[list[Group], dict[str, str | None], int]:
        """The next `count` groups, in the order of their prompts, why each is rejected, by its id, and how many had to be made anew.

        Groups are only ever made when they will be young enough; a run that is resumed with a smaller max_staleness finds others.
        """
        production, oldest = self._production, self._admission.oldest_version(step)
        renewed = self._buffer.renew(count, oldest_version=oldest)
        production.admit(self._admission.num_admitted(step=step, missing=count, version=step))
        await production.wait(count, progress=progress)
        reasons: dict[str, str | None] = {}

        def rejection(group: Group) -> str | None:
            reasons[group.id] = self._rejection(group)
            return reasons[group.id]

        groups = self._buffer.take_done(count, step=step + 1, rejection=rejection)
        check_versions(groups, step=step, oldest_version=oldest, rollout=self._rollout_name)
        self._check_independence(groups, step=step)
        rewards = [sample.reward for group in groups for sample in group.samples if sample.reward is not None]
        self._rewards.note_failures(rewards, step=step + 1)
        check_error_rate(rewards, max_error_rate=self._settings.reward.max_error_rate)
        return groups, reasons, renewed

    def _check_independence(self, groups: Sequence[Group], *, step: int) -> None:
        for group in groups:
            self._identical.add(group)
        problem = self._identical.problem()
        if problem is not None:
            raise UserError(
                f"step {step + 1}: {problem}; look for what gives them one seed in {self._rollout_name}, which has to ask the engine for "
                "every sample, in rollout.sglang and in the engines' logs"
            )

    async def _make_group(self, prompt: Prompt) -> Group:
        """A group for training, with the reward of the greedy response where the objective compares with it."""
        baseline = None
        if self._settings.objective.advantage.estimator == "remax":
            baseline = (await self._maker(num_samples=1, greedy=True).make(prompt)).samples[0].reward
        group = await self._maker(num_samples=self._settings.data.samples_per_prompt).make(prompt)
        return group if baseline is None else with_baseline(group, baseline)

    def _maker(self, *, num_samples: int, greedy: bool = False, urgency: Urgency = Urgency.TRAINING) -> GroupMaker:
        settings = self._settings
        sampling = make_sampling(settings.rollout.sampling, eos_token_ids=[self._tokenizer.eos_token_id], greedy=greedy)
        return GroupMaker(
            pool=self.pool,
            sampling=sampling,
            num_samples=num_samples,
            tokenizer=self._tokenizer,
            score=self._rewards.score,
            rollout=self._rollout,
            rollout_name=self._rollout_name,
            urgency=urgency,
            seed=settings.run.seed,
        )

    async def evaluate(self, *, progress: PhaseProgress) -> dict[str, Metric]:
        """Every held-out prompt once at temperature 0 and once at the training temperature, before what is made for training meanwhile."""
        shares = []
        for kind in ("greedy", "sampled"):
            samples: list[Sample] = []
            maker = self._maker(num_samples=1, greedy=kind == "greedy", urgency=Urgency.EVALUATION)
            async with aclosing(make_groups(self.eval_prompts, maker)) as finished:
                async for group in finished:
                    samples += group.samples
                    progress.advance()
            shares.append(evaluation_metrics(samples, kind=kind))
        return merge_metrics(shares)

    async def release_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every engine free these parts of its memory; nothing may be generating."""
        await asyncio.gather(*(client.release_memory(parts) for client in self.clients))

    async def restore_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every engine take these parts of its memory again."""
        await asyncio.gather(*(client.restore_memory(parts) for client in self.clients))

    async def score(self, batch: TrainBatch) -> list[tuple[Floats, TrainBatch]]:
        """From each engine: log-probs [T] at temperature 1 of the batch's sequences, and the batch with the experts that it routed to."""
        answers = []
        for client in self.clients:
            scores = [await client.score(tokens) for tokens in sequences(batch)]
            recorded = with_records(batch, [score.routed_experts for score in scores])
            answers.append((np.concatenate([score.log_probs for score in scores]), recorded))
        return answers


def check_versions(groups: Sequence[Group], *, step: int, oldest_version: int, rollout: str) -> None:
    """Check that every token of what is trained on after `step` steps was made by weights from `oldest_version` to `step`.

    Raises:
        UserError: one was not. Admission sees to it that no token from an engine is too old, so `rollout` has kept it from an earlier call.
    """
    for group in groups:
        for sample in group.samples:
            made = sample.weight_versions[sample.weight_versions >= 0]
            if len(made) and not oldest_version <= made.min() <= made.max() <= step:
                raise UserError(
                    f"step {step + 1}: sample {sample.index} of prompt {group.id} has tokens of weight versions {made.min()} to "
                    f"{made.max()}, needs {oldest_version} to {step} (rollout.max_staleness {step - oldest_version}), as engines serve; "
                    f"{rollout} has to ask the engine anew for each prompt, keep no Generation and take weight_versions as they are"
                )


def has_signal(group: Group, advantage: AdvantageSettings) -> bool:
    """Whether the scored samples teach anything under this estimator, see `without_signal`; True where training will refuse them."""
    samples = [(sample, sample.reward) for sample in group.samples if sample.reward is not None and sample.reward.value is not None]
    if not samples:
        return False
    rewards = np.array([reward.value for _, reward in samples], np.float64)
    baselines = None
    if advantage.estimator == "gdpo":
        names = sorted({name for _, reward in samples for name in reward.components})
        rewards = np.array([[reward.components.get(name, np.nan) for name in names] for _, reward in samples])
        weights = advantage.reward_weights
        if not names or not np.isfinite(rewards).all() or (weights is not None and len(weights) != len(names)):
            return True
    if advantage.estimator == "remax":
        baselines = torch.tensor([reward.components[GREEDY_BASELINE] for _, reward in samples], dtype=torch.float64)
    lengths = torch.tensor([int(sample.loss_mask.sum()) for sample, _ in samples])
    one_group = torch.zeros(len(samples), dtype=torch.int64)
    found = without_signal(advantage, rewards=torch.from_numpy(rewards), group_ids=one_group, lengths=lengths, baselines=baselines)
    return not bool(found.all())


def _without_signal(batch: TrainBatch) -> TrainBatch:
    """The batch with nothing to train on: what is left of a step when every group of it is dropped."""
    return replace(batch, loss_mask=np.zeros(len(batch.tokens), np.bool_))
