"""Reward by the verifiers of reasoning-gym, an extra; rows have their `dataset`, and the `entry` that it made."""

import functools
import json
from collections.abc import Callable
from typing import Any

from megatron_rl.rewards.text import final_answer
from megatron_rl.types import Sample


@functools.cache
def verifier(name: str) -> Callable[[Any, dict[str, Any]], float]:
    """Return the dataset's own score of an answer to an entry, 0 to 1."""
    import reasoning_gym

    score: Callable[[Any, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(name)
    return score


def score(*, sample: Sample, extract: str | None = None) -> dict[str, float | str]:
    """Score the answer by the verifier of the row's dataset; it is found as by `exact`."""
    metadata = sample.prompt.metadata
    if not {"dataset", "entry"} <= metadata.keys():
        raise ValueError(
            f"the row has {', '.join(metadata) or 'no fields of its own'}, needs dataset and entry; make rows by reasoning-gym"
        )
    answer = final_answer(sample, extract)
    entry = json.loads(json.dumps(metadata["entry"], default=dict))
    return {"reward": float(verifier(metadata["dataset"])(answer, entry)), "answer": answer.strip()}
