"""The rollout side of a run: from prompts to the batch of a step, and to what the weights can do on held-out prompts.

    prompts ──► groups in the making ──► buffer ──► batch of a step
                GroupMaker: rollout       (SQLite)   `next_batch` takes its groups, and rejects
                on the pool's engines,               those that teach nothing
                then the reward workers

All of it lives on one event loop, on which every coroutine here has to run. Engines come and go; the rest is there from the start.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.settings import Settings
from megatron_rl.data.baseline import with_baseline
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.buffer import BUFFER_FILE, Buffer, BufferCounts
from megatron_rl.data.run_prompts import RunPrompts
from megatron_rl.errors import UserError, counted
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.group_metrics import evaluation_metrics, rollout_metrics
from megatron_rl.observe.metrics import Mean, Metric, Sum, merge_metrics
from megatron_rl.rewards.runner import RewardRunner, check_error_rate
from megatron_rl.rollout.client import EngineClient, EnginePart
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.rollout.engine_pool import EnginePool, Urgency
from megatron_rl.rollout.group_choice import NO_REWARD, NO_SIGNAL, GroupChoice, check_versions
from megatron_rl.rollout.groups import GroupMaker, load_rollout, make_groups
from megatron_rl.rollout.identical_groups import IdenticalGroups
from megatron_rl.rollout.production import Admission, Production
from megatron_rl.rollout.sampling import make_sampling
from megatron_rl.types import Group, Prompt, Sample, TrainBatch, last_samples

MAX_RESAMPLING_ROUNDS = 10
IDLE_POLL_S = 0.02
_GROUPS, _CONSUMED = "num_groups", "num_consumed"
"""Keys of a position: the groups in the buffer, and those that steps have taken."""


def _made_by(settings: Settings) -> str:
    """The settings that decide how a prompt becomes a group, as JSON: a group that others have made is not trained on."""
    rollout, reward = settings.rollout, settings.reward
    sampling = {f"rollout.sampling.{name}": value for name, value in rollout.sampling.model_dump(mode="json").items()}
    chosen = {
        **sampling,
        "rollout.function": rollout.function,
        "rollout.args": rollout.args,
        "data.samples_per_prompt": settings.data.samples_per_prompt,
        "data.label_key": settings.data.label_key,
        "reward.function": reward.function,
        "reward.args": reward.args,
        # Its groups alone have a baseline.
        "objective.advantage.estimator is remax": settings.objective.advantage.estimator == "remax",
    }
    return json.dumps(chosen, sort_keys=True)


def _difference(made_by: str, now: str) -> str:
    """What differs between two texts of `_made_by`, in words."""
    then, present = json.loads(made_by), json.loads(now)
    names = sorted(name for name in then.keys() | present.keys() if then.get(name) != present.get(name))
    return " and ".join(f"{name} is {present.get(name)} now and was {then.get(name)}" for name in names)


def reward_log(settings: Settings) -> Path:
    """The file that gets what reward functions print."""
    return settings.run.directory / "logs" / "rewards.log"


class RolloutManager:
    """Makes the samples of a run on the engines that have joined; made by `open`.

    Example:
        async with RolloutManager.open(settings, prompts=RunPrompts.read(settings), buffer=Path("buffer.sqlite")) as manager:
            await manager.join(addresses, serve_current=True)
            batch, metrics = await manager.next_batch(0, progress=progress)
    """

    def __init__(
        self, settings: Settings, *, prompts: RunPrompts, rewards: RewardRunner, buffer: Buffer, connections: AsyncExitStack
    ) -> None:
        self._settings, self._rewards, self._buffer, self._connections = settings, rewards, buffer, connections
        self.prompts = prompts
        self.pool = EnginePool(max_requests=settings.rollout.max_concurrent_requests)
        self._rollout = load_rollout(settings.rollout)
        self._rollout_name = f"rollout.function {settings.rollout.function or 'single_turn'}"
        self._choice = GroupChoice(settings)
        self._identical = IdenticalGroups()
        self._production = Production(prompts.source, buffer, self._make_group)
        self._admission = Admission(
            groups_per_step=settings.data.prompts_per_step,
            max_staleness=settings.rollout.max_staleness,
            num_steps=settings.run.num_steps,
        )
        # Seconds of making groups and tokens made, at the end of the last step.
        self._measured = (0.0, 0)

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings, *, prompts: RunPrompts, buffer: Path) -> "AsyncIterator[RolloutManager]":
        """Start the reward workers, try the reward function, open the buffer; needs no engine. At the end what is being made is aborted.

        Raises:
            UserError: the reward function gives no reward for a probe, or another process holds the buffer.
        """
        async with AsyncExitStack() as stack:
            rewards = stack.enter_context(RewardRunner(settings.reward, log_path=reward_log(settings)))
            for prompt in prompts.for_reward():
                rewards.probe(prompt)
            opened = stack.enter_context(Buffer(buffer, made_by=_made_by(settings)))
            connections = await stack.enter_async_context(AsyncExitStack())
            manager = cls(settings, prompts=prompts, rewards=rewards, buffer=opened, connections=connections)
            stack.push_async_callback(manager._production.stop)
            yield manager

    # Engines

    @property
    def clients(self) -> tuple[EngineClient, ...]:
        """The engines that are members now, in the order in which they joined."""
        return self.pool.membership.members

    async def join(self, addresses: Iterable[EngineAddress], *, serve_current: bool = False) -> None:
        """Open a client to each of these engines, which get requests once their weights are the current ones.

        That is after the next weight sync, or at once where they `serve_current` weights.
        """
        for address in addresses:
            # A weight sync is the one control call that takes long: an engine may read all of a large model in it.
            client = EngineClient(
                address,
                request_timeout_s=self._settings.rollout.request_timeout_s,
                control_timeout_s=self._settings.weights.sync_timeout_s,
            )
            self.pool.join(await self._connections.enter_async_context(client))
            if serve_current:
                self.pool.admit([client])

    async def leave(self, address: EngineAddress, error: Exception) -> bool:
        """Go on without the engine at `address`, which has died of `error`. False when it is the last, which stays a member."""
        client = next(client for client in self.clients if client.address == address)
        if len(self.clients) == 1:
            return False
        self.pool.leave(client, error)
        return True

    async def release_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every engine free these parts of its memory, whose content is lost; nothing may be generating."""
        await asyncio.gather(*(self.pool.unless_it_leaves(client, client.release_memory(parts)) for client in self.clients))

    async def restore_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every engine take these parts of its memory again."""
        await asyncio.gather(*(self.pool.unless_it_leaves(client, client.restore_memory(parts)) for client in self.clients))

    # Where the run stands

    async def position(self, *, step: int) -> dict[str, Any]:
        """Where the prompts continue after `step` steps, as JSON values; the buffer is flushed to the disk first: no checkpoint may know
        more than it. Groups that the next step has already, which is not trained on any more, do not count as taken.
        """
        self._buffer.flush()
        num_consumed = self._buffer.num_consumed(step=step)
        return {**self.prompts.source.state(), _GROUPS: self._buffer.counts().total, _CONSUMED: num_consumed}

    async def rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        """Continue where the checkpoint after `step` steps stood, at the first prompt when there is no `position`.

        Groups that were finished since then are kept where their weights still exist and the settings would make them so again. Returns a
        sentence for each set of other settings whose groups are made anew, and for a buffer that is gone.

        Raises:
            UserError: the data are others than then, or the buffer is one of an earlier moment.
        """
        source = self.prompts.source
        if position is not None:
            source.restore(position)
        others = self._buffer.rewind(step, version=step)
        counts = self._buffer.counts()
        num_groups, gone = source.num_taken, tuple[str, ...]()
        # Checkpoints that were written on the way to 0.2 do not have the numbers.
        if position is not None and _GROUPS in position:
            num_groups = position[_GROUPS]
            gone = self._missing(counts, num_groups=num_groups, num_consumed=position[_CONSUMED], step=step)
        if not counts.total:
            # A kill before the next checkpoint comes back to this one, with what is made from now on.
            self._buffer.begin_behind(num_groups)
        # Prompts that were taken after the checkpoint are in the buffer: the next ones come behind them.
        pending = self._buffer.unfinished(among=counts.waiting)
        self._buffer.add_prompts(source.next_prompts(max(0, counts.total - num_groups)))
        # Those from before it wait with the labels that the settings of then gave them.
        self._buffer.add_prompts(source.again(sorted(pending)))
        now = self._buffer.made_by
        renewed = (f"{counted(count, 'group')} to be made anew, because {_difference(made_by, now)}" for made_by, count in others.items())
        return (*gone, *renewed)

    def _missing(self, counts: BufferCounts, *, num_groups: int, num_consumed: int, step: int) -> tuple[str, ...]:
        """What is lost with a buffer that is gone. Raises UserError for one that lacks something of what it had at the checkpoint."""
        waiting = num_groups - num_consumed
        if not counts.total:
            return (f"the buffer is gone, and with it {counted(waiting, 'prompt')} that waited in it, now left out",) if waiting else ()
        # One that was begun at this checkpoint has nothing of what was there before.
        begun_here = self._buffer.num_gone == num_groups
        if counts.total < num_groups or (counts.consumed != num_consumed and not begun_here):
            raise UserError(
                f"{self._settings.run.directory / BUFFER_FILE} is not the buffer of the checkpoint of step {step}: it has {counts.total} "
                f"groups, of which the steps up to {step} took {counts.consumed}, and had {num_groups} and {num_consumed} then; copy it "
                f"again with the -wal file beside it, or move it away to go on without the groups that waited in it ({waiting})"
            )
        return ()

    async def abandon(self) -> None:
        """Abort what is being made, and wait until no engine works any more; no further batch can be asked for."""
        await self._production.stop()
        while self.pool.num_running:
            await asyncio.sleep(IDLE_POLL_S)

    async def forget(self, *, before_step: int) -> None:
        """Drop the token arrays of groups that the first `before_step` steps consumed, to which no kept checkpoint comes back."""
        self._buffer.prune(before_step)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which groups for training were being made. May be asked from any thread."""
        return self._production.busy_s

    # The batch of a step

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
            kept += [group for group in groups if self._choice.keeps(reasons[group.id])]
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

    async def _groups(self, count: int, *, step: int, progress: PhaseProgress) -> tuple[list[Group], dict[str, str | None], int]:
        """The next `count` groups, in the order of their prompts, why each is rejected, by its id, and how many had to be made anew.

        Groups are only ever made when they will be young enough; a run that is resumed with a smaller max_staleness finds others, also,
        in groups that were not finished, answers and samples that are put to use before the step is known which trains on them.
        """
        production, oldest = self._production, self._admission.oldest_version(step)
        admitted = self._admission.num_admitted(step=step, missing=count, version=step)
        renewed = 0
        for last in (False, True):
            found = self._buffer.renew(count, oldest_version=oldest)
            renewed += found
            if last and not found:
                break
            # Those that are made anew are counted anew.
            progress.advance(-count if last else 0)
            production.admit(admitted)
            await production.wait(count, progress=progress)
        reasons: dict[str, str | None] = {}

        def rejection(group: Group) -> str | None:
            reasons[group.id] = self._choice.rejection(group)
            return reasons[group.id]

        groups = self._buffer.take_done(count, step=step + 1, rejection=rejection)
        check_versions(groups, step=step, oldest_version=oldest, rollout=self._rollout_name)
        self._check_independence(groups, step=step)
        rewards = [sample.reward for group in groups for sample in last_samples(group.samples) if sample.reward is not None]
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

    # One group

    async def _make_group(self, prompt: Prompt) -> Group:
        """A group for training, with the reward of the greedy response where the objective compares with it."""
        baseline = None
        if self._settings.objective.advantage.estimator == "remax":
            baseline = (await self._maker(num_samples=1, greedy=True).make(prompt)).samples[0].reward
        maker = replace(self._maker(num_samples=self._settings.data.samples_per_prompt), buffer=self._buffer)
        group = await maker.make(prompt)
        return group if baseline is None else with_baseline(group, baseline)

    def _maker(self, *, num_samples: int, greedy: bool = False, urgency: Urgency = Urgency.TRAINING) -> GroupMaker:
        settings, tokenizer = self._settings, self.prompts.tokenizer
        return GroupMaker(
            pool=self.pool,
            sampling=make_sampling(settings.rollout.sampling, eos_token_ids=[tokenizer.eos_token_id], greedy=greedy),
            num_samples=num_samples,
            tokenizer=tokenizer,
            score=self._rewards.score,
            rollout=self._rollout,
            rollout_name=self._rollout_name,
            urgency=urgency,
            seed=settings.run.seed,
        )

    # Held-out prompts

    async def evaluate(self, *, progress: PhaseProgress) -> dict[str, Metric]:
        """Every held-out prompt once at temperature 0 and once at the training temperature, before what is made for training meanwhile."""
        shares = []
        for kind in ("greedy", "sampled"):
            samples: list[Sample] = []
            maker = self._maker(num_samples=1, greedy=kind == "greedy", urgency=Urgency.EVALUATION)
            async with aclosing(make_groups(self.prompts.held_out, maker)) as finished:
                async for group in finished:
                    samples += group.samples
                    progress.advance()
            # In one order, whichever engine was the quicker: a sum of fractions depends on it.
            samples.sort(key=lambda sample: sample.group_id)
            shares.append(evaluation_metrics(samples, kind=kind))
        return merge_metrics(shares)


def _without_signal(batch: TrainBatch) -> TrainBatch:
    """The batch with nothing to train on: what is left of a step when every group of it is dropped."""
    return replace(batch, loss_mask=np.zeros(len(batch.tokens), np.bool_))
