"""Samples of a step in a terminal."""

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import UserError, counted
from megatron_rl.observe.visible_text import sample_lines
from megatron_rl.report.run_samples import StoredGroup, StoredSample, ends, open_samples


def printed_samples(directory: Path, *, step: int | None, worst: int, best: int, group: str | None) -> Iterator[str]:
    """Yield the lines of the `worst` and the `best` trajectories of `step`, None: the newest, or all of the `group`.

    Raises UserError for a step or a group without samples.
    """
    with open_samples(directory) as run:
        if group is not None:
            found = run.group(group)
            yield f"group {found.id!r} of step {found.step}: {counted(len(found.samples), 'sample')}, label {found.label!r}"
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
        chosen = [("worst", ranked[:worst]), ("best", ranked[::-1][:best])]
        for name, answers in chosen:
            for number, answer in enumerate(answers, start=1):
                stored = run.group(answer.group)
                (sample,) = (sample for sample in stored.samples if sample.index == answer.index)
                yield f"-- {name} {number} of {len(answers)}"
                yield from _lines(stored, sample)


def _lines(group: StoredGroup, sample: StoredSample) -> Iterator[str]:
    """Yield a sample with its prompt and reward."""
    reward = f"{sample.reward:.4g}" if sample.reward is not None else f"none ({sample.outcome})"
    title = f"reward {reward}, {counted(sample.num_tokens, 'token')}, ended by {sample.stop}, group {group.id}, sample {sample.index}"
    parts = {"prompt": sample.own_prompt or group.prompt, "label": group.label or "", "answer": sample.text, "message": sample.message}
    yield from sample_lines(title, {name: text for name, text in parts.items() if text or name == "answer"})
