"""What a model is, read from its `config.json` alone, and megatron-core's TransformerConfig for it.

Every key of config.json is accounted for: read, known not to change the function, or refused.
"""

import difflib
import enum
import json
import math
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.device import chosen_backends, local_device
from megatron_rl.errors import UserError
from megatron_rl.models.families import FAMILIES, FIXED_KEYS, IGNORED_KEYS, MOE_KEYS, READ_KEYS, Family

if TYPE_CHECKING:
    from megatron_rl.config.settings import TopologySettings

Attention = Literal["torch", "transformer_engine"]
RotaryKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding: base `theta` and how frequencies are scaled (`kind` default, linear or llama3).

    `factor` divides frequencies; the last three are those of Llama 3.1's scaling (lengths in tokens).
    """

    theta: float
    kind: RotaryKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per token of each pair of channels, float32 [head_dim / 2]."""
        frequency = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        if self.kind == "default":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        wavelength = 2 * math.pi / frequency
        blend = self.original_max_position_embeddings / wavelength - self.low_freq_factor
        blend = (blend / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - blend) * frequency / self.factor + blend * frequency


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts of every layer: how many, how many each token takes, their width, and whether the taken weights are normalised."""

    num_experts: int
    num_experts_per_token: int
    ffn_hidden_size: int
    normalize_top_k: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's architecture. Sizes are whole-model sizes, before any parallel split; `vocab_size` is without padding."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    norm_epsilon: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    rotary: RotarySpec
    moe: MoeSpec | None = None

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor parallel size."""
        return -(-self.vocab_size // tp) * tp


def read_model_spec(path: Path) -> ModelSpec:
    """Read the architecture of the Hugging Face directory `path` from its config.json; weights are not touched.

    Raises UserError when the directory or config.json is missing or malformed, when the architecture is not supported, and for
    every key that changes the function of the network in a way that is not supported or is not known.
    """
    return parse_model_spec(_read_config(path), origin=str(path / "config.json"))


def parse_model_spec(config: Mapping[str, Any], *, origin: str) -> ModelSpec:
    """The architecture that the content of a config.json describes; `origin` names the file in errors. Raises UserError."""
    family = _family(config, origin)
    _account_for_keys(config, family, origin)
    hidden_size, num_heads = _positive_int(config, "hidden_size", origin), _positive_int(config, "num_attention_heads", origin)
    num_kv_heads = _positive_int(config, "num_key_value_heads", origin, default=num_heads)
    if num_heads % num_kv_heads:
        raise UserError(f"{origin} has {num_heads} attention heads for {num_kv_heads} key-value heads, needs a multiple; correct the file")
    num_layers = _positive_int(config, "num_hidden_layers", origin)
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=_positive_int(config, "vocab_size", origin),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_positive_int(config, "head_dim", origin, default=family.default_head_dim or hidden_size // num_heads),
        ffn_hidden_size=_positive_int(config, "intermediate_size", origin),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_position_embeddings=_positive_int(config, "max_position_embeddings", origin, default=32768),
        rotary=_rotary(config, origin),
        moe=_moe(config, origin) if family.moe else None,
    )


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not path.is_dir():
        raise UserError(f"model.path is {path}, which is not a directory; give a Hugging Face model directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"model directory {path} has no config.json; give a Hugging Face model directory") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid JSON ({error}); download or save the model again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, needs a JSON object; download or save the model again")
    return config


def _family(config: Mapping[str, Any], origin: str) -> Family:
    names = config.get("architectures") or ["none"]
    known = [FAMILIES[name] for name in names if name in FAMILIES]
    if not known:
        raise UserError(f"{origin} names architecture {', '.join(map(str, names))}, supported are {', '.join(FAMILIES)}; use one of them")
    return known[0]


def _account_for_keys(config: Mapping[str, Any], family: Family, origin: str) -> None:
    """Refuse what would be silently ignored: an unsupported value, or a key that nothing here knows and that is switched on."""
    for key, needed in FIXED_KEYS.items():
        value = config.get(key)
        if value is not None and value != needed:
            raise UserError(f"{origin} sets {key} to {value!r}, only {needed!r} is supported; use another model")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UserError(f"{origin} has layers of type {', '.join(sorted(kinds))}, only full_attention is supported; use another model")
    known = IGNORED_KEYS | FIXED_KEYS.keys() | READ_KEYS | (MOE_KEYS if family.moe else frozenset())
    strangers = [key for key in config if key not in known and config[key] not in (None, False, [], {})]
    if strangers:
        raise UserError(
            f"{origin} has the key {strangers[0]} = {config[strangers[0]]!r}, whose effect on {family.architecture} is not known here; "
            "remove it from the file if it does not change what the model computes"
        )


def _positive_int(config: Mapping[str, Any], key: str, origin: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{origin} has {key} = {value!r}, needs a positive integer; correct the file")
    return value


def _rotary(config: Mapping[str, Any], origin: str) -> RotarySpec:
    """Both spellings: `rope_parameters` (transformers 5, theta inside) and `rope_theta` with `rope_scaling` (transformers 4)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = parameters or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    accepted: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in accepted:
        raise UserError(f"{origin} asks for rope type {kind!r}, supported are {', '.join(accepted)}; remove the scaling")
    missing = [name for name in accepted[kind] if name not in scaling]
    if missing:
        raise UserError(f"{origin} has rope type {kind} without {missing[0]}; correct the file")
    known = {"rope_theta", "rope_type", "type", *accepted[kind]}
    extra = [name for name, value in scaling.items() if name not in known and not (name == "partial_rotary_factor" and value == 1.0)]
    if extra:
        raise UserError(f"{origin} sets {extra[0]} = {scaling[extra[0]]!r} for rope type {kind}, which is not supported; correct the file")
    return RotarySpec(theta=float(theta), kind=typing.cast(RotaryKind, kind), **{name: scaling[name] for name in accepted[kind]})


def _moe(config: Mapping[str, Any], origin: str) -> MoeSpec:
    count = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return MoeSpec(
        num_experts=_positive_int(config, count, origin),
        num_experts_per_token=_positive_int(config, "num_experts_per_tok", origin),
        ffn_hidden_size=_positive_int(config, "moe_intermediate_size", origin),
        normalize_top_k=bool(config.get("norm_topk_prob", False)),
    )


def resolve_attention(choice: Literal["auto", "torch", "transformer_engine"]) -> Attention:
    """The attention to build for the setting `model.attention`. Raises UserError for Transformer Engine that is not installed."""
    installed = chosen_backends()["transformer-engine"] != "not installed"
    if choice == "transformer_engine" and not installed:
        raise UserError("model.attention is transformer_engine, which is not installed; install it or set model.attention=torch")
    if choice == "auto":
        return "transformer_engine" if installed and local_device().kind == "cuda" else "torch"
    return choice


def transformer_config(
    spec: ModelSpec,
    *,
    topology: "TopologySettings",
    dtype: torch.dtype,
    overrides: Mapping[str, Any],
    attention: Attention = "torch",
) -> TransformerConfig:
    """megatron-core's configuration of this model in this layout, with the user's `overrides` by megatron's own field names.

    Raises UserError for a field that the installed release does not have (with the closest name), a value of the wrong type,
    an override that contradicts the checkpoint, the topology or the dtype (naming both values), and for combinations that megatron refuses.
    """
    if topology.ep > 1 or (spec.moe is not None and topology.etp not in (None, topology.tp)):
        raise UserError(
            f"training.topology has ep {topology.ep} and etp {topology.etp}, expert weights are mapped for ep 1 and etp = tp; unset both"
        )
    fixed = _checkpoint_fields(spec) | _topology_fields(topology, dtype)
    known = {field.name for field in fields(TransformerConfig)}
    checked = {name: _checked_override(name, value, known) for name, value in overrides.items()}
    for name, value in checked.items():
        if name in fixed and fixed[name] != value:
            raise UserError(f"model.megatron.{name} is {value!r}, but the {_owner(name, spec)} needs {fixed[name]!r}; remove this override")
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16 warns about its own default of a field that nobody set.
            warnings.filterwarnings("ignore", message="full scope is deprecated.*")
            return TransformerConfig(**(_default_fields(attention) | checked | fixed))
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(f"megatron-core refuses this model configuration: {error}; change model.megatron or training.topology") from error


def _owner(name: str, spec: ModelSpec) -> str:
    return "checkpoint" if name in _checkpoint_fields(spec) else "trainer, with this topology, dtype and device,"


def _checkpoint_fields(spec: ModelSpec) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "layernorm_epsilon": spec.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "window_size": None,
        "rotary_interleaved": False,
        "no_rope_freq": None,
        "qk_l2_norm": False,
        "attention_output_gate": False,
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        "multi_latent_attention": False,
        "mtp_num_layers": None,
        # Its absence leaves the tensor-parallel marks off the parameters, and the gradient norm under tp is silently wrong.
        "perform_initialization": True,
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
    }
    if spec.moe is not None:
        values |= {
            "num_moe_experts": spec.moe.num_experts,
            "moe_router_topk": spec.moe.num_experts_per_token,
            "moe_ffn_hidden_size": spec.moe.ffn_hidden_size,
            "moe_router_pre_softmax": not spec.moe.normalize_top_k,
            # The weight table names experts one by one.
            "moe_grouped_gemm": False,
        }
    return values


def _topology_fields(topology: "TopologySettings", dtype: torch.dtype) -> dict[str, Any]:
    """What the layout, the dtype, the device and the trainer's loss contract leave no choice about."""
    values: dict[str, Any] = {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
        "context_parallel_size": topology.cp,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp if topology.etp is not None else topology.tp,
        "sequence_parallel": topology.sequence_parallel,
        "variable_seq_lengths": topology.pp > 1,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": False,
        # The trainer's losses are shares of a sum that is already normalised.
        "calculate_per_token_loss": True,
    }
    if topology.vpp > 1:
        # Two messages between the same pair of stages in one batch give wrong gradients.
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if local_device().kind == "cpu":
        # Freed outputs give wrong gradients with interleaved stages under gloo.
        values |= {"use_cpu_initialization": True, "deallocate_pipeline_outputs": False}
    return values


def _default_fields(attention: Attention) -> dict[str, Any]:
    """What megatron leaves to its scripts. Fused kernels are on where they exist: with Transformer Engine on a GPU."""
    fused = local_device().kind == "cuda" and attention == "transformer_engine"
    return {
        "transformer_impl": "transformer_engine" if attention == "transformer_engine" else "local",
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": fused,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_sync": False,
        "deallocate_pipeline_outputs": True,
    }


def _checked_override(name: str, value: Any, known: set[str]) -> Any:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"the closest name is {close[0]}" if close else "see its documentation for the names"
        raise UserError(f"model.megatron.{name} is not a field of megatron-core's TransformerConfig; {hint}")
    hint = typing.get_type_hints(TransformerConfig)[name]
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise UserError(f"model.megatron.{name} is {value!r}: {error.errors()[0]['msg']}; give a value of that type") from error
