"""What runs inside a reward worker process: load the user's function once, call it, and report every outcome as a value.

Kept light: a worker imports the user's module and nothing of torch, SGLang or Ray. Calls run in the worker's main thread, so
a reward function may use signals.
"""

import asyncio
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.rewards.loading import check_arguments, load_function
from megatron_rl.types import Reward, RewardOutcome

SETTING = "reward.function"
ARGUMENTS = ("prompt", "response", "label", "metadata")
REWARD_KEY = "reward"
"""The item of a returned dict that is the reward; the others are recorded as its components."""


@functools.cache
def load_score(path: str) -> Callable[..., Any]:
    """The reward function at `path`. Raises UserError when it cannot be imported or called with ARGUMENTS."""
    function = load_function(path, setting=SETTING)
    check_arguments(function, path=path, setting=SETTING, positional=0, names=ARGUMENTS)
    return function


def check_function(path: str) -> str | None:
    """What is wrong with the function at `path`, None when it can be called."""
    try:
        load_score(path)
    except UserError as error:
        return str(error)
    return None


def call(path: str, *, prompt: str, response: str, label: str | None, metadata: Mapping[str, Any]) -> Reward:
    """Score one response; whatever the user's function does becomes an outcome."""
    try:
        result = load_score(path)(prompt=prompt, response=response, label=label, metadata=metadata)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    except Exception:  # the boundary where a user's error becomes an outcome
        return Reward(outcome=RewardOutcome.ERROR, message=traceback.format_exc())
    try:
        value, components = read_result(result)
    except (TypeError, ValueError) as error:
        return Reward(outcome=RewardOutcome.ERROR, message=str(error))
    return Reward(outcome=RewardOutcome.SCORED, value=value, components=components)


async def _wait(result: Any) -> Any:
    return await result


def read_result(result: object) -> tuple[float, dict[str, float]]:
    """Value and components of what a reward function returned: a finite number, or a dict of them with the key `reward`.

    Raises TypeError or ValueError that says what was returned and what is needed.
    """
    if not isinstance(result, Mapping):
        return _number(result, "the reward function returned"), {}
    if REWARD_KEY not in result:
        raise ValueError(f"the reward function returned a dict with the keys {sorted(map(str, result))}, needs the key {REWARD_KEY!r}")
    numbers_by_name = {str(name): _number(value, f"the reward function returned for {name!r}") for name, value in result.items()}
    return numbers_by_name.pop(REWARD_KEY), numbers_by_name


def _number(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} {value!r} of type {type(value).__name__}, needs a number")
    if not math.isfinite(value):
        raise ValueError(f"{what} {value!r}, needs a finite number")
    return float(value)
