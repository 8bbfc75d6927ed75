"""Reference answers that a built-in reward function does not score: errors of the data, not of the policy."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice

from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.config.settings import RewardSettings
from megatron_rl.data.source import RunPrompts
from megatron_rl.errors import UserError
from megatron_rl.types import Prompt, Reward, Sample

RIGHT_RESPONSES: Mapping[str, Callable[[Prompt], str]] = {
    "megatron_rl.rewards.math:score": lambda prompt: f"\\boxed{{{prompt.label}}}",
}
"""For each built-in function that has them: the response that answers a prompt with its label, and has a reward above 0."""

Score = Callable[[Sample], Awaitable[Reward]]
_AT_ONCE = 512


async def check_gold(prompts: RunPrompts, reward: RewardSettings, *, score: Score, sets: Mapping[str, EvalSet]) -> None:
    """Score the labels of the rows to train on, and of held-out ones, as responses to their prompts.

    Those of `sets` with a function of their own are not tried. A row whose label
    is not scored is left out by `data.max_bad_rows`. Raises UserError beyond, and for held-out rows.
    """
    right = RIGHT_RESPONSES.get(reward.function or "")
    if right is None or not reward.check_labels:
        return
    if prompts.trains:
        prompts.source.leave_out(await _unscored(prompts.source.labelled(), score, right))
    for name, held_out in prompts.held_out.items():
        found = [] if sets[name].reward else await _unscored((one for one in held_out if one.label is not None), score, right)
        if reason := next((reason for reason in found if reason is not None), None):
            raise UserError(f"eval.sets.{name}: {reason}")


async def _unscored(prompts: Iterable[Prompt], score: Score, right: Callable[[Prompt], str]) -> list[str | None]:
    """Return for each prompt why its label is no answer, None where it is. Equal labels and fields are scored once."""
    reasons, tried, rest = list[str | None](), dict[int, Reward](), iter(prompts)
    while part := [(hash((prompt.label, str(prompt.metadata))), prompt) for prompt in islice(rest, _AT_ONCE)]:
        new = {key: prompt for key, prompt in part if key not in tried}
        rewards = await asyncio.gather(*(score(Sample.written(prompt, text=right(prompt))) for prompt in new.values()))
        tried |= zip(new, rewards, strict=True)
        reasons += [_reason(prompt, tried[key]) for key, prompt in part]
    return reasons


def _reason(prompt: Prompt, reward: Reward) -> str | None:
    if reward.value is not None and reward.value > 0:
        return None
    got = reward.message.strip().partition("\n")[0] or f"a response with this answer has the reward {reward.value}"
    fix = "correct it, raise data.max_bad_rows, or set reward.check_labels=false"
    return f"{prompt.id}: the label {prompt.label!r:.80} cannot be scored ({got}); {fix}"
