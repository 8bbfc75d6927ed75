"""Rewards for a run with every kind of them: a program around a response, and one of whole groups."""

from dataclasses import replace

from megatron_rl.rewards import code
from megatron_rl.types import Sample, StopReason


def program(*, sample: Sample) -> dict[str, float | str]:
    """Score a program whose function returns the response's length, which a random model never writes itself."""
    text = f"```python\ndef f():\n    return len({sample.response_text!r})\n```"
    return code.score(sample=replace(sample, response_text=text, stop_reason=StopReason.STOP))


def longest(*, samples: list[Sample]) -> list[dict[str, float]]:
    """Give 1.0 to the longest responses of a group."""
    most = max(len(sample.response_ids) for sample in samples)
    return [{"reward": float(len(sample.response_ids) == most), "group": len(samples)} for sample in samples]
