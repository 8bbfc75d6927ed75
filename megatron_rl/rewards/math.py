"""Reward for mathematics: 1 when the response's answer equals the label, 0 when not, by math-verify."""

import re
from fractions import Fraction

from math_verify import parse, verify

from megatron_rl.rewards.text import final_text
from megatron_rl.types import Sample

_BOX = "\\boxed"


def score(*, sample: Sample) -> dict[str, float | str]:
    """Return reward 1.0 when the response's last answer (LaTeX or plain) equals the label, else 0.0.

    With boxes the last one counts, or all together where the label is a set. A response that the
    token budget cut has no answer. The item `answer` is the answer as text, equal for 0.5 and 1/2.

    math-verify's own timeouts are off: they use signal.alarm, and the worker process is stopped from
    outside. Raises ValueError for a label without an expression.
    """
    label = sample.prompt.label
    if label is None:
        raise ValueError("this prompt has no label, needs the right answer; set data.label_key to the field that holds it")
    gold = parse(label if "$" in label or "\\boxed" in label else f"${label}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematical expression, needs an answer such as 12, 3/4 or \\frac{{3}}{{4}}")
    response = final_text(sample)
    # math-verify takes the boxes of one paragraph as a set, and a number elsewhere where a box is empty.
    answers = [parse(response[max(response.rfind(_BOX), 0) :], parsing_timeout=None)]
    if response.count(_BOX) > 1 and answers[0]:
        answers.append(parse(response, parsing_timeout=None))
    right = next((answer for answer in answers if answer and verify(gold, answer, timeout_seconds=None)), None)
    answer = right or answers[0]
    text = str(answer[0]) if answer else ""
    # So that 0.5 and 1/2 are one answer of a vote.
    text = str(Fraction(text)) if re.fullmatch(r"-?\d+\.\d+", text) else text
    return {"reward": float(right is not None), "answer": text}
