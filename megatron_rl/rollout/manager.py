"""The rollout side of a run: batches of samples for training, and evaluation on held-out prompts.

    prompts ──► groups in the making ──► buffer ──► batch of a step
                GroupMaker: rollout       (SQLite)   `next_batch` takes groups, and rejects
                on the pool's engines,               groups that teach nothing
                then the reward workers

Everything runs on one event loop, and every coroutine here must run there. Engines come and go; the
rest exists from the start.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.advantage import PlugInAdvantage
from megatron_rl.config.derived import request_deadline_s, sync_deadline_s
from megatron_rl.config.settings import Settings
from megatron_rl.data.baseline import with_baseline
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.position import made_by, position_of, rewind
from megatron_rl.data.run_prompts import RunPrompts
from megatron_rl.engines.client import EngineClient, EnginePart
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.errors import UserError, counted
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.failures import FailureLog
from megatron_rl.observe.group_metrics import evaluation_metrics, failure_metrics, rollout_metrics
from megatron_rl.observe.metrics import Mean, Metric, Sum, merge_metrics
from megatron_rl.plugins.loader import load
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.rollout.generator import cancel
from megatron_rl.rollout.group_choice import NO_REWARD, NO_SIGNAL, GroupChoice, IdenticalGroups, check_versions, has_failed, load_filter
from megatron_rl.rollout.groups import GroupMaker, load_rollout, make_groups
from megatron_rl.types import Failure, Group, Prompt, RewardOutcome, Sample, TrainBatch, last_samples

MAX_RESAMPLING_ROUNDS = 10
IDLE_POLL_S = 0.02


def num_admitted(*, step: int, missing: int, version: int, groups_per_step: int, max_staleness: int, num_steps: int) -> int:
    """Return the number of untrained groups, in order, to admit while engines serve `version` or
    later.

    `step` is the first step without all groups. The first `missing` groups belong to this step, and
    every `groups_per_step` behind them to the next step, or to an earlier one where groups before
    them are left out. Step s trains the weights of version s, of `num_steps` in all. So the last
    admitted group is trained on at step `version` + `max_staleness` at the latest, and all its
    tokens have `version` or a later one. With a staleness of 0 no group is made ahead.
    """
    last_step = min(version + max_staleness, num_steps - 1)
    return missing + (last_step - step) * groups_per_step if last_step >= step else 0


def reward_log(settings: Settings) -> Path:
    """Return the file for output printed by reward functions."""
    return settings.run.directory / "logs" / "rewards.log"


class RolloutManager:
    """Makes the samples of a run on the engines that have joined; made by `open`.

    Example:
        async with RolloutManager.open(
            settings, prompts=RunPrompts.read(settings), buffer=Path("buffer.sqlite")
        ) as manager:
            await manager.join(addresses, serve_current=True)
            batch, metrics = await manager.next_batch(0, progress=progress)
    """

    def __init__(
        self,
        settings: Settings,
        *,
        prompts: RunPrompts,
        rewards: RewardRunner,
        buffer: Buffer,
        connections: AsyncExitStack,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._rewards, self._buffer, self._connections = settings, rewards, buffer, connections
        self.prompts = prompts
        self.pool = EnginePool(max_requests=settings.rollout.max_concurrent_requests)
        self._maker = GroupMaker(
            settings.rollout,
            load_rollout(settings.rollout),
            pool=self.pool,
            tokenizer=prompts.tokenizer,
            score=rewards.score,
            seed=settings.run.seed,
            max_tokens=settings.training.max_tokens_per_micro_batch * settings.training.topology.cp,
        )
        logs, reward, advantage = settings.run.directory / "logs", settings.reward, settings.objective.advantage
        self._rollout_failures = FailureLog(
            path=logs / "rollout.log",
            calls="trajectories",
            owner=self._maker.name,
            setting="rollout.max_error_rate",
            max_error_rate=settings.rollout.max_error_rate,
            say=say,
        )
        self._reward_failures = FailureLog(
            path=reward_log(settings),
            calls="reward calls",
            owner=f"reward.function {reward.function}",
            setting="reward.max_error_rate",
            max_error_rate=reward.max_error_rate,
            say=say,
        )
        compares = advantage.compares_groups or isinstance(advantage, PlugInAdvantage)
        self._choice = GroupChoice(
            drops=settings.objective.zero_variance in ("drop", "resample"),
            advantage=advantage.loaded(load) if isinstance(advantage, PlugInAdvantage) else advantage,
            filter=load_filter(settings.rollout.filter),
            fewest=min(2 if compares else 1, settings.data.samples_per_prompt),
        )
        self._identical = IdenticalGroups()
        # Groups in the making; the unfinished ones among awaited groups; the reason why a group
        # failed.
        self._tasks: set[asyncio.Task[None]] = set()
        self._missing: set[str] = set()
        self._failure: BaseException | None = None
        self._finished = asyncio.Event()
        self._busy_since_s = self._busy_before_s = 0.0
        self._num_tokens = 0
        # Seconds of making groups, tokens made and attempts repeated, at the end of the last step.
        self._measured = (0.0, 0, 0)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings, *, prompts: RunPrompts, buffer: Path, say: Callable[[str], None] = lambda words: None
    ) -> "AsyncIterator[RolloutManager]":
        """Start the reward workers, try the reward function and open the buffer, without an engine.

        Unfinished work is aborted at the end. `say` gets a sentence about each step in which
        plug-ins fail in a new way, and about long waits.

        Raises:
            UserError: the reward function gives no reward for a probe, or another process holds the
                buffer.
        """
        async with AsyncExitStack() as stack:
            rewards = stack.enter_context(RewardRunner(settings.reward, log_path=reward_log(settings), note=say))
            for prompt in prompts.for_reward():
                rewards.probe(prompt)
            opened = stack.enter_context(Buffer(buffer, made_by=made_by(settings), note=say))
            connections = await stack.enter_async_context(AsyncExitStack())
            manager = cls(settings, prompts=prompts, rewards=rewards, buffer=opened, connections=connections, say=say)
            stack.push_async_callback(manager._stop)
            yield manager

    # Engines

    @property
    def clients(self) -> tuple[EngineClient, ...]:
        """The present member engines, in the order of joining."""
        return self.pool.membership.members

    async def join(self, addresses: Iterable[EngineAddress], *, serve_current: bool = False) -> None:
        """Open a client to each of these engines, which get requests once their weights are
        current.

        Weights are current after the next weight sync, or at once with `serve_current`.
        """
        model = self._settings.model
        for address in addresses:
            # A weight sync is the one long control call: an engine may read all of a large model
            # during the call.
            client = EngineClient(
                address,
                request_timeout_s=request_deadline_s(model, self._settings.rollout.sampling),
                control_timeout_s=sync_deadline_s(model),
            )
            self.pool.join(await self._connections.enter_async_context(client))
            if serve_current:
                self.pool.admit([client])

    async def leave(self, address: EngineAddress, error: Exception) -> bool:
        """Go on without the engine at `address`, dead of `error`; return False for the last, which
        stays.
        """
        client = next(client for client in self.clients if client.address == address)
        if len(self.clients) == 1:
            return False
        self.pool.leave(client, error)
        return True

    async def release_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every engine free these parts of memory, losing the content; no generation may be
        running.
        """
        await asyncio.gather(*(self.pool.unless_it_leaves(client, client.release_memory(parts)) for client in self.clients))

    async def restore_memory(self, parts: Collection[EnginePart]) -> None:
        """Let every engine allocate these parts of memory again."""
        await asyncio.gather(*(self.pool.unless_it_leaves(client, client.restore_memory(parts)) for client in self.clients))

    # State of the run

    async def position(self, *, step: int) -> dict[str, Any]:
        """Return where the prompts continue after `step` steps, as JSON values, once the buffer is on the disk; see `data.position`."""
        return position_of(self.prompts.source, self._buffer, step=step)

    async def rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        """Continue where the checkpoint after `step` steps stood, at the first prompt when there is no `position`; see `data.position`."""
        return rewind(self.prompts.source, self._buffer, step=step, position=position)

    async def abandon(self) -> None:
        """Abort what is being made, and wait until no engine works any more; no further batch can be asked for."""
        await self._stop()
        while self.pool.num_running:
            await asyncio.sleep(IDLE_POLL_S)

    async def forget(self, *, before_step: int) -> None:
        """Drop the token arrays of groups consumed by the first `before_step` steps.

        No kept checkpoint comes back to these groups.
        """
        self._buffer.prune(before_step, keep=self._settings.run.keep_groups)

    # The batch of a step

    async def next_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """Return the groups of one step, on engines with weights of version `step`, and rollout
        metrics.

        `step` steps are done, so users and the buffer call this one step `step` + 1. Waits for
        groups not yet in the buffer. Up to `rollout.max_staleness` later steps are generated in the
        meantime, and continue after the return.

        Raises:
            UserError: too many reward calls failed, resampling found no groups with a signal,
                tokens have
                weights that this step must not train on, or samples of one prompt are copies of
                    each other.
        """
        maker = self._maker
        self.pool.readmit()
        busy_before_s, tokens_before, retries_before = self._measured
        wanted, resamples = self._settings.data.prompts_per_step, self._settings.objective.zero_variance == "resample"
        kept: list[Group] = []
        seen: list[Group] = []
        failed: list[Group] = []
        missing, num_renewed, num_filtered = wanted, 0, 0
        for _ in range(MAX_RESAMPLING_ROUNDS):
            groups, reasons, renewed = await self._groups(missing, step=step, progress=progress)
            left = [group for group in groups if not has_failed(reasons[group.id])]
            failed += [group for group in groups if has_failed(reasons[group.id])]
            seen += left
            kept += [group for group in left if self._choice.keeps(reasons[group.id])]
            num_renewed += renewed
            num_filtered += sum(reasons[group.id] not in (None, NO_REWARD, NO_SIGNAL) for group in left)
            self._check_rollouts(groups, [*seen, *failed], step=step)
            missing = wanted - len(kept if resamples else seen)
            if not missing:
                break
            progress.advance(-missing)
        else:
            passed = "" if self._settings.rollout.filter is None else f" and passed rollout.filter {self._settings.rollout.filter.function}"
            raise UserError(
                f"step {step + 1}: {len(kept)} of {len(seen)} groups have different rewards{passed}, and the rollout failed for "
                f"{counted(len(failed), 'other')}, after {MAX_RESAMPLING_ROUNDS} rounds of resampling, needs {wanted}; use prompts of "
                "other difficulty or objective.zero_variance drop, and mend the rollout where it fails"
            )
        self._measured = self.busy_s, self._num_tokens, maker.num_retries
        metrics = {
            **rollout_metrics(seen, version=step),
            **failure_metrics([*seen, *failed], num_left_out=len(failed), num_retries=maker.num_retries - retries_before),
            "rollout/tokens_per_second": Mean(self._num_tokens - tokens_before, self.busy_s - busy_before_s),
            "rollout/renewed_groups": Sum(num_renewed),
        }
        if self._settings.rollout.filter is not None:
            metrics["rollout/filtered_groups"] = Sum(num_filtered)
        return make_train_batch(kept) if kept else _without_signal(make_train_batch(seen)), metrics

    async def _groups(self, count: int, *, step: int, progress: PhaseProgress) -> tuple[list[Group], dict[str, str | None], int]:
        """Return the next `count` groups in the order of prompts, rejections by id, and renewed
        groups.

        Groups are only made when young enough. A run resumed with a smaller max_staleness may still
        find older groups, also among answers and samples of unfinished groups, which are used
        before the training step is known.
        """
        settings = self._settings
        max_staleness = settings.rollout.max_staleness
        oldest = step - max_staleness
        admitted = num_admitted(
            step=step,
            missing=count,
            version=step,
            groups_per_step=settings.data.prompts_per_step,
            max_staleness=max_staleness,
            num_steps=settings.run.num_steps,
        )
        renewed = 0
        for last in (False, True):
            found = self._buffer.renew(count, oldest_version=oldest)
            renewed += found
            if last and not found:
                break
            # Renewed groups are counted again.
            progress.advance(-count if last else 0)
            self._admit(admitted)
            await self._wait(count, progress=progress)
        groups = self._buffer.done(count)
        # In a thread: a filter may be slow, and engines must continue meanwhile.
        reasons = await asyncio.to_thread(self._choice.rejections, groups)
        self._buffer.consume(reasons, step=step + 1)
        check_versions(groups, step=step, oldest_version=oldest, rollout=self._maker.name)
        self._check_independence(groups, step=step)
        rewards = [sample.reward for group in groups for sample in last_samples(group.samples) if sample.reward is not None]
        failures = [
            Failure(reward.outcome.value, reward.message.partition("\n")[0], reward.message)
            for reward in rewards
            if reward.outcome is not RewardOutcome.SCORED
        ]
        self._reward_failures.note(failures, total=len(rewards), step=step + 1)
        self._reward_failures.check(failures, total=len(rewards))
        return groups, reasons, renewed

    def _check_rollouts(self, groups: Sequence[Group], all_groups: Sequence[Group], *, step: int) -> None:
        """Record the failures among `groups`, the newest of `all_groups` of a step.

        Raises UserError when the step has too many failures.
        """
        num_samples = self._settings.data.samples_per_prompt
        self._rollout_failures.note(self._failures_of(groups), total=num_samples * len(groups), step=step + 1)
        self._rollout_failures.check(self._failures_of(all_groups), total=num_samples * len(all_groups))

    def _check_independence(self, groups: Sequence[Group], *, step: int) -> None:
        for group in groups:
            self._identical.add(group)
        problem = self._identical.problem()
        if problem is not None:
            raise UserError(
                f"step {step + 1}: {problem}; look for what gives them one seed in {self._maker.name}, which has to ask the engine for "
                "every sample, in rollout.sglang and in the engines' logs"
            )

    # One group

    # Groups in the making, also while the trainer trains

    @property
    def busy_s(self) -> float:
        """Return the seconds so far with at least one training group in the making.

        Safe in any thread.
        """
        return self._busy_before_s + (time.monotonic() - self._busy_since_s if self._tasks else 0.0)

    def _admit(self, num_groups: int) -> None:
        """Admit the first `num_groups` untrained groups, in the order of prompts."""
        lacking = num_groups - self._buffer.counts().waiting
        if lacking > 0:
            self._buffer.add_prompts(self.prompts.source.next_prompts(lacking))
        for prompt in self._buffer.take_pending(num_groups, among=num_groups):
            if not self._tasks:
                self._busy_since_s = time.monotonic()
            task = asyncio.create_task(self._produce(prompt))
            self._tasks.add(task)
            task.add_done_callback(self._finish)

    async def _produce(self, prompt: Prompt) -> None:
        """Make a group, and put the finished group into the buffer, even when no caller waits any
        more.
        """
        group = await self._make_group(prompt)
        self._buffer.put_done(group)
        self._missing.discard(group.id)
        self._num_tokens += sum(len(sample.response_ids) for sample in group.samples)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        if len(self._tasks) == 1:
            now_s = time.monotonic()
            self._busy_before_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        self._tasks.discard(task)
        if not task.cancelled():
            # Read the exception of every task, because asyncio prints tracebacks of unread
            # failures.
            error = task.exception()
            self._failure = self._failure or error
        self._finished.set()

    async def _wait(self, num_groups: int, *, progress: PhaseProgress) -> None:
        """Wait until the first `num_groups` untrained groups, all admitted, are done.

        Raises the failure.
        """
        # Read once: the order in front of the awaited groups does not change meanwhile.
        self._missing = self._buffer.unfinished(among=num_groups)
        shown = 0
        while True:
            self._finished.clear()
            if self._failure is not None:
                raise self._failure
            ready = num_groups - len(self._missing)
            progress.advance(ready - shown)
            shown = ready
            if not self._missing:
                return
            await self._finished.wait()

    async def _stop(self) -> None:
        """Abort groups in the making; they stay in flight in the buffer, and the next opener makes
        them again.
        """
        await cancel(self._tasks)

    async def _make_group(self, prompt: Prompt) -> Group:
        """Make a training group, with the greedy reward where the objective compares with it."""
        num_samples, baseline = self._settings.data.samples_per_prompt, None
        if self._settings.objective.advantage.needs_greedy:
            greedy = await self._maker.make(prompt, num_samples=1, greedy=True)
            if greedy.failures:
                return replace(greedy, failures=greedy.failures * num_samples)
            baseline = last_samples(greedy.samples)[0].reward
        group = await self._maker.make(prompt, num_samples=num_samples, buffer=self._buffer)
        return group if baseline is None else with_baseline(group, baseline)

    # Held-out prompts

    async def evaluate(
        self, *, progress: PhaseProgress, keep: Callable[[str, Sequence[Sample]], None] = lambda kind, samples: None
    ) -> dict[str, Metric]:
        """Answer every held-out prompt at temperature 0 and at the training temperature, before what is made for training meanwhile.

        `keep` gets the samples of each kind, greedy and sampled. Returns the metrics.
        """
        shares: list[dict[str, Metric]] = []
        for kind in ("greedy", "sampled"):
            groups: list[Group] = []
            make = partial(self._maker.make, num_samples=1, greedy=kind == "greedy", urgency=Urgency.EVALUATION)
            async with aclosing(make_groups(self.prompts.held_out, make)) as finished:
                async for group in finished:
                    groups.append(group)
                    progress.advance()
            # In a fixed order, independent of engine speed, because a sum of fractions depends on
            # the order.
            groups.sort(key=lambda group: group.id)
            failures = self._failures_of(groups)
            self._rollout_failures.check(failures, total=len(groups))
            samples = [sample for group in groups for sample in group.samples]
            keep(kind, samples)
            shares += [evaluation_metrics(samples, kind=kind), {"eval/rollout_failures": Sum(len(failures))}]
        return merge_metrics(shares)

    def _failures_of(self, groups: Iterable[Group]) -> list[Failure]:
        """Return the failed trajectories, each with prompt and plug-in in the trace."""
        return [
            replace(failure, trace=f"{self._maker.name} failed for prompt {group.id}: {failure.headline}\n{failure.trace}".rstrip())
            for group in groups
            for failure in group.failures
        ]


def _without_signal(batch: TrainBatch) -> TrainBatch:
    """Return the batch with no training data, the rest of a step when all groups are dropped."""
    return replace(batch, loss_mask=np.zeros(len(batch.tokens), np.bool_))
