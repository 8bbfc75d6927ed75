"""Contracts of plug-ins, tried on the plug-in.

`megatron-rl check-plugin` prints these checks, `train --check` stops at the first failure,
tests/contract asserts all.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.algorithms.advantage import group_advantages
from megatron_rl.algorithms.aggregation import Sequences
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.plug_in import PlugInAdvantage, PlugInLoss
from megatron_rl.algorithms.policy_loss import PolicyTerms
from megatron_rl.check import Check
from megatron_rl.config.data_settings import DataSettings
from megatron_rl.config.settings import AgentSettings, FilterSettings, RewardSettings, RolloutSettings
from megatron_rl.data.row_files import Row
from megatron_rl.data.row_source import OwnRows
from megatron_rl.data.row_table import read_first_row
from megatron_rl.data.tokenizer import load_tokenizer, model_type
from megatron_rl.errors import UserError
from megatron_rl.plugins.kinds import KINDS, PluginKind
from megatron_rl.plugins.loader import is_agent, load, without_exits
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.environment_host import Environments
from megatron_rl.rollout.group_choice import load_filter
from megatron_rl.rollout.rollout_trial import RolloutTrial, prompt_of
from megatron_rl.system.deadlines import PLUGIN_PROBE_S
from megatron_rl.types import Group, Message, Prompt, Reward, RewardOutcome, Sample

RESPONSES = ("4", "5", "", "no idea", "\\boxed{4}", "\N{GRINNING FACE}", "x" * 10_000)
"""Responses for the trial of a reward function."""
PROBE_REWARDS: tuple[tuple[float | None, ...], ...] = ((0.0, 1.0), (1.0, 1.0), (0.0,), (0.5, None), (-1e6, 0.0, 1e6, 1.0))
"""Rewards of the groups for the trial of a filter; None for a failed reward call."""
NUM_PROBE_ROWS = 10
"""Rows that a data source has to give again."""
NO_ARGS: Mapping[str, Any] = MappingProxyType({})


def check(
    path: str, kind: PluginKind, args: Mapping[str, Any] = NO_ARGS, *, model: Path | None = None, data: Path | None = None
) -> Iterator[Check]:
    """Try the plug-in at `path` on each promise of its kind; rollouts and environments with a `model`'s tokenizer, if given.

    Those that get a prompt get the first row of `data`, if given.
    """
    chat = None if model is None else (load_tokenizer(model), model_type(model))
    row = None
    if data is not None:
        settings = DataSettings(train=data)
        row = read_first_row(settings.sources[0], settings=settings)
    try:
        load(path, kind=kind, args=args, as_agent=kind == "rollout" and is_agent(path))
    except UserError as error:
        yield Check("it can be imported and called with its arguments", "broken", str(error))
        return
    yield Check("it can be imported and called with its arguments")
    takes_row = {"reward": _try_reward, "rollout": _try_rollout, "environment": _try_environment}
    attempts = takes_row[kind](path, args, chat, row) if kind in takes_row else _TRIALS[kind](path, args)
    promise = None
    while True:
        try:
            with without_exits(f"{KINDS[kind].setting} {path}", doing="being tried"):
                following = next(attempts, None)
        except UserError as error:
            if promise is None:
                raise
            lacks_row = data is None and kind in takes_row and "KeyError" in str(error)
            yield Check(promise, "broken", str(error), fix="give --data FILE, whose first row has the fields" if lacks_row else "")
            return
        if isinstance(following, Check):
            yield following
            continue
        if promise is not None:
            yield Check(promise)
        if following is None:
            return
        promise = following


def require(path: str, kind: PluginKind, args: Mapping[str, Any]) -> None:
    """Raise UserError with the first promise of its contract that the plug-in breaks."""
    for found in check(path, kind, args):
        if found.level == "broken":
            raise UserError(found.text)


Attempts = Iterator[str | Check]
"""Promises in words, and notes. What follows a promise tries it, and raises UserError where it is broken."""
Chat = tuple[PreTrainedTokenizerBase, str | None]
"""A model's tokenizer and model_type."""


def _try_reward(path: str, args: Mapping[str, Any], chat: Chat | None, row: Row | None) -> Attempts:
    prompt = prompt_of(row)
    with RewardRunner(RewardSettings(function=path, args=dict(args))) as runner:
        yield "any response gets a finite reward"
        runner.probe(prompt)
        first = score_all(runner, prompt)
        for response, reward in zip(RESPONSES, first, strict=True):
            if reward.outcome is not RewardOutcome.SCORED:
                raise UserError(f"reward.function {path} gave no reward for the response {response[:40]!r}: {reward.message}")
        yield "the same response gets the same reward again"
        for response, one, other in zip(RESPONSES, first, score_all(runner, prompt), strict=True):
            if one.value != other.value:
                raise UserError(
                    f"reward.function {path} gave {one.value} and then {other.value} for the response {response[:40]!r}, needs the same"
                )


