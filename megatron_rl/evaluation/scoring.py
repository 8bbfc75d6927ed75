"""`megatron-rl score`: rewards of a file of responses, and where two rewards, or a reward and a column, differ."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.config.derived import reward_workers
from megatron_rl.config.load import parse_yaml
from megatron_rl.config.settings import RewardSettings
from megatron_rl.data.row_files import Row
from megatron_rl.data.row_table import read_rows
from megatron_rl.data.source import messages_of
from megatron_rl.errors import UserError
from megatron_rl.rewards.runner import MAX_CALLS, RewardRunner
from megatron_rl.system.files import write_atomic
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample, StopReason

_SHOWN = 5
_EQUAL = 1e-6
_TEXTS = ("response", "text", "completion")
_GROUPS = ("prompt_id", "group_id", "group")


@dataclass(frozen=True, slots=True)
class Scores:
    """Values of one reward or column for every row, NaN without one; of a reward also seconds of calls and messages of failures."""

    name: str
    values: Sequence[float]
    outcomes: Mapping[str, int]
    seconds: Sequence[float] = ()
    wall_s: float = 1.0
    messages: Mapping[str, int] = field(default_factory=dict)

    def facts(self, origins: Sequence[str]) -> dict[str, Any]:
        """Return the numbers of a line of the table."""
        scored = [value for value in self.values if math.isfinite(value)]
        slowest = sorted(zip(self.seconds, origins[: len(self.seconds)], strict=True), reverse=True)[:_SHOWN]
        return {
            "name": self.name, "outcomes": self.outcomes, "mean": sum(scored) / len(scored) if scored else None,
            "calls_per_second": len(self.seconds) / self.wall_s, "slowest": slowest, "failures": self.messages,
        }  # fmt: skip


def score_file(path: Path, rewards: Sequence[RewardSettings], *, column: str | None, label_key: str | None, out: Path | None) -> None:
    """Print the outcomes and slowest calls of `rewards` for the rows, and where two of them or a `column` differ; JSON goes to `out`.

    Rows have a prompt, a label, a response (or `text`, as kept answers of an evaluation), and maybe
    stop_reason, num_tokens and prompt_id. Raises UserError for rows without.
    """
    rows = read_rows(DataFiles(path=path), settings=DataSettings(train=path, label_key=label_key))
    samples, origins = [_sample(row) for row in rows], [row.origin for row in rows]
    names = [str(reward.function) for reward in rewards]
    # Two of one function, with other arguments, are told apart.
    names = [f"{name} ({names[:place].count(name) + 1})" if names.count(name) > 1 else name for place, name in enumerate(names)]
    found = [asyncio.run(_score(samples, reward, name)) for reward, name in zip(rewards, names, strict=True)]
    if column is not None:
        values = [_number(row, column) for row in rows]
        found.append(Scores(f"column {column}", values, {"scored": sum(map(math.isfinite, values))}))
    facts = {
        "file": str(path),
        "scores": [each.facts(origins) for each in found],
        "differences": [_difference(*pair, origins) for pair in combinations(found, 2)],
    }
    _print(facts, dict(zip(origins, samples, strict=True)))
    if out is not None:
        by_row = {each.name: [value if math.isfinite(value) else None for value in each.values] for each in found}
        write_atomic(out, json.dumps({**facts, "rows": by_row}) + "\n")


def read_reward(words: str) -> RewardSettings:
    """Return the reward that a word of the command line names, or describes in YAML. Raises UserError."""
    values = parse_yaml(words, origin=f"--reward {words}") if words.lstrip().startswith("{") else {"function": words}
    try:
        return RewardSettings.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise UserError(f"--reward {words}: {'.'.join(map(str, found['loc']))}: {found['msg']}") from None


def _sample(row: Row) -> Sample:
    others = {**row.metadata, **(nested if isinstance(nested := row.metadata.get("metadata"), Mapping) else {})}
    text = row.response if row.response is not None else next((others[name] for name in _TEXTS if isinstance(others.get(name), str)), None)
    if text is None:
        raise UserError(f"{row.origin}: no field {' or '.join(map(repr, _TEXTS))} with a text, needs the response to score; add it")
    messages = messages_of(row, system_prompt=None)
    asked = row.prompt if isinstance(row.prompt, str) else "\n".join(str(message.get("content", "")) for message in messages)
    name = next((str(others[key]) for key in _GROUPS if key in others), asked)
    prompt = Prompt(id=name, token_ids=np.zeros(1, np.int64), text=asked, label=row.label, metadata=others, messages=messages)
    sample = Sample.written(prompt, [0] * int(others.get("num_tokens") or 0), text=text)
    return replace(sample, stop_reason=StopReason.LENGTH) if "length" in (others.get("stop_reason"), others.get("stop")) else sample


def _number(row: Row, column: str) -> float:
    value: Any = row.metadata.get(column, math.nan)
    value = math.nan if value is None else value
    if column not in row.metadata or not isinstance(value, int | float):
        raise UserError(
            f"{row.origin}: the column {column!r} is {row.metadata.get(column)!r:.60}, needs a number, or null; name another one"
        )
    return float(value)


async def _score(samples: Sequence[Sample], reward: RewardSettings, name: str) -> Scores:
    workers = reward_workers()
    with RewardRunner(reward, num_workers=workers) as runner:
        runner.probe(samples[0].prompt)
        # No call waits for a worker, so that its seconds are its own, and of async calls those of the slowest one beside it.
        slots, begin_s = asyncio.Semaphore(workers * (MAX_CALLS if runner.form == "async" else 1)), time.monotonic()
        groups: dict[str, list[int]] = {}
        for number, sample in enumerate(samples):
            groups.setdefault(sample.group_id if runner.form == "group" else str(number), []).append(number)
        made: dict[int, tuple[Reward, float]] = {}

        async def call(numbers: Sequence[int]) -> None:
            async with slots:
                start_s = time.monotonic()
                rewards = await asyncio.gather(*(runner.score(samples[number]) for number in numbers))
                made.update({number: (each, time.monotonic() - start_s) for number, each in zip(numbers, rewards, strict=True)})

        await asyncio.gather(*map(call, groups.values()))
        wall_s = time.monotonic() - begin_s
    rewards, seconds = zip(*(made[number] for number in range(len(samples))), strict=True)
    failed = Counter(each.message.partition("\n")[0] for each in rewards if each.value is None)
    values = [math.nan if each.value is None else each.value for each in rewards]
    outcomes = Counter(each.outcome.value for each in rewards)
    return Scores(name, values, outcomes, seconds, wall_s, dict(failed.most_common(_SHOWN)))


def _difference(one: Scores, other: Scores, origins: Sequence[str]) -> dict[str, Any]:
    """Count the rows that both scored, and those that one scores higher than the other."""
    both = [each for each in zip(origins, one.values, other.values, strict=True) if math.isfinite(each[1] + each[2])]
    higher = [(origin, a, b) for origin, a, b in both if a > b + _EQUAL]
    lower = [(origin, a, b) for origin, a, b in both if b > a + _EQUAL]
    return {
        "of": [one.name, other.name], "both_scored": len(both), "first_higher": len(higher), "second_higher": len(lower),
        "rows": [*higher[:_SHOWN], *lower[:_SHOWN]],
    }  # fmt: skip


def _print(facts: Mapping[str, Any], samples: Mapping[str, Sample]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    outcomes = [outcome.value for outcome in RewardOutcome]
    table = Table("reward", *outcomes, "mean", "calls/s")
    for each in facts["scores"]:
        mean = "" if each["mean"] is None else f"{each['mean']:.4g}"
        pace = f"{each['calls_per_second']:.4g}" if each["calls_per_second"] else ""
        table.add_row(each["name"], *(str(each["outcomes"].get(outcome, 0)) for outcome in outcomes), mean, pace)
    console.print(table)
    for each in facts["scores"]:
        if each["slowest"]:
            slowest = ", ".join(f"{seconds:.3f} s ({origin})" for seconds, origin in each["slowest"])
            console.print(f"{each['name']}: slowest calls {slowest}")
        for message, count in each["failures"].items():
            console.print(f"{each['name']}: {count} of {message}")
    for each in facts["differences"]:
        (first, second), higher, lower = each["of"], each["first_higher"], each["second_higher"]
        console.print(f"{first} above {second} in {higher} and below in {lower} of {each['both_scored']} rows that both scored")
        for origin, a, b in each["rows"]:
            label, text = samples[origin].prompt.label, samples[origin].response_text
            console.print(f"  {origin}: {a:g} and {b:g}, label {label!r:.60}, ends {text[-80:]!r}")
