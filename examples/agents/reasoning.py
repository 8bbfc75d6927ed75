"""Tasks of reasoning-gym: its generators make the rows, its verifiers score the answers.

A dataset whose verifier does not give 1 to its own answers teaches nothing, and is refused when rows are made.
"""

import json
from collections.abc import Iterator
from typing import Any

import reasoning_gym

from megatron_rl.rewards.reasoning_gym import verifier

DATASETS: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "spiral_matrix": {"min_n": 2, "max_n": 2},
}
"""Datasets of the example by name, with their settings."""


def rows_of(name: str, *, seed: int, size: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield `size` rows of a dataset. Raises ValueError for an answer of its own that it does not score with 1."""
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
    for number, made in enumerate(dataset):
        entry = json.loads(json.dumps(made, default=str))
        got = verifier(name)(entry["answer"], entry)
        if got != 1:
            raise ValueError(
                f"reasoning-gym's {name} gives its own answer {entry['answer']!r:.60} to question {number} a score of {got:g}, needs 1; "
                "take another dataset"
            )
        yield {"prompt": [{"role": "user", "content": entry["question"]}], "label": entry["answer"], "dataset": name, "entry": entry}


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield questions of all DATASETS in turns."""
    made = [rows_of(name, seed=seed, size=2**16, **settings) for name, settings in DATASETS.items()]
    for together in zip(*made, strict=True):
        yield from together
