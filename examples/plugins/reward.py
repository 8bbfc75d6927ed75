"""A reward with parts: right or wrong, minus a fee for each token above a budget; 0 for what was cut off."""

from megatron_rl.types import Sample


def score(*, sample: Sample, budget: int = 512, fee: float = 0.001) -> dict[str, float]:
    """`reward` is trained on, the other parts are recorded as metrics."""
    right = float(sample.response_text.strip() == sample.prompt.label and not sample.truncated)
    length = fee * max(0, len(sample.response_ids) - budget)
    return {"reward": right - length, "right": right, "length_fee": length}
