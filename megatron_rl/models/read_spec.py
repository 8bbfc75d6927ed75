"""The architecture of a model, read from its `config.json` alone.

Every key of config.json is accounted for: read, known not to change the function, or refused.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.models.attention.rotary import RotarySpec, parse_rotary, rope_parameters, rotated_channels
from megatron_rl.models.config_json import MOST_PARTS, JsonObject, read_config
from megatron_rl.models.experts.moe_spec import parse_moe
from megatron_rl.models.families.family import MTP_KEYS, Family
from megatron_rl.models.families.family_table import FAMILIES, REFUSED
from megatron_rl.models.model_spec import MlaSpec, ModelSpec


def read_model_spec(path: Path) -> ModelSpec:
    """Read the architecture of the Hugging Face directory `path` from config.json, without weights.

    Raises UserError when the directory or config.json is missing or malformed, for an unsupported
    architecture, and for every key with an unsupported or unknown effect on the network.
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
    """Return the architecture in `config`, the content of the file `origin`. Raises UserError."""
    family = _family(JsonObject(config, origin))
    file = JsonObject(config, origin, partial(family.absent, config))
    _account_for_keys(config, family, origin)
    hidden_size, num_layers = file.integer("hidden_size"), file.integer("num_hidden_layers", most=MOST_PARTS)
    limit = family.activation_limit_key
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        **_attention(file, family, num_layers),
        ffn_hidden_size=file.integer("intermediate_size"),
        norm_epsilon=file.number("rms_norm_eps", optional=True),
        tie_embeddings=file.boolean("tie_word_embeddings", optional=True),
        moe=parse_moe(file, family, num_layers=num_layers),
        num_mtp_layers=max(file.integer(key, least=0, most=MOST_PARTS, default=0) for key in sorted(MTP_KEYS)),
        names=family.names,
        activation=family.activation,
        activation_limit=None if limit is None else file.number(limit, optional=True),
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        zero_centered_norms=family.zero_centered_norms,
        linear_bias=family.linear_bias,
    )


def _attention(file: JsonObject, family: Family, num_layers: int) -> dict[str, Any]:
    """Return the fields of attention. Latent attention expands keys and values for every query head."""
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", default=num_heads if family.mla else None, optional=True)
    if num_heads % num_kv_heads:
        raise UserError(
            f"{file.origin} has {num_heads} attention heads for {num_kv_heads} key-value heads, needs a multiple; correct the file"
        )
    mla = _latent_attention(file) if family.mla else None
    head_dim = file.integer("head_dim", optional=True) if mla is None else mla.qk_head_dim
    length = file.integer("max_position_embeddings", optional=True)
    window, windowed = _sliding_window(file, family, num_layers)
    rotary, window_rotary = _rotary(file, family, head_dim=head_dim if mla is None else mla.qk_rope_head_dim, length=length)
    scalar = family.query_scalar_key
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads if mla is None else num_heads,
        "head_dim": head_dim,
        "mla": mla,
        "max_position_embeddings": length,
        "rotary": rotary,
        "window_rotary": window_rotary,
        "sliding_window": window,
        "sliding_layers": windowed,
        "qkv_bias": file.boolean("attention_bias", optional=True) if family.qkv_bias is None else family.qkv_bias,
        "qk_norm": file.boolean("use_qk_norm", optional=True) if family.qk_norm is None else family.qk_norm,
        "qk_norm_over_heads": family.qk_norm_over_heads,
        "softmax_scale": None if scalar is None else file.number(scalar, optional=True) ** -0.5,
        "attention_sinks": family.attention_sinks,
    }


def _family(file: JsonObject) -> Family:
    named = file.names("architectures") or ["none"]
    known = [FAMILIES[name] for name in named if name in FAMILIES]
    reasons = [f"{name}, which cannot be trained: {REFUSED[name]}" for name in named if name in REFUSED]
    if reasons and not known:
        raise UserError(f"{file.origin} names architecture {reasons[0]}; use another model (`megatron-rl models` lists them)")
    if not known:
        raise UserError(f"{file.origin} names architecture {', '.join(named)}, supported are {', '.join(FAMILIES)}; use one of them")
    return known[0]


