"""Entropy-aware sampling: each token is drawn by the quadrant of its entropy and varentropy.

The policy p = softmax(z / T) has entropy H = -sum p ln p, nats, and varentropy V = sum p (ln p + H)^2,
nats^2. With thresholds h and v the quadrants are

             V < v       V >= v
    H < h    argmax      branch
    H >= h   explore     resample

A quadrant draws from q = softmax(z / (T t)) over candidates: the `top_k` likeliest tokens, and of
these the likeliest until their probability under q together is above `top_p`. Tokens as likely as
the last one are candidates, too, so that no order decides. A factor t, k and p are per quadrant.

Names and defaults are those of entropix (github.com/xjdr-alt/entropix, sampler.py), as far as they
are a distribution of the next token: its explore also inserts a token of its own, its branch and
resample scale k, t and p by statistics of attention, and between its lower and upper thresholds it
adapts all of them. Its units are bits and bits^2.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from megatron_rl.algorithms.choices import Choice, check_fields, doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch

Quadrant = Literal["argmax", "branch", "explore", "resample"]
QUADRANTS: tuple[Quadrant, ...] = get_args(Quadrant)
"""A quadrant's place is 2 [H >= h] + [V >= v]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Choice):
    """The distribution of a quadrant's tokens."""

    temperature: float = doc("Factor of rollout.sampling.temperature.", 1.0, ge=0.01, le=100)
    top_k: int | None = doc("Draw from so many likeliest tokens; from all when not set.", None, ge=1)
    top_p: float = doc("Draw from the likeliest tokens, which have this probability together.", 1.0, gt=0, le=1)


DRAWS: Mapping[Quadrant, Draw] = MappingProxyType({
    "argmax": Draw(top_k=1),
    "branch": Draw(temperature=1.2, top_k=40),
    "explore": Draw(temperature=1.3),
    "resample": Draw(temperature=2.0, top_p=0.9),
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyAware(Choice):
    """Draw each token by the entropy and varentropy of the policy there; evaluations do not."""

    thresholds: tuple[float, float] = doc("Entropy in nats and varentropy in nats^2 from which on they are high.")
    quadrants: Mapping[Quadrant, Draw] = field(
        default_factory=dict,
        hash=False,
        metadata={
            "description": "Draws {temperature, top_k, top_p} by quadrant, each as a whole in place of its own: argmax {top_k: 1}, "
            "branch {temperature: 1.2, top_k: 40}, explore {temperature: 1.3}, resample {temperature: 2, top_p: 0.9}."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.thresholds) < 0:
            raise ValueError(f"EntropyAware.thresholds are {list(self.thresholds)}, needs an entropy and a varentropy of at least 0")

    @property
    def draws(self) -> list[Draw]:
        """Return the draw of each quadrant, in the order of QUADRANTS."""
        return [self.quadrants.get(name, DRAWS[name]) for name in QUADRANTS]

    def numbers(self, *, temperature: float) -> list[float]:
        """Return the 15 numbers of a row of `reshaped`: T, h, v; t, k, p of each quadrant, k 0 for all tokens."""
        return [temperature, *self.thresholds, *(value for one in self.draws for value in (one.temperature, one.top_k or 0, one.top_p))]

    def places(self, entropy: Tensor, varentropy: Tensor) -> Tensor:
        """Return the place [T] of each token's quadrant."""
        return _places(entropy, varentropy, *self.thresholds)


def _places(entropy: Tensor, varentropy: Tensor, high_entropy: Tensor | float, high_varentropy: Tensor | float) -> Tensor:
    return 2 * (entropy >= high_entropy).long() + (varentropy >= high_varentropy).long()


def reshaped(logits: Tensor, numbers: Sequence[Sequence[float]]) -> Tensor:
    """Return logits z' [T, V] with q = softmax(z' / T), -inf outside of the candidates.

    `numbers` are `EntropyAware.numbers` of each row, or of all in one. Results are float32 (float64
    for float64 logits).
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    table = torch.tensor(numbers, dtype=z.dtype, device=z.device).expand(len(z), -1)
    temperature, thresholds = table[:, :1], table[:, 1:3]
    log_p = torch.log_softmax(z / temperature, -1)
    p = log_p.exp()
    # A token without probability counts as 0 ln 0 = 0.
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    varentropy = torch.where(p > 0, p * (log_p + entropy.unsqueeze(-1)).square(), 0.0).sum(-1)
    place = _places(entropy, varentropy, *thresholds.unbind(-1))
    draws = table[:, 3:].unflatten(-1, (len(QUADRANTS), 3))
    factor, top_k, top_p = draws[torch.arange(len(z), device=z.device), place].split(1, -1)
    cooled, most = z / factor, min(z.shape[-1], int(max(max(row[4::3]) for row in numbers)))
    last = torch.full_like(factor, float("-inf"))
    # A whole row is put in order only where nothing but a top_p bounds it.
    for bounded, count in (((top_k > 0), most), ((top_k == 0) & (top_p < 1), z.shape[-1])):
        rows = bounded.squeeze(-1).nonzero().squeeze(-1)
        if len(rows):
            ordered = cooled[rows].topk(count, sorted=True).values
            last[rows] = _last(ordered, temperature[rows], top_k[rows], top_p[rows])
    return torch.where(cooled >= last, cooled, float("-inf"))


def _last(ordered: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the logit [T, 1] of the last candidate among falling logits `ordered` [T, K]; `top_k` 0 stands for all."""
    among = (torch.arange(ordered.shape[-1], device=ordered.device) < top_k) | (top_k == 0)
    q = torch.softmax(ordered.masked_fill(~among, float("-inf")) / temperature, -1)
    # Rounding can bring the sum of all above 1.
    kept = among & ((q.cumsum(-1) - q <= top_p) | (top_p == 1))
    return ordered.masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
