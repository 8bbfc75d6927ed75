"""Rotary position embedding: what `config.json` says about it, its frequencies, and the rotation of queries and keys.

Legend: T tokens on this rank, H heads, D channels that are rotated.
"""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.errors import UserError

RotaryKind = Literal["default", "linear", "llama3", "yarn"]

# Keys of the scaling that each kind needs, and those that it may have.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}
_YARN_OPTIONAL = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_OPTIONAL: Mapping[str, tuple[str, ...]] = {"yarn": (*_YARN_OPTIONAL, "attention_factor", "truncate")}


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding: base `theta` and how frequencies are scaled (`kind`).

    `factor` divides frequencies. `low_freq_factor` and `high_freq_factor` are of Llama 3.1's scaling, `beta_fast`, `beta_slow` and
    `truncate` of YaRN's (https://arxiv.org/abs/2309.00071, 3.2; turns within `original_max_position_embeddings` tokens, and whether
    the channels they mean are rounded to whole ones). `attention_factor` multiplies cosine and sine; `mscale_all_dim` is YaRN's
    second factor, which latent attention has in its softmax scale. `interleaved` says which channels make a pair: (2i, 2i + 1), or
    (i, i + D / 2).
    """

    theta: float
    kind: RotaryKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False

    def inverse_frequencies(self, dim: int) -> Tensor:
        """Radians per token of each pair among `dim` rotated channels, float32 [dim / 2]."""
        frequency = 1.0 / (self.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        if self.kind == "default":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        kept = self._kept_by_yarn(dim) if self.kind == "yarn" else self._kept_by_llama3(frequency)
        return (1 - kept) * frequency / self.factor + kept * frequency

    def softmax_factor(self) -> float:
        """What latent attention multiplies its softmax scale by, the square of YaRN's mscale (1 for other kinds)."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    def _kept_by_llama3(self, frequency: Tensor) -> Tensor:
        wavelength = 2 * math.pi / frequency
        kept = self.original_max_position_embeddings / wavelength - self.low_freq_factor
        return (kept / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)

    def _kept_by_yarn(self, dim: int) -> Tensor:
        """1 where a pair turns more than `beta_fast` times within the original length, 0 below `beta_slow`, linear between."""

        def pair(turns: float) -> float:
            return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's correction for positions stretched by `factor`, 0.1 `mscale` ln(`factor`) + 1 (https://arxiv.org/abs/2309.00071, 3.3)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def parse_rotary(config: Mapping[str, Any], origin: str, *, max_position_embeddings: int, interleaved: bool) -> RotarySpec:
    """The rotary embedding of a config.json, in both spellings: `rope_parameters` (transformers 5, theta inside) and `rope_theta` with
    `rope_scaling` (transformers 4).

    Raises UserError, naming `origin`, for a kind or a key that is not supported and for a missing key.
    """
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = parameters or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _NEEDED:
        raise UserError(f"{origin} asks for rope type {kind!r}, supported are {', '.join(_NEEDED)}; remove the scaling")
    missing = [name for name in _NEEDED[kind] if name not in scaling]
    if missing:
        raise UserError(f"{origin} has rope type {kind} without {missing[0]}; correct the file")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_NEEDED[kind], *_OPTIONAL.get(kind, ())}
    extra = [name for name in scaling if name not in known]
    if extra:
        raise UserError(f"{origin} sets {extra[0]} = {scaling[extra[0]]!r} for rope type {kind}, which is not supported; correct the file")
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    values = {name: scaling[name] for name in _NEEDED[kind]} | (_yarn(scaling, max_position_embeddings) if kind == "yarn" else {})
    return RotarySpec(theta=theta, kind=typing.cast(RotaryKind, kind), interleaved=interleaved, **values)


def parse_rotary_fraction(config: Mapping[str, Any], origin: str, *, default: float | None) -> float:
    """Fraction of a head's channels that are rotated; `default` is the family's, None where all are rotated whatever the file says.

    Raises UserError for a fraction outside (0, 1], and for one below 1 in a family that rotates all channels.
    """
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = [source["partial_rotary_factor"] for source in (parameters, config) if source.get("partial_rotary_factor") is not None]
    fraction = float(values[0]) if values else (1.0 if default is None else default)
    if not 0 < fraction <= 1 or (default is None and fraction < 1):
        needed = "1.0, because this family rotates all channels" if default is None else "a number above 0 and up to 1"
        raise UserError(f"{origin} sets partial_rotary_factor to {fraction:g}, needs {needed}; correct the file")
    return fraction


def _yarn(scaling: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """The fields of YaRN with the defaults of transformers: absent and null mean the same."""
    original = scaling.get("original_max_position_embeddings") or max_position_embeddings
    factor = scaling.get("factor")
    factor = float(max_position_embeddings / original if factor is None else factor)
    mscale, mscale_all_dim = float(scaling.get("mscale") or 0.0), float(scaling.get("mscale_all_dim") or 0.0)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        two = mscale and mscale_all_dim
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim) if two else yarn_mscale(factor, 1.0)
    return {
        "factor": factor,
        "original_max_position_embeddings": int(original),
        "beta_fast": float(scaling.get("beta_fast") or 32.0),
        "beta_slow": float(scaling.get("beta_slow") or 1.0),
        "truncate": bool(scaling.get("truncate", True)),
        "attention_factor": float(attention_factor),
        "mscale_all_dim": mscale_all_dim,
    }


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first D = 2 `cosine.shape[-1]` channels of x [T, H, channels] by the angles whose cosine and sine [T, 1, D / 2] are given.

    `interleaved` pairs are read at (2i, 2i + 1) and written to (i, i + D / 2): scores of queries and keys do not depend on the order.
    """
    return _Rotate.apply(x, cosine, sine, interleaved)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation by the negative angle, so x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        turned, rest = x.split((2 * cosine.shape[-1], x.shape[-1] - 2 * cosine.shape[-1]), dim=-1)
        first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        turned, rest = grad.split((2 * cosine.shape[-1], grad.shape[-1] - 2 * cosine.shape[-1]), dim=-1)
        first, second = turned.chunk(2, dim=-1)
        first, second = first * cosine + second * sine, second * cosine - first * sine
        if ctx.interleaved:
            return torch.cat((torch.stack((first, second), dim=-1).flatten(-2), rest), dim=-1), None, None, None
        return torch.cat((first, second, rest), dim=-1), None, None, None
