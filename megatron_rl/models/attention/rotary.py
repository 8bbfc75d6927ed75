"""Rotary position embedding: settings in `config.json`, frequencies, rotation of queries and keys.

Legend: T tokens on this rank, H heads, D rotated channels.
"""

import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import JsonObject
from megatron_rl.system.device import to_device

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
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding of base `theta` with a scaling of frequencies (`kind`).

    `frequencies` are the radians per token of each rotated pair, in float32. Under longrope
    (https://arxiv.org/abs/2402.13753) `long_frequencies` are for sequences longer than
    `original_max_position_embeddings`. `attention_factor` multiplies cosine and sine. `factor`
    stretches positions, and `mscale_all_dim` is YaRN's second factor
    (https://arxiv.org/abs/2309.00071): with latent attention both are part of the softmax scale.
    `interleaved` chooses the channels of a pair: (2i, 2i + 1), or (i, i + D / 2).
    """

    theta: float
    frequencies: tuple[float, ...]
    kind: RotaryKind = "default"
    long_frequencies: tuple[float, ...] = ()
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    factor: float = 1.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False

    def angles(self, positions: Tensor, lengths: Callable[[], Tensor]) -> Tensor:
        """Radians [T, D / 2] at `positions` [T] in sequences of `lengths()` tokens [T]."""

        def tensor(values: tuple[float, ...]) -> Tensor:
            return to_device(torch.tensor(values, dtype=torch.float32), positions.device)

        frequencies = tensor(self.frequencies)
        if self.kind == "longrope":
            long = (lengths() > self.original_max_position_embeddings)[:, None]
            frequencies = torch.where(long, tensor(self.long_frequencies), frequencies)
        return positions.float()[:, None] * frequencies


def rope_parameters(file: JsonObject, *, window_theta_key: str | None, scaled_by_default: bool) -> list[JsonObject]:
    """Return the rope parameters of a config.json in both spellings, with theta inside.

    The spellings are `rope_parameters` (transformers 5, theta inside) and `rope_theta` with
    `rope_scaling` (transformers 4). A family with a `window_theta_key` has two results, for layers
    without and with a window: `rope_parameters` has one object for each of the two, the older
    spelling has this key beside. Raises UserError for two spellings at odds and for other objects
    in `rope_parameters`.
    """
    parameters, scaling = file.section("rope_parameters"), file.section("rope_scaling")
    if window_theta_key is None:
        return [_with_theta(file, parameters, scaling, scaled_by_default=scaled_by_default)]
    strange = sorted(set(parameters.values) - set(_LAYER_TYPES))
    if strange:
        raise UserError(
            f"{file.origin} has {strange[0]} in rope_parameters, needs an object for each of {', '.join(_LAYER_TYPES)}; correct the file"
        )
    full, window = (parameters.section(kind) for kind in _LAYER_TYPES)
    none = JsonObject({}, file.origin)
    return [
        _with_theta(file, full, scaling, layer_type="full_attention"),
        _with_theta(file, window, none, theta_key=window_theta_key, layer_type="sliding_attention"),
    ]


def _with_theta(
    file: JsonObject,
    parameters: JsonObject,
    scaling: JsonObject,
    *,
    theta_key: str = "rope_theta",
    layer_type: str | None = None,
    scaled_by_default: bool = False,
) -> JsonObject:
    def default() -> Mapping[str, Any]:
        found: Mapping[str, Any] = file.absent("rope_parameters")
        return found if layer_type is None else found[layer_type]

    if parameters.values and scaling.values and parameters.values != scaling.values:
        raise UserError(
            f"{file.origin} has rope_parameters and another rope_scaling, which are two spellings of the same; remove one of them"
        )
    given = parameters if parameters.values else scaling
    values = given.values or (default() if scaled_by_default else {})
    outside = None if file.values.get(theta_key) is None else file.number(theta_key)
    if given.values.get("rope_theta") is None:
        values = {**values, "rope_theta": default()["rope_theta"] if outside is None else outside}
    return JsonObject(values, given.origin if given.values else file.origin)


def rotated_channels(file: JsonObject, parameters: JsonObject, *, head_dim: int, partly: bool) -> int:
    """Return the number of rotated channels of a head of `head_dim` channels.

    Channels turn in pairs. As in transformers, an odd number of channels is rounded up when the
    head has one more channel. Without `partly` the family rotates all channels under any file.
    Raises UserError for another fraction, and for more channels than those of a head.
    """
    sources = [source for source in (parameters, file) if source.values.get("partial_rotary_factor") is not None]
    fractions = [source.number("partial_rotary_factor") for source in sources]
    if not fractions:
        fractions = [file.absent("rope_parameters").get("partial_rotary_factor", 1.0) if partly else 1.0]
    fraction = fractions[0]
    if fraction > 1 or (not partly and fraction < 1):
        needed = "a number above 0 and up to 1" if partly else "1.0, because this family rotates all channels"
        raise UserError(f"{file.origin} sets partial_rotary_factor to {fraction:g}, needs {needed}; correct the file")
    channels = int(head_dim * fraction)
    if not 0 < channels + channels % 2 <= head_dim:
        raise UserError(f"{file.origin} rotates {channels} of {head_dim} channels, which turn in pairs; correct the size of a head there")
    return channels


def parse_rotary(
    file: JsonObject, parameters: JsonObject, *, channels: int, max_position_embeddings: int, interleaved: bool = False
) -> RotarySpec:
    """Return the rotary embedding of the first `channels` of a head, with transformers' frequencies.

    `parameters` comes from `rope_parameters` of `file`. Raises UserError for an unsupported kind or
    key, a missing key and an impossible number.
    """
    origin, theta = file.origin, parameters.number("rope_theta")
    kind = _kind(parameters.values, origin)
    if theta <= 1:
        raise UserError(f"{origin} has rope_theta = {theta:g}, needs a number above 1; correct the file")
    values: dict[str, Any] = {"rope_theta": theta, **_scaling(parameters, kind)}
    if kind in ("yarn", "longrope"):
        original = _original_length(file, values) or max_position_embeddings
        if kind == "longrope" and original == 1:
            raise UserError(f"{origin} has original_max_position_embeddings = 1, needs 2 or more for longrope; correct the file")
        values["original_max_position_embeddings"] = original
        if values.get("factor") is None:
            values["factor"] = max_position_embeddings / original
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if len(values[name]) != (channels + 1) // 2:
            raise UserError(
                f"{origin} has {len(values[name])} numbers in {name} for {(channels + 1) // 2} pairs of rotated channels; correct the file"
            )
    frequencies, attention_factor = _frequencies(kind, values, channels)
    if values.get("attn_factor") is not None:
        default = _frequencies(kind, values | {"attention_factor": None}, channels)[1]
        _check_engines_factor(values["attn_factor"], parameters.origin, default=default, attention_factor=attention_factor)
    return RotarySpec(
        theta=theta,
        frequencies=frequencies,
        kind=kind,
        long_frequencies=_frequencies(kind, values, channels, length=sys.maxsize)[0] if kind == "longrope" else (),
        original_max_position_embeddings=values.get("original_max_position_embeddings", 0),
        attention_factor=attention_factor,
        factor=values.get("factor", 1.0),
        mscale_all_dim=values.get("mscale_all_dim") or 0.0,
        interleaved=interleaved,
    )


def _original_length(file: JsonObject, values: Mapping[str, Any]) -> int | None:
    """Return the length beside the scaling, Phi-3's place, which transformers prefers, or the scaling's own."""
    key = "original_max_position_embeddings"
    beside: int | None = file.absent(key) if file.values.get(key) is None else file.integer(key)
    return beside or values.get(key)


def _kind(values: Mapping[str, Any], origin: str) -> RotaryKind:
    """Return the kind of scaling. Raises UserError for unsupported kinds and for missing or unknown keys."""
    kind = next((values[key] for key in ("rope_type", "type") if values.get(key) is not None), "default")
    kind = _RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    if isinstance(kind, str) and kind in REFUSED_KINDS:
        raise UserError(f"{origin} asks for rope type {kind}, which cannot be trained: {REFUSED_KINDS[kind]}; use another model")
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise UserError(f"{origin} asks for rope type {kind!r}, supported are {', '.join(_NEEDED)}; remove the scaling")
    missing = [name for name in _NEEDED[kind] if name not in values]
    if missing:
        raise UserError(f"{origin} has rope type {kind} without {missing[0]}; correct the file")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_NEEDED[kind], *_OPTIONAL.get(kind, ())}
    extra = [name for name in values if name not in known]
    if extra:
        raise UserError(f"{origin} sets {extra[0]} = {values[extra[0]]!r} for rope type {kind}, which is not supported; correct the file")
    return typing.cast(RotaryKind, kind)


def _scaling(parameters: JsonObject, kind: RotaryKind) -> dict[str, Any]:
    """Return the values of the scaling's keys; null stays None where transformers has a default."""
    values = parameters.values
    optional = set(_OPTIONAL.get(kind, ())) - {"truncate"}
    if kind == "yarn" and values.get("original_max_position_embeddings") is not None:
        # null is the ratio of the lengths.
        optional.add("factor")
    readers: dict[str, Callable[[str], Any]] = dict.fromkeys(("short_factor", "long_factor"), parameters.numbers)
    readers |= dict.fromkeys(("mscale", "mscale_all_dim"), partial(parameters.number, or_zero=True))
    readers |= {"truncate": parameters.boolean, "original_max_position_embeddings": parameters.integer}
    read: dict[str, Any] = {}
    for key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())):
        if key in values:
            read[key] = None if values[key] is None and key in optional else readers.get(key, parameters.number)(key)
    if kind == "llama3" and read["high_freq_factor"] <= read["low_freq_factor"]:
        low, high = read["low_freq_factor"], read["high_freq_factor"]
        raise UserError(
            f"{parameters.origin} has low_freq_factor {low:g} and high_freq_factor {high:g}, needs the second larger; correct the file"
        )
    return read


def _frequencies(kind: str, values: Mapping[str, Any], channels: int, *, length: int | None = None) -> tuple[tuple[float, ...], float]:
    """Return the frequencies of the pairs, in sequences of `length` tokens, and the factor of cosine and sine."""
    if kind == "default":
        exponents = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
        return tuple((1.0 / (values["rope_theta"] ** exponents)).tolist()), 1.0
    # A second for the import, which most models spare.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = types.SimpleNamespace(
        rope_parameters=values, head_dim=channels, hidden_size=channels, num_attention_heads=1, standardize_rope_params=lambda: None
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    return tuple(frequencies.tolist()), float(attention_factor)


def _check_engines_factor(attn_factor: float, origin: str, *, default: float, attention_factor: float) -> None:
    """Raise UserError when engines, which multiply YaRN's factor by `attn_factor`, would rotate by another one than transformers."""
    multiplied = default * attn_factor
    if not math.isclose(multiplied, attention_factor, rel_tol=1e-6):
        raise UserError(
            f"{origin} has attn_factor = {attn_factor:g}, with which engines multiply cosine and sine by {multiplied:g}, and "
            f"transformers, which does not know that key, by {attention_factor:g}; add attention_factor = {multiplied!r} beside it"
        )


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
