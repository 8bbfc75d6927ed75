"""Responses that state a prompt's own label: where a built-in reward gives one no 1, the label is an error of the data."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.plugins.kinds import BUILT_IN_REWARDS
from megatron_rl.rewards.mixture import Part, chosen_part
from megatron_rl.types import Prompt

_STATING = frozenset(BUILT_IN_REWARDS[name] for name in ("math", "exact", "choice", "reasoning_gym"))
"""Rewards whose label is a right answer as it is."""


def right_response(prompt: Prompt, function: str | None, args: Mapping[str, Any]) -> str | None:
    """Return the label as a response, None where reward `function` has no such response, or the prompt no label.

    Raises ValueError for a row without a function of `by_row`.
    """
    path = BUILT_IN_REWARDS.get(function or "", function)
    if path == BUILT_IN_REWARDS["by_row"]:
        functions = {value: one if isinstance(one, str) else Part(**one) for value, one in args["functions"].items()}
        part = chosen_part(prompt.metadata, args["key"], functions)
        return right_response(prompt, part.function, part.args)
    # A pattern that finds answers cannot be turned round.
    if path not in _STATING or args.get("extract") is not None or prompt.label is None:
        return None
    is_bare = path == BUILT_IN_REWARDS["math"] and "\\boxed" not in prompt.label and "$" not in prompt.label
    return f"\\boxed{{{prompt.label}}}" if is_bare else prompt.label
