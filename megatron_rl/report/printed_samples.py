"""Samples of a step in a terminal."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.observe.groups_of_interest import ends
from megatron_rl.observe.visible_text import sample_lines
from megatron_rl.report.run_samples import StoredGroup, open_samples


def printed_samples(directory: Path, *, step: int | None, worst: int, best: int, group: str | None) -> Iterator[str]:
    """Yield the lines of the `worst` and the `best` trajectories of `step`, None: the newest, or all samples of the `group`.

    Raises UserError for a step or a group without samples.
    """
    with open_samples(directory) as run:
        if group is not None:
            found = run.group(group)
            for sample in found.samples:
                yield from _lines(found, sample)
            yield from (f"failed: {words}" for words in found.failures)
            return
        steps = run.steps()
        step = step if step is not None else steps[-1] if steps else 0
        if step not in steps:
            kept = f"steps {steps[0]} to {steps[-1]}" if steps else "no step yet"
            raise UserError(f"--step is {step}, but the buffer of {directory} has samples of {kept}; name one of them")
        last = ends(run.answers([step]))
        ranked = sorted((end for end in last if end.reward is not None), key=lambda end: end.reward or 0.0)
        yield f"step {step}: {len(last)} trajectories, {len(last) - len(ranked)} of them without a reward"
        for name, answers in (("worst", ranked[:worst]), ("best", ranked[::-1][:best])):
            for number, answer in enumerate(answers, start=1):
                found = run.group(answer.group)
                yield f"-- {name} {number} of {len(answers)}"
                yield from _lines(found, next(sample for sample in found.samples if sample["sample_index"] == answer.sample))


def _lines(group: StoredGroup, sample: sqlite3.Row) -> Iterator[str]:
    """Yield a sample with its prompt and reward."""
    reward = f"reward {sample['reward']:.4g}" if sample["reward"] is not None else f"no reward ({sample['outcome']})"
    ended = f"{sample['num_tokens']} tokens, ended by {sample['stop_reason']}"
    yield f"{reward}, {ended}, group {group.row['id']!r}, sample {sample['sample_index']}"
    yield from sample_lines(
        prompt=sample["own_prompt_text"] or group.row["prompt_text"],
        label=group.row["label"],
        answer=sample["response_text"],
        message=sample["reward_message"],
    )
