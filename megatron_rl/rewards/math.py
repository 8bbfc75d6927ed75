"""Reward for mathematics: 1 when the response's answer equals the label, 0 when not, by math-verify."""

import re
from fractions import Fraction

from math_verify import parse, verify

from megatron_rl.types import Sample


def score(*, sample: Sample) -> dict[str, float | str]:
    """Return reward 1.0 when the response's last answer (LaTeX or plain) equals the label, else 0.0.

    The item `answer` is that answer as text, equal for 0.5 and 1/2.

    math-verify's own timeouts are off: they use signal.alarm, and the worker process is stopped from
    outside. Raises ValueError for a label without an expression.
    """
    label = sample.prompt.label
    if label is None:
        raise ValueError("this prompt has no label, needs the right answer; set data.label_key to the field that holds it")
    gold = parse(label if "$" in label or "\\boxed" in label else f"${label}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematical expression, needs an answer such as 12, 3/4 or \\frac{{3}}{{4}}")
    answer = parse(sample.response_text, parsing_timeout=None)
    text = str(answer[0]) if answer else ""
    # So that 0.5 and 1/2 are one answer of a vote.
    text = str(Fraction(text)) if re.fullmatch(r"-?\d+\.\d+", text) else text
    return {"reward": float(bool(answer) and verify(gold, answer, timeout_seconds=None)), "answer": text}
