"""Reference answers that a built-in reward function does not score: errors of the data, not of the policy."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.config.settings import RewardSettings
from megatron_rl.data.source import RunPrompts
from megatron_rl.errors import UserError, counted
from megatron_rl.plugins.kinds import BUILT_IN_REWARDS
from megatron_rl.rewards.mixture import Part, chosen_part
from megatron_rl.rewards.runner import was_lost
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample

_STATING = frozenset(BUILT_IN_REWARDS[name] for name in ("math", "exact", "choice", "reasoning_gym"))
"""Rewards whose label is a right answer as it is."""

_QUICK = _STATING | {BUILT_IN_REWARDS[name] for name in ("regex", "tags", "overlong")}
"""Those that a mixture may have beside: a label is worth no program, and no question to a server."""

Score = Callable[[Sample], Awaitable[Reward]]
_AT_ONCE = 512


async def check_gold(prompts: RunPrompts, reward: RewardSettings, *, score: Score, sets: Mapping[str, EvalSet]) -> str | None:
    """Score the labels of the rows to train on, and of held-out ones, as responses to their prompts.

    Those of `sets` with a function of their own are for `check_held_out`. A row whose label
    is not scored is left out by `data.max_bad_rows`; a note is returned where there are some.
    Raises UserError beyond, for held-out rows, and for a label without an answer in two calls.
    """
    before = len(prompts.source.bad.reasons)
    if prompts.trains:
        reasons = await unscored_labels(prompts.source.labelled(), reward, score=score)
        if reasons:
            cure = "; correct it, raise data.max_bad_rows, or set reward.check_labels=false"
            prompts.source.leave_out([reason and reason + cure for reason in reasons])
    for name, file in prompts.files.items():
        if not sets[name].reward:
            await check_held_out(name, file.labelled(), reward, score=score)
    unscored = prompts.source.bad.reasons[before:]
    return f"{counted(len(unscored), 'row')} left out, whose label is not scored, the first: {unscored[0]}" if unscored else None


async def check_held_out(name: str, prompts: Iterable[Prompt], reward: RewardSettings, *, score: Score) -> None:
    """Score the labels of the set `name` as responses to `prompts`. Raises UserError for one that is not scored."""
    found = await unscored_labels(prompts, reward, score=score)
    if reason := next((reason for reason in found if reason is not None), None):
        raise UserError(f"eval.sets.{name}: {reason}; correct it, or set reward.check_labels=false")


async def unscored_in(prompts: RunPrompts, reward: RewardSettings, *, score: Score) -> list[str]:
    """Return a sentence for each label of the rows to train on that `reward` does not score."""
    found = await unscored_labels(prompts.source.labelled(), reward, score=score) if prompts.trains else []
    return [reason for reason in found if reason is not None]


async def unscored_labels(prompts: Iterable[Prompt], reward: RewardSettings, *, score: Score) -> list[str | None]:
    """Return for each of the labelled `prompts` why `reward` does not score its label, None where it does; nothing untried."""
    path = BUILT_IN_REWARDS.get(reward.function or "", reward.function)
    tried = reward.check_labels and path in (*_STATING, BUILT_IN_REWARDS["by_row"], BUILT_IN_REWARDS["mixture"])
    return await _unscored(prompts, score, reward) if tried else []


async def _unscored(prompts: Iterable[Prompt], score: Score, reward: RewardSettings) -> list[str | None]:
    """Return for each prompt why its label is no answer, None where it is. Equal labels and fields are scored once."""
    reasons, tried, rest = list[str | None](), dict[int, Reward | None](), iter(prompts)
    while part := [(hash((prompt.label, str(prompt.metadata))), prompt) for prompt in islice(rest, _AT_ONCE)]:
        new = {key: prompt for key, prompt in part if key not in tried}
        rewards = await asyncio.gather(*(_reward_of_label(prompt, score, reward) for prompt in new.values()))
        tried |= zip(new, rewards, strict=True)
        for key in [key for key, one in zip(new, rewards, strict=True) if one is not None and was_lost(one)]:
            # Alone: a moment in which the machine is slow is no fault of a label.
            tried[key] = await _reward_of_label(new[key], score, reward)
            _check_answered(new[key], tried[key])
        reasons += [_reason(prompt, tried[key]) for key, prompt in part]
    return reasons


async def _reward_of_label(prompt: Prompt, score: Score, reward: RewardSettings) -> Reward | None:
    try:
        response = right_response(prompt, reward.function, reward.args)
    except ValueError as error:
        return Reward(RewardOutcome.ERROR, message=str(error))
    return None if response is None else await score(Sample.written(prompt, text=response))


def _check_answered(prompt: Prompt, reward: Reward | None) -> None:
    if reward is not None and was_lost(reward):
        raise UserError(
            f"{prompt.id}: the label {prompt.label!r:.80} has no reward in two calls, the second alone ({reward.message}), so that nobody "
            "knows if it is right; raise reward.timeout_s, end what keeps the machine busy, or set reward.check_labels=false"
        )


def _reason(prompt: Prompt, reward: Reward | None) -> str | None:
    # Another part of a mixture may take more than the answer gives.
    if reward is None or (reward.value is not None and max(reward.value, *reward.components.values(), 0.0) > 0):
        return None
    got = reward.message.strip().partition("\n")[0] or f"a response with this answer has the reward {reward.value}"
    return f"{prompt.id}: the label {prompt.label!r:.80} cannot be scored ({got})"


def right_response(prompt: Prompt, function: str | None, args: Mapping[str, Any]) -> str | None:
    """Return the label as a response, None where reward `function` has no such response, or the prompt no label.

    Raises ValueError for a row without a function of `by_row`.
    """
    path = BUILT_IN_REWARDS.get(function or "", function)
    if path == BUILT_IN_REWARDS["by_row"]:
        functions = {value: one if isinstance(one, str) else Part(**one) for value, one in args["functions"].items()}
        part = chosen_part(prompt.metadata, args["key"], functions)
        return right_response(prompt, part.function, part.args)
    if path == BUILT_IN_REWARDS["mixture"]:
        parts = [Part(function=name) if isinstance(one, int | float) else Part(**one) for name, one in args["parts"].items()]
        paths = [BUILT_IN_REWARDS.get(part.function, part.function) for part in parts]
        stating = next((part for part, each in zip(parts, paths, strict=True) if each in _STATING), None)
        return None if stating is None or not _QUICK.issuperset(paths) else right_response(prompt, stating.function, stating.args)
    # A pattern that finds answers cannot be turned round.
    if path not in _STATING or args.get("extract") is not None or prompt.label is None:
        return None
    is_bare = path == BUILT_IN_REWARDS["math"] and "\\boxed" not in prompt.label and "$" not in prompt.label
    return f"\\boxed{{{prompt.label}}}" if is_bare else prompt.label