def _latent_attention(file: JsonObject) -> MlaSpec:
    sizes = {name: file.integer(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    return MlaSpec(q_lora_rank=None if file.values.get("q_lora_rank") is None else file.integer("q_lora_rank"), **sizes)


def _rotary(file: JsonObject, family: Family, *, head_dim: int, length: int) -> tuple[RotarySpec, RotarySpec | None]:
    """Return the rotary embedding, and the embedding of layers with a window in families with two."""
    found = [
        parse_rotary(
            file,
            parameters,
            channels=rotated_channels(file, parameters, head_dim=head_dim, partly=family.partly_rotated),
            max_position_embeddings=length,
            interleaved=family.rotary_interleaved or (family.mla and file.boolean("rope_interleave", default=True)),
        )
        for parameters in rope_parameters(file, window_theta_key=family.window_theta_key, scaled_by_default=family.scaled_by_default)
    ]
    return found[0], (found[1] if len(found) > 1 else None)


def _sliding_window(file: JsonObject, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the window in tokens, the querying one included, and the layers with a window, from 0.

    Raises UserError for layer types unknown or foreign to the family, for windows in a family
    without, and for values of the wrong type, also when no layer uses the value.
    """
    origin, kinds = file.origin, _layer_types(file, num_layers)
    if family.windows in ("given", "everywhere"):
        window = file.values["sliding_window"] if "sliding_window" in file.values else file.absent("sliding_window")
        if window is None:
            return None, ()
        window = file.integer("sliding_window", default=window)
        if family.windows == "given":
            file.integer("sliding_window_pattern", default=1)
            kinds = kinds or file.absent("layer_types")
        elif "full_attention" in kinds:
            raise UserError(
                f"{origin} has a sliding_window and layers of type full_attention, but this family has its window in every layer whatever "
                "layer_types says; remove layer_types, or set sliding_window to null"
            )
    elif not file.boolean("use_sliding_window"):
        if "sliding_attention" in kinds:
            raise UserError(f"{origin} has layers of type sliding_attention without use_sliding_window; set it, or remove layer_types")
        return None, ()
    elif family.windows == "never":
        raise UserError(f"{origin} sets use_sliding_window to True, which is not supported in this family; use another model")
    else:
        # The default of Qwen2 and Qwen3 in transformers.
        first = file.integer("max_window_layers", least=0, default=28)
        kinds = kinds or ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
        if "sliding_attention" not in kinds and file.values.get("sliding_window") is None:
            return None, ()
        window = file.integer("sliding_window")
    layers = [layer for layer in range(num_layers) if not kinds or kinds[layer] == "sliding_attention"]
    return (window, tuple(layers)) if layers else (None, ())


def _layer_types(file: JsonObject, num_layers: int) -> list[str]:
    kinds = file.names("layer_types")
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise UserError(f"{file.origin} has layers of type {', '.join(strange)}, supported are full_attention and sliding_attention")
    if kinds and len(kinds) != num_layers:
        raise UserError(f"{file.origin} has {len(kinds)} layer_types for {num_layers} layers, needs one for each; correct the file")
    return kinds


def _account_for_keys(config: Mapping[str, Any], family: Family, origin: str) -> None:
    """Refuse unsupported values, and unknown keys unless null: transformers may default to on."""
    for key, needed in family.fixed_keys.items():
        value = config.get(key)
        if value is not None and value != needed:
            raise UserError(f"{origin} sets {key} to {value!r}, only {needed!r} is supported; use another model")
    strangers = [key for key in config if key not in family.known_keys and config[key] is not None]
    if strangers:
        from transformers import GenerationConfig

        # Written into config.json by transformers 4.
        generation = vars(GenerationConfig()).keys() | {"prefix"}
        strangers = [key for key in strangers if key not in generation]
    if strangers:
        raise UserError(
            f"{origin} has the key {strangers[0]} = {config[strangers[0]]!r}, whose effect on {family.architecture} is not known here; "
            "remove it from the file if it does not change what the model computes"
        )
