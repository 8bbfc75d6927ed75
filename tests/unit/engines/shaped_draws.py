"""Entropy-aware sampling by its definition, a token at a time, in Python's float64."""

import math
from collections.abc import Sequence

from megatron_rl.algorithms.entropy_aware import DRAWS, EntropyAware


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def entropies(p: Sequence[float]) -> tuple[float, float]:
    """Entropy and varentropy in nats and nats^2."""
    entropy = -sum(each * math.log(each) for each in p if each)
    return entropy, sum(each * (math.log(each) + entropy) ** 2 for each in p if each)


def draw_by_definition(logits: Sequence[float], entropy_aware: EntropyAware, *, temperature: float) -> tuple[list[float], str]:
    """Log-probs of all tokens under the draw, -inf for those that are no candidates, and the quadrant."""
    entropy, varentropy = entropies(softmax(logits, temperature))
    high_entropy, high_varentropy = (value >= bound for value, bound in zip((entropy, varentropy), entropy_aware.thresholds, strict=True))
    name = ("resample" if high_varentropy else "explore") if high_entropy else ("branch" if high_varentropy else "argmax")
    draw = entropy_aware.quadrants.get(name, DRAWS[name])
    q = softmax(logits, temperature * draw.temperature)
    order = sorted(range(len(q)), key=lambda token: -q[token])
    likeliest = order[: draw.top_k]
    whole, candidates, together = sum(q[token] for token in likeliest), [], 0.0
    for token in likeliest:
        if draw.top_p < 1 and together > draw.top_p * whole:
            break
        candidates.append(token)
        together += q[token]
    kept = {token for token in order if q[token] >= q[candidates[-1]]}
    total = sum(q[token] for token in kept)
    return [math.log(q[token] / total) if token in kept and q[token] else -math.inf for token in range(len(q))], name
