"""A reward function that passes the probe and then fails."""

from collections.abc import Mapping
from typing import Any


def score(*, prompt: str, response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """Fail for every response that a model wrote."""
    if response:
        raise RuntimeError("this grader is broken")
    return 0.0
