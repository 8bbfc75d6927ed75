"""The reward of the arithmetic task, and an example of what a reward function looks like."""

from collections.abc import Mapping
from typing import Any


def score(*, prompt: str, response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when the response is the label, digit for digit, else 0."""
    return float(response == label)