def score_all(runner: RewardRunner, prompt: Prompt) -> list[Reward]:
    """Return the rewards of RESPONSES as answers to `prompt`."""

    async def work() -> list[Reward]:
        return await asyncio.gather(*(runner.score(Sample.written(prompt, text=response)) for response in RESPONSES))

    return asyncio.run(work())


def _try_environment(path: str, args: Mapping[str, Any], chat: Chat | None, row: Row | None) -> Attempts:
    prompt = prompt_of(row)
    call = {"id": "call_0", "type": "function", "function": {"name": "no_such_tool", "arguments": {}}}

    def last_answer(*messages: Message) -> Answer:
        part = "reset"

        async def work() -> Answer:
            nonlocal part
            async with environments.open() as home:
                requests: tuple[Prompt | Message, ...] = (prompt, *messages)
                for asked in requests:
                    if not isinstance(asked, Prompt):
                        part = f"the tool {asked['tool_calls'][0]['function']['name']}" if "tool_calls" in asked else "step"
                    answer = await (home.reset(asked) if isinstance(asked, Prompt) else home.answer(asked))
                    if "cause" in answer:
                        raise UserError(f"rollout.environment {path} failed: {answer['headline']}\n{answer['trace']}".rstrip())
            return answer

        try:
            return asyncio.run(asyncio.wait_for(work(), PLUGIN_PROBE_S))
        except TimeoutError as error:
            waits = f"has not ended {part} after {PLUGIN_PROBE_S:.0f} s"
            raise UserError(f"rollout.environment {path} {waits}; look what it waits for") from error

    with Environments(path, args) as environments:
        calls = [call, *(call | {"function": {"name": tool["name"], "arguments": {}}} for tool in environments.tools)]
        yield "it begins with a prompt and answers a message"
        last = last_answer({"role": "assistant", "content": "4"})
        if last["done"] and not last["parts"]:
            yield Check("an end has a reward", "note", "the answer '4' ended it without one, so that a run needs reward.function")
        yield "a call that no tool takes gets an answer"
        last_answer(*({"role": "assistant", "content": "", "tool_calls": [each]} for each in calls))
    if chat is not None:
        yield from _rollout_promises(RolloutSettings(environment=path, args=dict(args)), chat, row)


def _try_rollout(path: str, args: Mapping[str, Any], chat: Chat | None, row: Row | None) -> Attempts:
    if not is_agent(path):
        yield from _rollout_promises(RolloutSettings(function=path, args=dict(args)), chat, row)
    elif chat is not None:
        yield from _rollout_promises(RolloutSettings(agent=AgentSettings(function=path), args=dict(args)), chat, row)


def _rollout_promises(settings: RolloutSettings, chat: Chat | None, row: Row | None) -> Attempts:
    tokenizer, kind = chat or (None, None)
    trial = RolloutTrial(settings, tokenizer=tokenizer, model_type=kind, row=row)
    yield "one prompt becomes as many trajectories as are asked for"
    trial.run()
    yield "what is trained on is what the engine made, with its log-prob and version"
    trial.check_trained()
    yield "what is trained on stands behind the tokens that the engine saw"
    trial.check_seen()
    yield "what no engine made is masked and has version -1"
    trial.check_masked()
    yield "experts come along for every token before the last that was made"
    trial.check_experts()


