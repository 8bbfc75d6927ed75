"""Reward for mathematics: 1 when the response's answer equals the label, 0 when not, by math-verify."""

from math_verify import parse, verify

from megatron_rl.types import Sample


def score(*, sample: Sample) -> float:
    """Return 1.0 when the response's last answer (LaTeX or plain) equals the label, else 0.0.

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
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))
