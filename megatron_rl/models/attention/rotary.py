"""Rotary position embedding: settings in `config.json`, frequencies, rotation of queries and keys.

Legend: T tokens on this rank, H heads, D rotated channels.
"""

import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.device import to_device
from megatron_rl.errors import UserError
from megatron_rl.models.config_json import boolean, positive_int, positive_number, positive_numbers, section

RotaryKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

# Keys of the scaling: required ones of each kind, and optional ones.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_YARN_OPTIONAL = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": (*_YARN_OPTIONAL, "attention_factor", "attn_factor", "truncate"),
    "longrope": ("factor", "attention_factor", "original_max_position_embeddings"),
}
# Phi-3's first name of longrope.
_RENAMED: Mapping[object, str] = {"su": "longrope"}
REFUSED_KINDS: Mapping[str, str] = {
    "dynamic": "SGLang turns sequences of every length by one base, theta (factor^2 - factor + 1)^(d / (d - 2)), transformers by theta "
    "itself up to max_position_embeddings tokens and by another base for each length above"
}
"""Rope types in which engine and trainer would not compute the same, and why."""


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding: base `theta` and the scaling of frequencies (`kind`).

    `factor` divides frequencies. `low_freq_factor` and `high_freq_factor` belong to Llama 3.1's
    scaling. `beta_fast`, `beta_slow` and `truncate` belong to YaRN's
    (https://arxiv.org/abs/2309.00071, 3.2): the betas are turns within
    `original_max_position_embeddings` tokens, and `truncate` rounds the resulting channels to whole
    ones. `short_factor` and `long_factor` divide the frequency of each pair under longrope
    (https://arxiv.org/abs/2402.13753), `long_factor` in sequences longer than
    `original_max_position_embeddings`. `attention_factor` multiplies cosine and sine;
    `mscale_all_dim` is YaRN's second factor, part of the softmax scale in latent attention.
    `interleaved` chooses the channels of a pair: (2i, 2i + 1), or (i, i + D / 2).
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def inverse_frequencies(self, dim: int, *, long: bool = False) -> Tensor:
        """Radians per token of each pair among `dim` rotated channels, float32 [dim / 2], under longrope in `long` or in other ones."""
        frequency = 1.0 / (self.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        if self.kind == "default":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "longrope":
            return frequency / torch.tensor(self.long_factor if long else self.short_factor)
        kept = self._kept_by_yarn(dim) if self.kind == "yarn" else self._kept_by_llama3(frequency)
        return (1 - kept) * frequency / self.factor + kept * frequency

    def angles(self, positions: Tensor, lengths: Callable[[], Tensor], *, dim: int) -> Tensor:
        """Return the rotation of the pairs in radians [T, dim / 2] at `positions` [T].

        `lengths` gives the tokens of each token's sequence [T].
        """
        frequencies = to_device(self.inverse_frequencies(dim), positions.device)
        if self.kind == "longrope":
            long = (lengths() > self.original_max_position_embeddings)[:, None]
            frequencies = torch.where(long, to_device(self.inverse_frequencies(dim, long=True), positions.device), frequencies)
        return positions.float()[:, None] * frequencies

    def _kept_by_llama3(self, frequency: Tensor) -> Tensor:
        wavelength = 2 * math.pi / frequency
        kept = self.original_max_position_embeddings / wavelength - self.low_freq_factor
        return (kept / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)

    def _kept_by_yarn(self, dim: int) -> Tensor:
        """Return 1 for pairs with more than `beta_fast` turns within the original length.

        The result is 0 below `beta_slow` turns, and linear between.
        """

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


def parse_rotary(
    config: Mapping[str, Any],
    origin: str,
    *,
    max_position_embeddings: int,
    interleaved: bool,
    default_theta: float = 10000.0,
    default_original_length: int | None = None,
) -> RotarySpec:
    """Return the rotary embedding of a config.json, in both spellings.

    The spellings are `rope_parameters` (transformers 5, theta inside) and `rope_theta` with
    `rope_scaling` (transformers 4). `default_original_length` is the family's value for an absent
    `original_max_position_embeddings` beside the scaling. Raises UserError, naming `origin`, for an
    unsupported kind or key, a missing key and an impossible number.
    """
    scaling, where = _scaling(config, origin)
    kind = next((scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None), "default")
    kind = _RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    if isinstance(kind, str) and kind in REFUSED_KINDS:
        raise UserError(f"{origin} asks for rope type {kind}, which cannot be trained: {REFUSED_KINDS[kind]}; use another model")
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise UserError(f"{origin} asks for rope type {kind!r}, supported are {', '.join(_NEEDED)}; remove the scaling")
    missing = [name for name in _NEEDED[kind] if name not in scaling]
    if missing:
        raise UserError(f"{origin} has rope type {kind} without {missing[0]}; correct the file")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_NEEDED[kind], *_OPTIONAL.get(kind, ())}
    extra = [name for name in scaling if name not in known]
    if extra:
        raise UserError(f"{origin} sets {extra[0]} = {scaling[extra[0]]!r} for rope type {kind}, which is not supported; correct the file")
    theta = positive_number(scaling, "rope_theta", where, default=positive_number(config, "rope_theta", origin, default=default_theta))
    if theta <= 1:
        raise UserError(f"{origin} has rope_theta = {theta:g}, needs a number above 1; correct the file")
    original = config.get("original_max_position_embeddings", default_original_length)
    if original is not None:
        # Phi-3 has the key beside the scaling, and transformers prefers this place.
        scaling = {**scaling, "original_max_position_embeddings": original}
    parse = _WITH_LENGTHS.get(kind)
    values = _needed_values(scaling, where, kind) if parse is None else parse(scaling, where, max_position_embeddings)
    return RotarySpec(theta=theta, kind=typing.cast(RotaryKind, kind), interleaved=interleaved, **values)


def rotary_by_layer_type(
    config: Mapping[str, Any], origin: str, *, window_theta_key: str, default_window_theta: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `config` as seen by layers without and with a window, for `parse_rotary`.

    The families concerned rotate the two kinds of layers differently. `rope_parameters` has one
    object for each type of layer. The older spelling has `rope_theta` and `rope_scaling` for layers
    without a window and `window_theta_key` for layers with a window. Raises UserError, naming
    `origin`, for other keys in `rope_parameters`.
    """
    both = section(config, "rope_parameters", origin)
    types = ("full_attention", "sliding_attention")
    strange = sorted(set(both) - set(types))
    if strange:
        raise UserError(f"{origin} has {strange[0]} in rope_parameters, needs an object for each of {', '.join(types)}; correct the file")
    full, window = (section(both, kind, f"rope_parameters in {origin}") for kind in types)
    theta = config.get(window_theta_key)
    older = {"rope_scaling": None, "rope_theta": default_window_theta if theta is None else theta}
    return {**config, "rope_parameters": full}, {**config, **older, "rope_parameters": window}


def parse_rotary_fraction(config: Mapping[str, Any], origin: str, *, default: float | None) -> float:
    """Return the rotated fraction of a head's channels.

    `default` is the family's; None means a family with all channels rotated under any file. Raises
    UserError for a fraction outside (0, 1], and for one below 1 in a family with all channels
    rotated.
    """
    scaling, where = _scaling(config, origin)
    outside = positive_number(config, "partial_rotary_factor", origin, default=1.0 if default is None else default)
    fraction = positive_number(scaling, "partial_rotary_factor", where, default=outside)
    if fraction > 1 or (default is None and fraction < 1):
        needed = "1.0, because this family rotates all channels" if default is None else "a number above 0 and up to 1"
        raise UserError(f"{origin} sets partial_rotary_factor to {fraction:g}, needs {needed}; correct the file")
    return fraction


def _scaling(config: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], str]:
    """Return the object about rotary embedding in either spelling, and its name in errors."""
    sections = {key: section(config, key, origin) for key in ("rope_parameters", "rope_scaling")}
    given = [key for key, content in sections.items() if content]
    if len(given) == 2 and sections["rope_parameters"] != sections["rope_scaling"]:
        raise UserError(f"{origin} has rope_parameters and another rope_scaling, which are two spellings of the same; remove one of them")
    return (sections[given[0]], f"{given[0]} in {origin}") if given else ({}, origin)


def check_pairs(rotary: RotarySpec, pairs: int, origin: str) -> None:
    """Raise UserError, naming `origin`, when longrope's number of factors differs from `pairs`.

    `pairs` is the number of rotated pairs.
    """
    for name, factors in (("short_factor", rotary.short_factor), ("long_factor", rotary.long_factor)):
        if rotary.kind == "longrope" and len(factors) != pairs:
            raise UserError(f"{origin} has {len(factors)} numbers in {name} for {pairs} pairs of rotated channels; correct the file")


def _needed_values(scaling: Mapping[str, Any], origin: str, kind: str) -> dict[str, Any]:
    lengths = ("original_max_position_embeddings",)
    values = {key: (positive_int if key in lengths else positive_number)(scaling, key, origin) for key in _NEEDED[kind]}
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        raise UserError(f"{origin} has low_freq_factor {low:g} and high_freq_factor {high:g}, needs the second larger; correct the file")
    return values


def _yarn(scaling: Mapping[str, Any], origin: str, max_position_embeddings: int) -> dict[str, Any]:
    """Return the fields of YaRN with the defaults of transformers.

    A factor of null is the ratio of the lengths, when both are given.
    """
    original = positive_int(scaling, "original_max_position_embeddings", origin, default=max_position_embeddings)
    stretched = None if scaling.get("original_max_position_embeddings") is None else max_position_embeddings / original
    factor = positive_number(scaling, "factor", origin, default=stretched)
    mscale, mscale_all_dim = (positive_number(scaling, key, origin, default=0.0, or_zero=True) for key in ("mscale", "mscale_all_dim"))
    two = mscale and mscale_all_dim
    default = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim) if two else yarn_mscale(factor, 1.0)
    attention_factor = positive_number(scaling, "attention_factor", origin, default=default)
    _check_engines_factor(scaling, origin, default=default, attention_factor=attention_factor)
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": positive_number(scaling, "beta_fast", origin, default=32.0),
        "beta_slow": positive_number(scaling, "beta_slow", origin, default=1.0),
        "truncate": boolean(scaling, "truncate", origin, default=True),
        "attention_factor": attention_factor,
        "mscale_all_dim": mscale_all_dim,
    }


def _check_engines_factor(scaling: Mapping[str, Any], origin: str, *, default: float, attention_factor: float) -> None:
    """Raise UserError when engines would rotate by another factor than transformers.

    Engines multiply YaRN's factor by `attn_factor`.
    """
    multiplied = default * positive_number(scaling, "attn_factor", origin, default=1.0)
    if scaling.get("attn_factor") is not None and not math.isclose(multiplied, attention_factor, rel_tol=1e-6):
        raise UserError(
            f"{origin} has attn_factor = {scaling['attn_factor']:g}, with which engines multiply cosine and sine by {multiplied:g}, and "
            f"transformers, which does not know that key, by {attention_factor:g}; add attention_factor = {multiplied!r} beside it"
        )


def _longrope(scaling: Mapping[str, Any], origin: str, max_position_embeddings: int) -> dict[str, Any]:
    """Return the fields of longrope with the defaults of transformers.

    A factor of null is the ratio of the lengths.
    """
    original = positive_int(scaling, "original_max_position_embeddings", origin, default=max_position_embeddings)
    factor = positive_number(scaling, "factor", origin, default=max_position_embeddings / original)
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    lists = {key: positive_numbers(scaling, key, origin) for key in ("short_factor", "long_factor")}
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": positive_number(scaling, "attention_factor", origin, default=stretched),
        **lists,
    }


_WITH_LENGTHS: Mapping[str, Callable[[Mapping[str, Any], str, int], dict[str, Any]]] = {"yarn": _yarn, "longrope": _longrope}


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first D = 2 `cosine.shape[-1]` channels of x [T, H, channels] by the given angles.

    `cosine` and `sine` of the angles are [T, 1, D / 2]. `interleaved` pairs are read at (2i, 2i +
    1) and written to (i, i + D / 2): scores of queries and keys do not depend on the order.
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
