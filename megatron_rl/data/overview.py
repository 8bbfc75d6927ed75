"""The prompts of a run in words: numbers, lengths in tokens, and rendered prompts."""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.data.source import RunPrompts
from megatron_rl.errors import counted
from megatron_rl.types import Ints, Prompt

_BARS, _BAR_LETTERS, _SHOWN = 10, 40, 400


def overview(prompts: RunPrompts) -> dict[str, str]:
    """Return numbers, lengths and the first prompt of the rows to train on and of the held-out ones."""
    return {name: f"{line}; the first is {firsts[0].text!r:.{_SHOWN}}" for name, line, _, firsts in _described(prompts)}


def detailed_overview(prompts: RunPrompts, *, num_prompts: int = 3) -> Iterator[str]:
    """Yield notes, then numbers, a histogram of lengths, and `num_prompts` prompts with their tokens."""
    yield from (f"note: {note}" for note in prompts.notes)
    yield from (f"left out: {reason}" for reason in prompts.source.bad.reasons)
    for name, line, lengths, firsts in _described(prompts, num_prompts=num_prompts):
        yield from ("", f"{name}: {line}", *_histogram(lengths))
        for prompt in firsts:
            yield from (f"  prompt {prompt.id}, label {prompt.label!r}:", f"    {prompt.text!r}", f"    {prompt.token_ids.tolist()}")


def _described(prompts: RunPrompts, *, num_prompts: int = 1) -> Iterator[tuple[str, str, Ints, Sequence[Prompt]]]:
    source = prompts.source
    if source.name:
        lengths = np.minimum(source.lengths, source.max_prompt_tokens)
        yield "data.train", _line(len(source.known), lengths), lengths, source.first(num_prompts)
    for name, held_out in prompts.held_out.items():
        lengths = np.array([len(prompt.token_ids) for prompt in held_out])
        yield f"eval.sets.{name}", _line(len(held_out), lengths), lengths, held_out[:num_prompts]


def _line(num_rows: int, lengths: Ints) -> str:
    if not lengths.size:
        return f"{counted(num_rows, 'prompt')}, too many to tokenize at the start"
    median, most, nearly_all = np.percentile(lengths, [50, 90, 99], method="higher")
    words = f"{counted(num_rows, 'prompt')} of {lengths.min()} to {lengths.max()} tokens"
    return f"{words}: median {median}, 90 % at most {most}, 99 % at most {nearly_all}"


def _histogram(lengths: Ints) -> Iterator[str]:
    if lengths.size:
        edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, _BARS + 1).astype(int))
        counts, _ = np.histogram(lengths, edges)
        for first, end, count in zip(edges, edges[1:], counts, strict=False):
            yield f"  {first:>6} to {end - 1:>6} tokens {'#' * round(_BAR_LETTERS * count / counts.max()):<{_BAR_LETTERS}} {count}"
