"""Rewards made of others: a weighted sum, or for each row the one that a field of it names."""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import Field

from megatron_rl.config.section import Section
from megatron_rl.plugins.kinds import BUILT_IN_REWARDS
from megatron_rl.rewards.worker import ANSWER_KEY, REWARD_KEY, load_score, read_result
from megatron_rl.types import Sample


class Part(Section):
    """One reward function among several."""

    function: str = Field(description="package.module:function, or the name of a built-in one.")
    args: dict[str, Any] = Field(default_factory=dict, description="Own arguments of the function.")
    weight: float = Field(1.0, description="Factor in a mixture.")

    def begin(self, sample: Sample) -> Any:
        """Return the result of a call, or an awaitable of it."""
        return load_score(self.function, json.dumps(self.args))(sample=sample)


def mixture(*, sample: Sample, parts: dict[str, Part | float]) -> Any:
    """Return the sum of the rewards of `parts` by their weights, each recorded as a component of its name.

    A number alone is the weight of the built-in function of the name. Components of a part come as
    NAME/COMPONENT, the answer from the first part with one. A part named `accuracy` is the verdict
    that evaluations count. Where a part fails there is no reward.
    """
    named = _named(parts)
    if not named:
        raise ValueError("reward.args.parts is empty, needs at least one part")
    return _after([part.begin(sample) for part in named.values()], lambda results: _sum(named, results))


def by_row(*, sample: Sample, key: str, functions: dict[str, Part | str]) -> Any:
    """Return the result of the function that `functions` has for the row's field `key`, such as data_source.

    A text alone is a function. A path a.b is nested. Raises ValueError for a row with another value.
    """
    part = chosen_part(sample.prompt.metadata, key, functions)
    return part.begin(sample)


def chosen_part(metadata: Mapping[str, Any], key: str, functions: Mapping[str, Part | str]) -> Part:
    """Return the function of a row with `metadata`. Raises ValueError without one."""
    value: Any = metadata
    for name in [key] if key in metadata else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    part = functions.get(str(value))
    if part is None:
        raise ValueError(f"the row's {key} is {value!r:.80}, needs one of {', '.join(functions)}; add it to reward.args.functions")
    return Part(function=part) if isinstance(part, str) else part


def parts_of(function: Callable[..., Any], args: Mapping[str, Any]) -> list[Part]:
    """Return the parts of `mixture` or `by_row` with these arguments, none of another function."""
    if function is mixture:
        return list(_named(args["parts"]).values())
    return [Part(function=one) if isinstance(one, str) else one for one in args["functions"].values()] if function is by_row else []


def part_weights(function: str | None, args: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and weight of each part of a mixture, `by_row`'s too, from the settings' function and arguments."""
    path = BUILT_IN_REWARDS.get(function or "", function)
    if path == BUILT_IN_REWARDS["mixture"]:
        for name, one in args.get("parts", {}).items():
            yield name, one.get("weight", 1.0) if isinstance(one, Mapping) else one
    elif path == BUILT_IN_REWARDS["by_row"]:
        for one in args.get("functions", {}).values():
            yield from part_weights(one["function"], one.get("args", {})) if isinstance(one, Mapping) else ()


def _named(parts: Mapping[str, Part | float]) -> dict[str, Part]:
    return {name: Part(function=name, weight=one) if isinstance(one, int | float) else one for name, one in parts.items()}


def _after(results: Iterable[Any], total: Callable[[list[Any]], Any]) -> Any:
    """Return the `total` of results; an awaitable where one of them is."""
    made = list(results)

    async def awaited() -> Any:
        pending = [each for each in made if inspect.isawaitable(each)]
        done = dict(zip(map(id, pending), await asyncio.gather(*pending), strict=True))
        return total([done.get(id(each), each) for each in made])

    return awaited() if any(map(inspect.isawaitable, made)) else total(made)


def _sum(parts: Mapping[str, Part], results: Iterable[Any]) -> dict[str, Any]:
    values, answers, reward = dict[str, Any](), list[str](), 0.0
    for (name, part), result in zip(parts.items(), results, strict=True):
        value, components, answer = read_result(result, name=f"reward.function {part.function}")
        reward += part.weight * value
        values |= {name: value, **{f"{name}/{key}": each for key, each in components.items()}}
        answers += [] if answer is None else [answer]
    if REWARD_KEY in values or ANSWER_KEY in values:
        raise ValueError(f"reward.args.parts has a part named {REWARD_KEY} or {ANSWER_KEY}, which name the result; choose another")
    return {REWARD_KEY: reward, **values, **({ANSWER_KEY: answers[0]} if answers else {})}
