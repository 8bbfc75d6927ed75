"""The inside of a reward worker process: load the user's function once, call it, report outcomes.

Kept light: a worker imports the user's module and nothing of torch, SGLang or Ray. Calls run in the
worker's main thread, so a reward function may use signals.
"""

import asyncio
import functools
import inspect
import json
import math
import numbers
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.plugins.loader import load
from megatron_rl.types import Reward, RewardOutcome, Sample

REWARD_KEY = "reward"  # the item of a returned dict that is the reward; the others are recorded as its components
ANSWER_KEY = "answer"  # but for this one, the answer extracted from the response


@functools.cache
def load_score(path: str, args: str) -> Callable[..., Any]:
    """Load the reward function at `path` with its arguments, a JSON text. Raises UserError."""
    return load(path, kind="reward", args=json.loads(args))


def check_function(path: str, args: str) -> str | None:
    """Return the fault of the function at `path` or of its arguments, None when callable."""
    try:
        load_score(path, args)
    except UserError as error:
        return str(error)
    return None


def call_all(path: str, args: str, *, samples: Sequence[Sample]) -> tuple[list[Reward], float]:
    """Score samples one after the other, and measure the seconds of the slowest call."""
    rewards, slowest_s = [], 0.0
    for sample in samples:
        start = time.monotonic()
        rewards.append(_call(path, args, sample))
        slowest_s = max(slowest_s, time.monotonic() - start)
    return rewards, slowest_s


def _call(path: str, args: str, sample: Sample) -> Reward:
    """Score one sample; whatever the user's function does becomes an outcome."""
    try:
        result = load_score(path, args)(sample=sample)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    except BaseException as error:  # the boundary where a user's error, exit or interrupt becomes an outcome
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        headline = f"{type(error).__name__}: {line}".removesuffix(": ")
        return Reward(outcome=RewardOutcome.ERROR, message=f"{headline}\n{traceback.format_exc()}")
    try:
        value, components, answer = read_result(result, name=f"reward.function {path}")
    except (TypeError, ValueError, OverflowError) as error:
        return Reward(outcome=RewardOutcome.ERROR, message=str(error))
    return Reward(outcome=RewardOutcome.SCORED, value=value, components=components, answer=answer)


async def _wait(result: Any) -> Any:
    return await result


def read_result(result: object, *, name: str) -> tuple[float, dict[str, float], str | None]:
    """Return value, components and extracted answer of the result of reward function `name`.

    A result is a finite number, or a mapping of finite numbers with the key `reward`, and maybe
    with a text or None as `answer`. Raises TypeError or ValueError otherwise.
    """
    if not isinstance(result, Mapping):
        return _number(result, f"{name} returned"), {}, None
    if REWARD_KEY not in result:
        raise ValueError(f"{name} returned a mapping with the keys {sorted(map(str, result))}, needs the key {REWARD_KEY!r}")
    answer = result.get(ANSWER_KEY, "") or ""
    if not isinstance(answer, str):
        raise TypeError(
            f"{name} returned for {ANSWER_KEY!r} {answer!r} of type {type(answer).__name__}, needs a text, or None for no answer"
        )
    values = {str(key): _number(value, f"{name} returned for {key!r}") for key, value in result.items() if key != ANSWER_KEY}
    return values.pop(REWARD_KEY), values, answer if ANSWER_KEY in result else None


def _number(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} {value!r} of type {type(value).__name__}, needs a number")
    try:
        finite = math.isfinite(value)
    except OverflowError as error:
        raise ValueError(f"{what} a number that no float holds ({error}), needs a finite number") from error
    if not finite:
        raise ValueError(f"{what} {value!r}, needs a finite number")
    return float(value)
