"""What a model is, read from its `config.json` alone, and megatron-core's TransformerConfig for it.

Every key of config.json is accounted for: read, known not to change the function, or refused.
"""

import difflib
import enum
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.device import chosen_backends, local_device
from megatron_rl.errors import UserError
from megatron_rl.models.attention_spec import Attention, MlaSpec, attention_fields, parse_mla, parse_sliding_window
from megatron_rl.models.config_json import positive_int, read_config
from megatron_rl.models.families import FAMILIES, MTP_KEYS, Family
from megatron_rl.models.moe_spec import MoeSpec, check_expert_layout, default_moe_fields, moe_fields, parse_moe
from megatron_rl.models.recompute import check_recompute
from megatron_rl.models.rotary import RotarySpec, parse_rotary, parse_rotary_fraction
from megatron_rl.models.router_config import BALANCED_BY, check_routing

if TYPE_CHECKING:
    from megatron_rl.config.settings import TopologySettings


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's architecture. Sizes are whole-model sizes, before any parallel split; `vocab_size` is without padding.

    `head_dim` are channels of a query and of a key head; `rotary_fraction` of them are rotated, the first ones (with latent attention,
    `mla`, all of its rotary part is). Layers in `sliding_layers`, counted from 0, see the last `sliding_window` tokens only, the querying
    one included. `num_mtp_layers` layers of multi-token prediction may stand behind the last one in a checkpoint; they are not built.
    """

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
    mla: MlaSpec | None = None
    rotary_fraction: float = 1.0
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    num_mtp_layers: int = 0

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return self.mla.qk_rope_head_dim if self.mla is not None else int(self.head_dim * self.rotary_fraction)

    @property
    def value_dim(self) -> int:
        """Channels of a value head, as many as attention hands to its output projection per head."""
        return self.mla.v_head_dim if self.mla is not None else self.head_dim

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor parallel size."""
        return -(-self.vocab_size // tp) * tp


def read_model_spec(path: Path) -> ModelSpec:
    """Read the architecture of the Hugging Face directory `path` from its config.json; weights are not touched.

    Raises UserError when the directory or config.json is missing or malformed, when the architecture is not supported, and for
    every key that changes the function of the network in a way that is not supported or is not known.
    """
    return parse_model_spec(read_config(path), origin=str(path / "config.json"))


def parse_model_spec(config: Mapping[str, Any], *, origin: str) -> ModelSpec:
    """The architecture that the content of a config.json describes; `origin` names the file in errors. Raises UserError."""
    family = _family(config, origin)
    _account_for_keys(config, family, origin)
    hidden_size, num_heads = positive_int(config, "hidden_size", origin), positive_int(config, "num_attention_heads", origin)
    num_kv_heads = positive_int(config, "num_key_value_heads", origin, default=num_heads)
    if num_heads % num_kv_heads:
        raise UserError(f"{origin} has {num_heads} attention heads for {num_kv_heads} key-value heads, needs a multiple; correct the file")
    num_layers = positive_int(config, "num_hidden_layers", origin)
    max_position_embeddings = positive_int(config, "max_position_embeddings", origin, default=32768)
    mla = parse_mla(config, origin) if family.mla else None
    interleaved = mla is not None and bool(config.get("rope_interleave", True))
    window, windowed = parse_sliding_window(config, origin, num_layers=num_layers, supported=family.sliding_window)
    head_dim = positive_int(config, "head_dim", origin, default=family.default_head_dim or hidden_size // num_heads)
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=positive_int(config, "vocab_size", origin),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        # Latent attention expands keys and values for every query head, and its config.json gives head_dim another meaning.
        num_kv_heads=num_kv_heads if mla is None else num_heads,
        head_dim=head_dim if mla is None else mla.qk_head_dim,
        ffn_hidden_size=positive_int(config, "intermediate_size", origin),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias")) if family.qkv_bias is None else family.qkv_bias,
        qk_norm=bool(config.get("use_qk_norm")) if family.qk_norm is None else family.qk_norm,
        max_position_embeddings=max_position_embeddings,
        rotary=parse_rotary(config, origin, max_position_embeddings=max_position_embeddings, interleaved=interleaved),
        moe=parse_moe(config, origin, num_layers=num_layers, score_function=family.router) if family.router is not None else None,
        mla=mla,
        rotary_fraction=parse_rotary_fraction(config, origin, default=family.default_rotary_fraction),
        sliding_window=window,
        sliding_layers=windowed,
        num_mtp_layers=next((int(config[key]) for key in MTP_KEYS if config.get(key)), 0),
    )


def _family(config: Mapping[str, Any], origin: str) -> Family:
    names = config.get("architectures") or ["none"]
    known = [FAMILIES[name] for name in names if name in FAMILIES]
    if not known:
        raise UserError(f"{origin} names architecture {', '.join(map(str, names))}, supported are {', '.join(FAMILIES)}; use one of them")
    return known[0]


def _account_for_keys(config: Mapping[str, Any], family: Family, origin: str) -> None:
    """Refuse what would be silently ignored: an unsupported value, or a key that nothing here knows and that is switched on."""
    for key, needed in family.fixed_keys.items():
        value = config.get(key)
        if value is not None and value != needed:
            raise UserError(f"{origin} sets {key} to {value!r}, only {needed!r} is supported; use another model")
    strangers = [key for key in config if key not in family.known_keys and config[key] not in (None, False, [], {})]
    if strangers:
        raise UserError(
            f"{origin} has the key {strangers[0]} = {config[strangers[0]]!r}, whose effect on {family.architecture} is not known here; "
            "remove it from the file if it does not change what the model computes"
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
    check_expert_layout(spec.moe, topology)
    checkpoint = _checkpoint_fields(spec) | attention_fields(spec, attention=attention, cp=topology.cp)
    fixed = checkpoint | _topology_fields(topology, dtype)
    if attention == "torch":
        # The torch layers have one module for each expert.
        fixed["moe_grouped_gemm"] = False
    config_class = MLATransformerConfig if spec.mla is not None else TransformerConfig
    checked = {name: _checked_override(name, value, config_class) for name, value in overrides.items()}
    for name, value in checked.items():
        if name in fixed and fixed[name] != value:
            owner = "checkpoint" if name in checkpoint else "trainer, with this topology, dtype and device,"
            raise UserError(f"model.megatron.{name} is {value!r}, but the {owner} needs {fixed[name]!r}; remove this override")
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16 warns about its own default of a field that nobody set.
            warnings.filterwarnings("ignore", message="full scope is deprecated.*")
            config = config_class(**(_default_fields(spec, attention) | checked | fixed))
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(f"megatron-core refuses this model configuration: {error}; change model.megatron or training.topology") from error
    check_routing(config)
    check_recompute(config)
    stages = config.virtual_pipeline_model_parallel_size or 1
    if stages != topology.vpp:
        raise UserError(
            f"model.megatron.pipeline_model_parallel_layout has {stages} virtual stages on each pipeline rank, but vpp is {topology.vpp}; "
            f"set training.topology.vpp to {stages}"
        )
    return config


def _checkpoint_fields(spec: ModelSpec) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "layernorm_epsilon": spec.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        "mtp_num_layers": None,
        # Its absence leaves the tensor-parallel marks off the parameters, and the gradient norm under tp is silently wrong.
        "perform_initialization": True,
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
    }
    if spec.moe is not None:
        values |= moe_fields(spec.moe, num_layers=spec.num_layers)
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
        "num_microbatches_with_partial_activation_checkpoints": None,
    }
    if topology.vpp > 1:
        # Two messages between the same pair of stages in one batch give wrong gradients.
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": False}
        # The trainer fills up the micro-batches of a step to a multiple of it.
        values["microbatch_group_size_per_vp_stage"] = topology.pp
    if local_device().kind == "cpu":
        # Freed outputs give wrong gradients with interleaved stages under gloo.
        values |= {"use_cpu_initialization": True, "deallocate_pipeline_outputs": False}
    return values


def _default_fields(spec: ModelSpec, attention: Attention) -> dict[str, Any]:
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
        "moe_router_load_balancing_type": BALANCED_BY,
        "batch_p2p_sync": False,
        "deallocate_pipeline_outputs": True,
        # megatron refuses its own default with pipelines, also for a model without experts.
        "moe_token_dispatcher_type": "alltoall",
        **(default_moe_fields(grouped=attention == "transformer_engine") if spec.moe is not None else {}),
    }


def _checked_override(name: str, value: Any, config_class: type[TransformerConfig]) -> Any:
    known = [field.name for field in fields(config_class)]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"the closest name is {close[0]}" if close else "see its documentation for the names"
        raise UserError(f"model.megatron.{name} is not a field of megatron-core's TransformerConfig; {hint}")
    hint = typing.get_type_hints(config_class)[name]
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise UserError(f"model.megatron.{name} is {value!r}: {error.errors()[0]['msg']}; give a value of that type") from error
