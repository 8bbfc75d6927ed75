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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from megatron_rl.errors import UserError
from megatron_rl.plugins.loader import load
from megatron_rl.types import Reward, RewardOutcome, Sample

Form = Literal["sample", "async", "group"]
"""The call of a reward function: for one sample, for many at the same time, or for a whole group."""
MOST_MESSAGE = 10_000  # characters of a failure that are kept, with each sample in the buffer
REWARD_KEY = "reward"  # the item of a returned dict that is the reward; the others are recorded as its components
ANSWER_KEY = "answer"  # but for this one, the answer extracted from the response


@functools.cache
def load_score(path: str, args: str) -> Callable[..., Any]:
    """Load the reward function at `path` with its arguments, a JSON text. Raises UserError."""
    return load(path, kind="reward", args=json.loads(args))


def form_of(path: str, args: str) -> Form | UserError:
    """Return the form of the function at `path`, or its fault, or that of its arguments."""
    from megatron_rl.rewards.mixture import parts_of

    try:
        function = load_score(path, args)
    except UserError as error:
        return error
    inner, own = (function.func, function.keywords) if isinstance(function, functools.partial) else (function, {})
    if "samples" in inspect.signature(inner).parameters:
        return "group"
    forms = [form_of(part.function, json.dumps(part.args)) for part in parts_of(inner, own)]
    fault = next((form for form in forms if isinstance(form, UserError)), None)
    if fault is not None or "group" in forms:
        return fault or UserError(f"reward.function {path} has a part that takes samples, needs parts that take one; call it from your own")
    return "async" if inspect.iscoroutinefunction(inner) or "async" in forms else "sample"


def call_all(path: str, args: str, *, samples: Sequence[Sample], form: Form, call_timeout_s: float) -> tuple[list[Reward], float]:
    """Score samples one after the other, async calls together; return the seconds of the slowest call, too.

    An async call ends with a timeout after `call_timeout_s`, the others of a worker with the worker.
    """
    if form == "async":
        return asyncio.run(_gather(path, args, samples, call_timeout_s)), 0.0
    rewards, slowest_s = list[Reward](), 0.0
    for part in [list(samples)] if form == "group" else [[sample] for sample in samples]:
        start = time.monotonic()
        try:
            score = load_score(path, args)
            results = score(samples=part) if form == "group" else [score(sample=part[0])]
            if not isinstance(results, Sequence) or len(results) != len(part):
                got = f"{len(results)} results" if isinstance(results, Sequence) else f"a {type(results).__name__}"
                raise TypeError(f"reward.function {path} returned {got} for a group of {len(part)} samples, needs a result for each")
            rewards += [_outcome(path, asyncio.run(_awaited(each)) if inspect.isawaitable(each) else each) for each in results]
        except BaseException as error:  # the boundary where a user's error, exit or interrupt becomes an outcome
            rewards += [_failed(error)] * len(part)
        slowest_s = max(slowest_s, time.monotonic() - start)
    return rewards, slowest_s


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def _gather(path: str, args: str, samples: Sequence[Sample], timeout_s: float) -> list[Reward]:
    async def call(sample: Sample) -> Reward:
        timeout = asyncio.timeout(timeout_s)
        try:
            async with timeout:
                result = load_score(path, args)(sample=sample)
                return _outcome(path, await result if inspect.isawaitable(result) else result)
        except BaseException as error:  # as above
            if timeout.expired():
                return Reward(RewardOutcome.TIMEOUT, message=late(timeout_s))
            return _failed(error)

    return await asyncio.gather(*map(call, samples))


def late(timeout_s: float) -> str:
    """Return the message of a call without a result in time."""
    return f"no reward after {timeout_s:g} s (reward.timeout_s)"


def _failed(error: BaseException) -> Reward:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    headline = f"{type(error).__name__}: {line}".removesuffix(": ")
    return Reward(RewardOutcome.ERROR, message=f"{headline}\n{''.join(traceback.format_exception(error))}"[:MOST_MESSAGE])


def _outcome(path: str, result: object) -> Reward:
    try:
        value, components, answer = read_result(result, name=f"reward.function {path}")
    except (TypeError, ValueError, OverflowError) as error:
        return Reward(outcome=RewardOutcome.ERROR, message=str(error)[:MOST_MESSAGE])
    return Reward(outcome=RewardOutcome.SCORED, value=value, components=components, answer=answer)


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
