"""The reward of the arithmetic task, and an example of what a reward function looks like."""

from megatron_rl.types import Sample


def score(*, sample: Sample) -> float:
    """1 when the response is the label, digit for digit, else 0."""
    return float(sample.response_text == sample.prompt.label)