def _try_advantage(path: str, args: Mapping[str, Any]) -> Attempts:
    estimator = PlugInAdvantage(path=path, args=dict(args)).loaded(load)
    rewards = torch.tensor([1.0, 0.0, 0.25, 5.0, -3.0, 2.0, 7.0], dtype=torch.float64)
    group_ids, lengths = torch.tensor([0, 0, 0, 1, 1, 1, 2]), torch.tensor([3, 5, 2, 4, 9, 1, 6])

    def advantages(given: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return group_advantages(estimator, rewards=given[order], group_ids=group_ids[order], lengths=lengths[order])

    yield "every sample gets a finite float64 advantage, also in groups of equal rewards or of one"
    for given in (rewards, torch.ones(7, dtype=torch.float64)):
        advantages(given, torch.arange(7))
    for group in range(3):
        advantages(rewards, torch.nonzero(group_ids == group).flatten())
    yield "the order of the samples does not matter"
    order = torch.tensor([6, 3, 0, 4, 1, 5, 2])
    sorted_ones, mixed = advantages(rewards, torch.arange(7))[order], advantages(rewards, order)
    if not torch.allclose(sorted_ones, mixed, rtol=1e-9, atol=1e-12):
        raise UserError(
            f"objective.advantage {path} returned {mixed.tolist()} for samples in another order, needs "
            f"{sorted_ones.tolist()}; find the samples of a prompt by group_ids"
        )


def _try_policy_loss(path: str, args: Mapping[str, Any]) -> Attempts:
    loss = PlugInLoss(path=path, args=dict(args)).loaded(load, Objective())

    def loss_of(advantages: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses [T] of sequences of 3 and 2 tokens, and their log-probs [T]."""
        log_probs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([-0.6, -1.0, -1.5, -0.1, -3.5], dtype=torch.float64)
        mask = torch.ones(5, dtype=torch.bool)
        sequences = Sequences(index=torch.tensor([0, 0, 0, 1, 1]), mask=mask, tokens=torch.tensor([3.0, 2.0], dtype=torch.float64))
        terms = PolicyTerms(
            log_probs=log_probs, old_log_probs=old, log_ratio=log_probs - old, advantages=torch.tensor(advantages, dtype=torch.float64),
            sequences=sequences, ref_log_probs=old,
        )  # fmt: skip
        return loss.losses(terms).losses, log_probs

    yield "every token gets a finite loss"
    for advantages in ((1.0, 1.0, 1.0, -2.0, -2.0), (0.0,) * 5):
        made, _ = loss_of(advantages)
        if not made.isfinite().all():
            raise UserError(f"objective.policy_loss {path} returned losses {made.tolist()}, needs finite numbers")
    yield "the losses have a gradient with respect to the log-probs"
    made, log_probs = loss_of((1.0, 1.0, 1.0, -2.0, -2.0))
    if not made.requires_grad:
        raise UserError(f"objective.policy_loss {path} returned losses without a gradient, needs one with respect to terms.log_probs")
    (slope,) = torch.autograd.grad(made.sum(), log_probs)
    if not slope.isfinite().all() or not slope.any():
        raise UserError(
            f"objective.policy_loss {path} returned losses whose gradient with respect to terms.log_probs is {slope.tolist()}, needs "
            "finite numbers other than 0"
        )


def _try_data_source(path: str, args: Mapping[str, Any]) -> Attempts:
    settings = DataSettings(source=path, args=dict(args))

    def opened() -> OwnRows:
        return OwnRows(settings=settings, seed=7, need_response=False)

    def taken(source: OwnRows, *counts: int) -> list[Row]:
        return [row for count in counts for _, row in source.take(count)]

    def same(got: Sequence[Row], wanted: Sequence[Row], what: str, fix: str) -> None:
        for number, (row, other) in enumerate(zip(got, wanted, strict=True)):
            if row != other:
                raise UserError(f"data.source {path} gave row {number} as {row.prompt!r:.60} {what}, was {other.prompt!r:.60}; {fix}")

    yield "rows can be used as the lines of a data file are"
    expected = taken(opened(), NUM_PROBE_ROWS)
    yield "the same seed gives the same rows"
    same(taken(opened(), NUM_PROBE_ROWS), expected, "with the same seed", "draw from numpy.random.default_rng(seed)")
    yield "the rows do not depend on how many are asked for at once"
    same(taken(opened(), 1, 3, NUM_PROBE_ROWS - 4), expected, "when fewer are asked for at once", "let a row follow from its number")
    yield "it goes on from its state, which JSON can hold"
    source, other = opened(), opened()
    before = taken(source, 3)
    source.see(lambda after, until: {"0": 1.0, "1": 0.0, "2": 0.5}, step=1)
    other.restore(json.loads(json.dumps(source.state())))
    rest, own_rest = (taken(each, NUM_PROBE_ROWS - 3) for each in (other, source))
    same([*before, *rest], [*before, *own_rest], "after state and restore", "keep in state all that rows follow from")


def _try_filter(path: str, args: Mapping[str, Any]) -> Attempts:
    keep = load_filter(FilterSettings(function=path, args=dict(args)))
    yield "any group gets None or a reason"
    for rewards in PROBE_REWARDS:
        keep(_probe_group(rewards))
    yield "the same group gets the same answer again"
    for rewards in PROBE_REWARDS:
        answers = keep(_probe_group(rewards)), keep(_probe_group(rewards))
        if answers[0] != answers[1]:
            raise UserError(f"rollout.filter.function {path} returned {answers[0]!r} and then {answers[1]!r} for equal groups")


def _probe_group(rewards: Sequence[float | None]) -> Group:
    """Return a group whose samples have these rewards; None makes a failed reward call."""
    prompt = Prompt(id="contract", token_ids=np.array([1]), text="2+2=", label="4")
    outcomes = [
        Reward(RewardOutcome.TIMEOUT, message="timeout") if reward is None else Reward(RewardOutcome.SCORED, reward) for reward in rewards
    ]
    samples = [replace(Sample.written(prompt, text=str(index)), index=index, reward=outcome) for index, outcome in enumerate(outcomes)]
    return Group(id=prompt.id, prompt=prompt, samples=tuple(samples))


_TRIALS: Mapping[PluginKind, Callable[[str, Mapping[str, Any]], Attempts]] = MappingProxyType({
    "filter": _try_filter,
    "advantage": _try_advantage,
    "policy_loss": _try_policy_loss,
    "data_source": _try_data_source,
})  # fmt: skip
