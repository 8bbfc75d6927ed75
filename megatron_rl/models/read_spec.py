"""The architecture of a model, read from its `config.json` alone.

Every key of config.json is accounted for: read, known not to change the function, or refused.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_spec import parse_mla, parse_sliding_window
from megatron_rl.models.attention.rotary import RotarySpec, check_pairs, parse_rotary, parse_rotary_fraction, rotary_by_layer_type
from megatron_rl.models.config_json import boolean, count, names, positive_int, positive_number, read_config
from megatron_rl.models.experts.moe_spec import MoeSpec, parse_moe
from megatron_rl.models.families import FAMILIES, REFUSED
from megatron_rl.models.families.config_keys import MTP_KEYS
from megatron_rl.models.families.family import Family
from megatron_rl.models.model_spec import ModelSpec


def read_model_spec(path: Path) -> ModelSpec:
    """Read the architecture of the Hugging Face directory `path` from config.json, without weights.

    Raises UserError when the directory or config.json is missing or malformed, for an unsupported
    architecture, and for every key with an unsupported or unknown effect on the function of the
    network.
    """
    config, origin = read_config(path), str(path / "config.json")
    spec = parse_model_spec(config, origin=origin)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(
            f"{origin} has model_type = {model_type!r}, needs the name by which transformers and SGLang read a file of "
            f"{spec.architecture}; take it from the published config.json"
        )
    return spec


def parse_model_spec(config: Mapping[str, Any], *, origin: str) -> ModelSpec:
    """Return the architecture described by the content of a config.json.

    `origin` names the file in errors. Raises UserError.
    """
    family = _family(config, origin)
    _account_for_keys(config, family, origin)
    hidden_size, num_heads = positive_int(config, "hidden_size", origin), positive_int(config, "num_attention_heads", origin)
    num_kv_heads = positive_int(config, "num_key_value_heads", origin, default=num_heads)
    if num_heads % num_kv_heads:
        raise UserError(f"{origin} has {num_heads} attention heads for {num_kv_heads} key-value heads, needs a multiple; correct the file")
    num_layers = positive_int(config, "num_hidden_layers", origin)
    max_position_embeddings = positive_int(config, "max_position_embeddings", origin, default=32768)
    mla = parse_mla(config, origin) if family.mla else None
    window, windowed = parse_sliding_window(
        config,
        origin,
        num_layers=num_layers,
        windows=family.windows,
        default=family.default_window,
        pattern=_window_pattern(config, family, origin),
    )
    head_dim = positive_int(config, "head_dim", origin, default=family.default_head_dim or hidden_size // num_heads)
    spec = ModelSpec(
        architecture=family.architecture,
        vocab_size=positive_int(config, "vocab_size", origin),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        # Latent attention expands keys and values for every query head, and gives head_dim in config.json
        # another meaning.
        num_kv_heads=num_kv_heads if mla is None else num_heads,
        head_dim=head_dim if mla is None else mla.qk_head_dim,
        ffn_hidden_size=positive_int(config, "intermediate_size", origin),
        norm_epsilon=positive_number(config, "rms_norm_eps", origin, default=family.default_norm_epsilon),
        tie_embeddings=boolean(config, "tie_word_embeddings", origin, default=family.default_tied),
        qkv_bias=boolean(config, "attention_bias", origin, default=family.default_attention_bias)
        if family.qkv_bias is None
        else family.qkv_bias,
        qk_norm=boolean(config, "use_qk_norm", origin) if family.qk_norm is None else family.qk_norm,
        max_position_embeddings=max_position_embeddings,
        **_rotary(config, family, origin, max_position_embeddings),
        moe=_experts(config, family, origin, num_layers),
        mla=mla,
        rotary_fraction=_rotary_fraction(config, family, origin),
        sliding_window=window,
        sliding_layers=windowed,
        num_mtp_layers=max(count(config, key, origin, default=0) for key in sorted(MTP_KEYS)),
        qk_norm_over_heads=family.qk_norm_over_heads,
        names=family.names,
        zero_centered_norms=family.zero_centered_norms,
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        softmax_scale=_softmax_scale(config, family, origin),
        activation=family.activation,
        activation_limit=_activation_limit(config, family, origin),
        linear_bias=family.linear_bias,
        attention_sinks=family.attention_sinks,
    )
    _check_rotated_channels(spec, origin)
    return spec


def _family(config: Mapping[str, Any], origin: str) -> Family:
    named = names(config, "architectures", origin) or ["none"]
    known = [FAMILIES[name] for name in named if name in FAMILIES]
    reasons = [f"{name}, which cannot be trained: {REFUSED[name]}" for name in named if name in REFUSED]
    if reasons and not known:
        raise UserError(f"{origin} names architecture {reasons[0]}; use another model (`megatron-rl models` lists them)")
    if not known:
        raise UserError(f"{origin} names architecture {', '.join(named)}, supported are {', '.join(FAMILIES)}; use one of them")
    return known[0]


def _rotary(config: Mapping[str, Any], family: Family, origin: str, max_position_embeddings: int) -> dict[str, RotarySpec]:
    """Return the rotary embedding, and the embedding of layers with a window in families with two."""
    if family.default_rope_scaling is not None and not any(config.get(key) for key in ("rope_parameters", "rope_scaling")):
        config = {**config, "rope_scaling": dict(family.default_rope_scaling)}
    interleaved = family.rotary_interleaved or (family.mla and boolean(config, "rope_interleave", origin, default=True))
    parse = partial(
        parse_rotary,
        origin=origin,
        max_position_embeddings=max_position_embeddings,
        interleaved=interleaved,
        default_theta=family.default_rope_theta,
        default_original_length=family.default_original_length,
    )
    if family.window_theta_key is None:
        return {"rotary": parse(config)}
    full, window = _by_layer_type(config, family, origin)
    return {"rotary": parse(full), "window_rotary": parse(window)}


def _rotary_fraction(config: Mapping[str, Any], family: Family, origin: str) -> float:
    """Return the fraction common to all layers.

    Families with another rotation in window layers rotate all channels in both kinds of layers.
    """
    views = [config] if family.window_theta_key is None else _by_layer_type(config, family, origin)
    return max(parse_rotary_fraction(view, origin, default=family.default_rotary_fraction) for view in views)


def _by_layer_type(config: Mapping[str, Any], family: Family, origin: str) -> list[dict[str, Any]]:
    assert family.window_theta_key is not None, "the family rotates all layers alike"
    return list(
        rotary_by_layer_type(config, origin, window_theta_key=family.window_theta_key, default_window_theta=family.default_window_theta)
    )


def _window_pattern(config: Mapping[str, Any], family: Family, origin: str) -> int | None:
    """Return n when every n-th layer has no window, in a family with windows.

    The number counts when no key names the layers.
    """
    if family.window_pattern_key is None:
        return family.default_window_pattern
    return positive_int(config, family.window_pattern_key, origin, default=family.default_window_pattern)


def _softmax_scale(config: Mapping[str, Any], family: Family, origin: str) -> float | None:
    return None if family.query_scalar_key is None else positive_number(config, family.query_scalar_key, origin, default=256.0) ** -0.5


def _activation_limit(config: Mapping[str, Any], family: Family, origin: str) -> float | None:
    key = family.activation_limit_key
    return None if key is None else positive_number(config, key, origin, default=family.default_activation_limit)


def _experts(config: Mapping[str, Any], family: Family, origin: str, num_layers: int) -> MoeSpec | None:
    if family.router is None:
        return None
    return parse_moe(
        config,
        origin,
        num_layers=num_layers,
        score_function=family.router,
        width_key=family.expert_width_key,
        normalize_top_k=family.normalize_top_k,
        shared_gate=family.shared_gate,
    )


def _check_rotated_channels(spec: ModelSpec, origin: str) -> None:
    """Raise UserError when the rotated channels exceed a head or do not match longrope's factors.

    Channels turn in pairs. As in transformers, an odd number of channels is rounded up when the
    head has one more channel.
    """
    room = spec.head_dim if spec.mla is None else spec.mla.qk_rope_head_dim
    if not 0 < spec.rotary_dim + spec.rotary_dim % 2 <= room:
        raise UserError(f"{origin} rotates {spec.rotary_dim} of {room} channels, which turn in pairs; correct the size of a head there")
    for rotary in (spec.rotary, spec.window_rotary):
        if rotary is not None:
            check_pairs(rotary, (spec.rotary_dim + 1) // 2, origin)


def _account_for_keys(config: Mapping[str, Any], family: Family, origin: str) -> None:
    """Refuse keys with a silently ignored effect: an unsupported value, or an unknown key.

    Unknown keys are refused also with the value false or 0: a feature off in one program's file may
    be on by default in transformers. Only null counts as absent.
    """
    for key, needed in family.fixed_keys.items():
        value = config.get(key)
        if value is not None and value != needed:
            raise UserError(f"{origin} sets {key} to {value!r}, only {needed!r} is supported; use another model")
    strangers = [key for key in config if key not in family.known_keys and config[key] is not None]
    if strangers:
        raise UserError(
            f"{origin} has the key {strangers[0]} = {config[strangers[0]]!r}, whose effect on {family.architecture} is not known here; "
            "remove it from the file if it does not change what the model computes"
        )
