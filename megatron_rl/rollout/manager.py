"""The rollout side of a run: batches of samples for training, and answers to held-out prompts.

    prompts ──► groups in the making ──► buffer ──► batch of a step
                GroupMaker: rollout       (SQLite)   `next_batch` takes groups, and rejects
                on the pool's engines,               groups that teach nothing
                then the reward workers

All coroutines run on one event loop.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.derived import request_deadline_s, reward_workers, sync_deadline_s
from megatron_rl.config.order import InOrder
from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import batch_samples, make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.position import made_by, position_of, rewind
from megatron_rl.data.source import RunPrompts
from megatron_rl.data.token_values import TokenValues
from megatron_rl.data.tokenizer import model_type
from megatron_rl.engines.client import EngineClient, EnginePart
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import ROUTER
from megatron_rl.engines.sglang_router import Router
from megatron_rl.errors import UserError, counted
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.failures import FailureLog, reward_failures, rollout_failures
from megatron_rl.observe.group_metrics import failure_metrics, rollout_metrics, tail_metrics
from megatron_rl.observe.groups_of_interest import to_keep
from megatron_rl.observe.live_state import EngineState
from megatron_rl.observe.metrics import Mean, Metric, Sum
from megatron_rl.plugins.kinds import Rollout
from megatron_rl.rewards.gold import check_gold, check_held_out
from megatron_rl.rewards.runner import RewardRunner, scores_of_sets
from megatron_rl.rollout.agents import AgentNode
from megatron_rl.rollout.engine_watch import watched_pool
from megatron_rl.rollout.generator import cancel
from megatron_rl.rollout.group_choice import Chosen, GroupChoice, IdenticalGroups, check_versions
from megatron_rl.rollout.groups import GroupMaker, Score
from megatron_rl.rollout.opened_rollout import opened_rollout
from megatron_rl.rollout.production import Production
from megatron_rl.rollout.sample_checks import without_stale_tokens
from megatron_rl.types import Doubles, Group, Prompt, Sample, TrainBatch

MAX_RESAMPLING_ROUNDS = 10
IDLE_POLL_S = 0.02


def reward_log(directory: Path) -> Path:
    """Return the file for output printed by reward functions of the run in `directory`."""
    return directory / "logs" / "rewards.log"


class RolloutManager:
    """Makes the samples of a run on the engines that have joined; made by `open`.

    `scores` are the reward functions of the sets of held-out prompts with one of their own.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        prompts: RunPrompts,
        rollout: Rollout,
        rewards: RewardRunner | None,
        scores: Mapping[str, Score],
        buffer: Buffer,
        connections: AsyncExitStack,
        say: Callable[[str], None],
    ) -> None:
        self.prompts, self._settings, self._buffer, self._connections, self._scores = prompts, settings, buffer, connections, scores
        max_tokens = settings.training.max_tokens_per_micro_batch * settings.training.topology.cp
        self.pool, self._watch = watched_pool(settings.rollout, longest_turn=settings.longest_sequence, max_tokens=max_tokens)
        self._maker = GroupMaker(
            settings.rollout,
            rollout,
            pool=self.pool,
            tokenizer=prompts.tokenizer,
            score=None if rewards is None else rewards.score,
            seed=settings.run.seed,
            max_tokens=max_tokens,
        )
        self._failures = FailureLog.of_rollouts(settings.rollout, settings.run.directory, owner=self._maker.name, say=say)
        self._reward_failures = FailureLog.of_rewards(settings.reward, reward_log(settings.run.directory), say=say)
        self._choice = GroupChoice(settings.objective, settings.rollout.filter, samples_per_prompt=settings.data.samples_per_prompt)
        self.production = self._producing()
        self._returning: set[asyncio.Task[None]] = set()
        self._identical, self._num_returned = IdenticalGroups(), 0  # engines returned since the last step
        self.looked_at: dict[int, Sample] = {}  # rows of the newest batch whose tokens are kept
        self.spread: dict[str, Doubles] = {}  # numbers of its sequences by metric
        # Busy seconds, tokens, retries, seconds of generation and of rewards at the end of the last step.
        self._measured = (0.0, 0, Counter[str](), 0.0, 0.0)

    def _producing(self) -> Production:
        settings = self._settings
        make = self._maker.make_with_baseline if settings.objective.advantage.needs_greedy else self._maker.make
        return Production(
            partial(make, num_samples=settings.data.samples_per_prompt, buffer=self._buffer),
            settings.rollout,
            pool=self.pool,
            source=self.prompts.source,
            buffer=self._buffer,
            per_step=settings.data.prompts_per_step,
            num_steps=settings.run.num_steps,
            forecasts=settings.objective.zero_variance == "resample",
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings, *, prompts: RunPrompts, buffer: Path, say: Callable[[str], None] = lambda words: None
    ) -> "AsyncIterator[RolloutManager]":
        """Start the reward workers, try the reward function and open the buffer, without an engine.

        Unfinished work is aborted at the end. `say` gets a sentence about each step in which
        plug-ins fail in a new way, and about long waits. Raises UserError for a reward function
        without a reward for a probe, and for a buffer of another process.
        """
        async with AsyncExitStack() as stack:
            log_path = reward_log(settings.run.directory)
            rewards = None
            if settings.reward.function is not None:
                rewards = stack.enter_context(RewardRunner(settings.reward, num_workers=reward_workers(), log_path=log_path, note=say))
                rewards.find_form()
            options: dict[str, Any] = {"num_workers": reward_workers(), "log_path": log_path, "note": say}
            workers = stack.enter_context(ExitStack())
            scores = scores_of_sets(settings.eval.sets, settings.reward, prompts=prompts.held_out, stack=workers, **options)
            if rewards is not None:
                if left_out := await check_gold(prompts, settings.reward, score=rewards.score, sets=settings.eval.sets):
                    say(left_out)
                    prompts.list_bad_rows(settings.run.directory / "logs" / "bad_rows.txt")
                for prompt in prompts.probes:  # of the rows that are left
                    rewards.probe(prompt)
            for name, score in scores.items():
                await check_held_out(name, prompts.files[name].labelled(), settings.eval.sets[name].reward_of(settings.reward), score=score)
            rollout = await stack.enter_async_context(
                opened_rollout(
                    settings.rollout,
                    tokenizer=prompts.tokenizer,
                    model_type=model_type(settings.model.path),
                    must_reward=rewards is None,
                    log_path=settings.run.directory / "logs" / ("environments.log" if settings.rollout.agent is None else "agents.log"),
                )
            )
            present = made_by(settings.data, settings.rollout, settings.reward, greedy=settings.objective.advantage.needs_greedy)
            opened = stack.enter_context(Buffer(buffer, made_by=present, note=say))
            connections = await stack.enter_async_context(AsyncExitStack())
            parts: dict[str, Any] = {"prompts": prompts, "rollout": rollout, "rewards": rewards, "scores": scores, "buffer": opened}
            manager = cls(settings, **parts, connections=connections, say=say)
            # Aborted groups stay in flight in the buffer, and the next owner makes them again.
            stack.push_async_callback(cancel, manager.production.tasks)
            stack.push_async_callback(cancel, manager._returning)
            await stack.enter_async_context(manager._watch)
            yield manager

    # Engines

    @property
    def clients(self) -> tuple[EngineClient, ...]:
        """The present member engines, in the order of joining."""
        return self.pool.membership.members

    def engine_states(self) -> tuple[EngineState, ...]:
        """Return the state of every member engine. Safe in any thread."""
        return self._watch.states()

    async def join(self, addresses: Iterable[EngineAddress], *, serve_current: bool = False) -> None:
        """Open a client to each engine, for requests after the next sync, or `serve_current` ones."""
        model, rollout = self._settings.model, self._settings.rollout
        longest = self._settings.eval.longest_sampling(rollout.sampling)
        for address in addresses:
            # The one long control call is a sync: an engine may read all of a large model.
            client = EngineClient(
                address,
                request_timeout_s=request_deadline_s(model, longest),
                control_timeout_s=sync_deadline_s(model),
            )
            self.pool.join(await self._connections.enter_async_context(client))
            self._watch.begin(client)
            if serve_current:
                self.pool.admit([client])
        if (fields := rollout.sglang.get(ROUTER)) is not None and self.pool.router is None:
            log_path = self._settings.run.directory / "logs" / "router.log"
            router = Router(fields, pool=self.pool, log_path=log_path, request_timeout_s=request_deadline_s(model, longest))
            self.pool.router = await self._connections.enter_async_context(router)

    async def leave(self, address: EngineAddress, error: Exception, *, returning: Awaitable[bool] | None = None) -> bool:
        """Go on without the engine at `address`, dead of `error`; False for the last, unless it or another one is `returning`."""
        client = next(client for client in self.clients if client.address == address)
        if len(self.clients) == 1 and returning is None and not self._returning:
            return False
        if returning is not None:
            await self.expect(returning)
        self.pool.leave(client, error)
        return True

    async def expect(self, returning: Awaitable[bool]) -> None:
        """Let requests wait for an engine that is `returning`."""
        task = asyncio.create_task(self._return(returning))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)
        # The task has begun to count before the pool looks for an engine.
        await asyncio.sleep(0)

    async def _return(self, returning: Awaitable[bool]) -> None:
        """Let requests wait while an engine is started again; count it where that succeeds."""
        with self.pool.returning():
            self._num_returned += await returning

    async def spread_agents(self, nodes: Sequence[AgentNode], *, host: str, end: Callable[[], Awaitable[None]]) -> None:
        """Let commands of agents run on other `nodes`, too, from the first one on.

        The endpoint then also listens on this node's address `host`. `end` follows the last one.
        """
        self._connections.push_async_callback(end)
        await self._maker.spread_agents(nodes, host=host)

    async def release_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every idle engine free these parts of memory, losing the content."""
        await asyncio.gather(*(self.pool.unless_it_leaves(client, client.release_memory(parts)) for client in self.clients))

    async def restore_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every engine allocate these parts of memory again."""
        await asyncio.gather(*(self.pool.unless_it_leaves(client, client.restore_memory(parts)) for client in self.clients))

    # State of the run

    async def position(self, *, step: int) -> dict[str, Any]:
        """Return the data cursor after `step` steps, for a checkpoint; see `data.position`."""
        return position_of(self.prompts.source, self._buffer, step=step)

    async def rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        """Continue at the checkpoint after `step` steps; see `data.position`."""
        return rewind(self.prompts.source, self._buffer, step=step, position=position)

    @property
    def busy_s(self) -> float:
        """Return the seconds so far with a training group in the making. Safe in any thread."""
        return self.production.busy_s

    async def abandon(self) -> None:
        """Abort all groups and wait for idle engines; no further batch can be asked for."""
        await cancel(self.production.tasks)
        while self.pool.num_running:
            await asyncio.sleep(IDLE_POLL_S)

    async def forget(self, *, before_step: int) -> None:
        """Drop the token arrays of groups to which no kept checkpoint comes back."""
        await asyncio.to_thread(self._buffer.prune, before_step, keep=self._settings.run.keep_groups)

    async def keep(self, values: TokenValues) -> None:
        """Keep the values of the tokens of `looked_at`, when they were trained on, for readers of the run."""
        self._buffer.put_token_values(self.looked_at, values)

    async def distrust(self, *, step: int) -> None:
        """Have a resumed run make the samples of the step after `step` steps, and finished ones, anew."""
        self._buffer.distrust(step=step + 1)

    async def generate(self, count: int, *, progress: PhaseProgress) -> None:
        """Make the groups of the first `count` prompts, which stay in the buffer; those of a killed call are kept."""
        rewind(self.prompts.source, self._buffer, step=0, position=None)
        await self.production.make(count, step=0, progress=progress)

    # The batch of a step

    async def next_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """Return the batch of one step, and metrics.

        `step` steps are done, so users and the buffer call this one step `step` + 1. Up to
        `rollout.max_staleness` later steps are generated meanwhile, and after the return.

        Raises:
            UserError: too many calls failed, resampling found no groups with a signal, weights that
                this step must not train on made a token, or samples of one prompt are copies.
        """
        self.pool.readmit()
        wanted, resamples = self._settings.data.prompts_per_step, self._settings.objective.zero_variance == "resample"
        taken, missing, num_renewed = list[Chosen](), wanted, 0
        for _ in range(MAX_RESAMPLING_ROUNDS):
            chosen, renewed = await self._take(missing, step=step, progress=progress)
            taken += chosen
            num_renewed += renewed
            self._check_failures(chosen, taken, step=step)
            missing = wanted - sum(each.kept if resamples else not each.failed for each in taken)
            if not missing:
                break
            progress.advance(-missing)
        else:
            raise UserError(self._without_signal(taken, step=step))
        # Rounds of resampling end in any order, and a replay of the step knows the prompts' alone.
        place = {group_id: number for number, group_id in enumerate(self._buffer.in_order(each.group.id for each in taken))}
        taken.sort(key=lambda each: place[each.group.id])
        kept = [each.group for each in taken if each.kept]
        trained = kept or [each.group for each in taken if not each.failed]
        # One sample is printed, also where none is kept.
        num_seen = max(self._settings.run.keep_groups, int(self._settings.observe.print_samples > 0))
        batch, names = make_train_batch(trained, version=step), to_keep(trained, num_seen)
        rows = {row: sample for row, sample in enumerate(batch_samples(trained)) if sample.group_id in names}
        # They stay through the training, and the batch has these records already.
        self.looked_at = {row: replace(sample, routed_experts=None, candidates=None) for row, sample in rows.items()}
        lengths = np.diff(batch.cu_seqlens) - batch.prompt_lengths
        self.spread = {"rollout/reward": batch.rewards, "rollout/response_length": lengths.astype(np.float64)}
        if not kept:
            # All groups are dropped: there is nothing to train on.
            batch = replace(batch, loss_mask=np.zeros(len(batch.tokens), np.bool_))
        # Where tokens may age, a group without a young one waited for its rewards when its step ended.
        surplus, num_renewed = (num_renewed, 0) if self._settings.rollout.order.partial else (0, num_renewed)
        tail = await self.production.leave_tail(step=step, shared=self._settings.runtime.colocate, num_surplus=surplus)
        return batch, {**self._metrics(taken, version=step), **self._watch.metrics(), "rollout/renewed_groups": Sum(num_renewed), **tail}

    def _check_failures(self, chosen: Sequence[Chosen], taken: Sequence[Chosen], *, step: int) -> None:
        """Note the failures of a round. Raises UserError for too many of all rounds: one call of a small round is no large share."""
        rounds, samples = [[each.group for each in groups] for groups in (chosen, taken)], self._settings.data.samples_per_prompt
        failures, calls = [rollout_failures(groups, owner=self._maker.name) for groups in rounds], list(map(reward_failures, rounds))
        self._failures.note(failures[0], total=samples * len(chosen), step=step + 1)
        self._failures.check(failures[1], total=samples * len(taken))
        self._reward_failures.note(calls[0][0], total=calls[0][1], step=step + 1)
        self._reward_failures.check(calls[1][0], total=calls[1][1])

    def _without_signal(self, taken: Sequence[Chosen], *, step: int) -> str:
        """Return the reason why a step cannot be filled with these groups."""
        num_kept, num_failed = sum(each.kept for each in taken), sum(each.failed for each in taken)
        chosen_by = self._settings.rollout.filter
        passed = "" if chosen_by is None else f" and passed rollout.filter {chosen_by.function}"
        return (
            f"step {step + 1}: {num_kept} of {len(taken) - num_failed} groups have different rewards{passed}, and the rollout failed for "
            f"{counted(num_failed, 'other')}, after {MAX_RESAMPLING_ROUNDS} rounds of resampling, needs "
            f"{self._settings.data.prompts_per_step}; use prompts of other difficulty or objective.zero_variance drop, and mend the "
            "rollout where it fails"
        )

    def _metrics(self, taken: Sequence[Chosen], *, version: int) -> dict[str, Metric]:
        """Return the metrics of a step's groups, and of all work since the last step."""
        busy_before_s, tokens_before, retries_before, generation_before_s, reward_before_s = self._measured
        generation_s, reward_s = self._maker.generation_s, self._maker.reward_s
        busy_s, num_tokens, retries = self.busy_s, self.production.num_tokens, self._maker.retries.copy()
        self._measured = busy_s, num_tokens, retries, generation_s, reward_s
        scoring_s = reward_s - reward_before_s
        seen = [each.group for each in taken if not each.failed]
        failed = [each.group for each in taken if each.failed]
        metrics = {
            **rollout_metrics(seen, version=version),
            **failure_metrics([*seen, *failed], num_left_out=len(failed), retries=retries - retries_before),
            "rollout/tokens_per_second": Mean(num_tokens - tokens_before, busy_s - busy_before_s),
            "rollout/reward_wait_fraction": Mean(scoring_s, generation_s - generation_before_s + scoring_s),
            "engine/restarts": Sum(self._num_returned),
        }
        self._num_returned = 0
        if self._settings.rollout.order.partial:
            metrics |= tail_metrics(seen, oldest_version=version - self._settings.rollout.max_staleness)
        if self._settings.rollout.filter is not None:
            metrics["rollout/filtered_groups"] = Sum(sum(each.filtered for each in taken))
        return metrics

    async def _take(self, count: int, *, step: int, progress: PhaseProgress) -> tuple[list[Chosen], int]:
        """Return `count` groups by `rollout.order`, and the number of renewed groups.

        Groups are only made when young enough. A run resumed with a smaller max_staleness may still
        find older ones, also in answers and samples of unfinished groups: hence the second renewal.
        """
        order, oldest = self._settings.rollout.order, step - self._settings.rollout.max_staleness

        def renew() -> int:
            among = count if isinstance(order, InOrder) else self._buffer.counts().done
            return self._buffer.renew(among, oldest_version=oldest, by_newest=order.partial)

        renewed = renew()
        ids = await self.production.make(count, step=step, progress=progress)
        again = renew()
        if again:
            # Renewed groups are counted again.
            progress.advance(-count)
            ids = await self.production.make(count, step=step, progress=progress)
        groups = self._buffer.groups(ids)
        if order.partial:
            groups = [without_stale_tokens(group, oldest_version=oldest) for group in groups]
        # In a thread: a filter may be slow, and engines must continue meanwhile.
        chosen = await asyncio.to_thread(lambda: [self._choice.choose(group) for group in groups])
        self._buffer.consume({each.group.id: each.rejection for each in chosen}, step=step + 1)
        # Groups are begun late enough for tokens of engines, so the rollout kept one from an earlier call.
        cure = f"{self._maker.name} has to ask the engine anew for each prompt, keep no Generation and take weight_versions as they are"
        check_versions(groups, step=step, oldest_version=0 if order.partial else oldest, cure=cure)
        for group in groups if self._settings.rollout.sampling.entropy is None else ():  # whose draws have other log-probs
            self._identical.add(group)
        self._identical.check(step=step, rollout=self._maker.name)
        return chosen, renewed + again

    # Held-out prompts

    async def answer(self, prompt: Prompt, *, name: str, num_samples: int, sampling: Sampling) -> Group:
        """Return `num_samples` answers to a prompt of the set `name`, ahead of training groups, with the rewards of the set."""
        of_set: dict[str, Any] = {"sampling": sampling, "score": self._scores.get(name), "urgency": Urgency.EVALUATION}
        return await self._maker.make(prompt, num_samples=num_samples, **of_set)
