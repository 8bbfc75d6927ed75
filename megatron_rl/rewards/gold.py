"""Labels that built-in rewards do not score with 1: errors of the data, found before a run trains on them."""

import asyncio
from collections.abc import Sequence

from megatron_rl.config.settings import RewardSettings
from megatron_rl.plugins.kinds import BUILT_IN_REWARDS
from megatron_rl.rewards.mixture import Part, chosen_part
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.types import Prompt, Sample

_STATING = frozenset(BUILT_IN_REWARDS[name] for name in ("math", "exact", "choice", "reasoning_gym"))
"""Rewards whose label is a right answer as it is."""


def gold_sample(prompt: Prompt, reward: RewardSettings) -> Sample | None:
    """Return a response that is the label itself, None where no built-in verifier reads the label so.

    Raises ValueError for a row without a function of `by_row`.
    """
    function, args = BUILT_IN_REWARDS.get(reward.function or "", reward.function), reward.args
    while function == BUILT_IN_REWARDS["by_row"]:
        functions = {value: one if isinstance(one, str) else Part(**one) for value, one in args["functions"].items()}
        part = chosen_part(prompt.metadata, args["key"], functions)
        function, args = BUILT_IN_REWARDS.get(part.function, part.function), part.args
    # A pattern that finds answers cannot be turned round.
    if function not in _STATING or args.get("extract") is not None:
        return None
    text = prompt.label or ""
    if function == BUILT_IN_REWARDS["math"] and "\\boxed" not in text and "$" not in text:
        text = f"\\boxed{{{text}}}"
    return Sample.written(prompt, text=text)


async def wrong_golds(prompts: Sequence[Prompt], runner: RewardRunner, reward: RewardSettings) -> list[tuple[Prompt, str]]:
    """Return the prompts whose label gets no 1 from `reward`, which `runner` calls, with the reason, in their order."""
    found: dict[int, str] = {}
    pending: dict[int, Sample] = {}
    for number, prompt in enumerate(prompts):
        try:
            sample = gold_sample(prompt, reward)
        except ValueError as error:
            found[number] = str(error)
            continue
        if sample is not None:
            pending[number] = sample
    rewards = await asyncio.gather(*map(runner.score, pending.values()))
    for (number, _), given in zip(pending.items(), rewards, strict=True):
        if given.value != 1.0:
            got = f"a reward of {given.value:g}" if given.value is not None else given.message.partition("\n")[0]
            found[number] = f"the label {prompts[number].label!r:.80} as the answer gets {got}, needs 1"
    return [(prompts[number], found[number]) for number in sorted(found)]
