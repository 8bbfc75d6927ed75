"""A reward function that passes the probe and then fails."""

from megatron_rl.types import Sample


def score(*, sample: Sample) -> float:
    """Fail for every response that a model wrote."""
    if sample.response_text:
        raise RuntimeError("this grader is broken")
    return 0.0
