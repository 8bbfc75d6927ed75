"""megatron-core's TransformerConfig for a model in a layout."""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.device import local_device
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_fields import Attention, Capability, attention_fields, lacking_in_transformer_engine
from megatron_rl.models.experts.moe_fields import BALANCED_BY, check_expert_layout, check_routing, default_moe_fields, moe_fields
from megatron_rl.models.model_spec import Activation, ModelSpec
from megatron_rl.models.unavailable_fields import (
    check_attention_backend,
    check_available,
    check_recompute,
    transformer_engine_here,
    without_kernels,
)
from megatron_rl.models.upstream_fields import checked_fields

if TYPE_CHECKING:
    from megatron_rl.config.settings import TopologySettings

DEFAULT_BACKEND = AttnBackend.fused
"""Transformer Engine's attention where model.megatron.attention_backend names none: cuDNN's, which comes with torch."""


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute quick GELU without the compilation at the first call of megatron-core's version."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamped_swiglu": _quick_gelu,
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def resolve_attention(
    choice: Literal["auto", "torch", "transformer_engine"],
    spec: ModelSpec,
    *,
    overrides: Mapping[str, Any],
    cp: int,
    capability: Capability | None,
    installed: bool | None = None,
) -> Attention:
    """Return the attention for the setting `model.attention` on GPUs of this capability.

    A capability of None is a CPU. `overrides` are the fields of `model.megatron`; `installed` is
    about Transformer Engine, by default on this machine. Raises UserError when Transformer Engine
    is requested, by name or by `attention_backend`, and is not installed or does not compute
    `spec`.
    """
    if installed is None:
        installed = transformer_engine_here()
    if choice == "torch" or (choice == "auto" and (capability is None or not installed)):
        return "torch"
    if not installed:
        raise UserError("model.attention is transformer_engine, which is not installed; install it or set model.attention=torch")
    fused = chosen_backend(overrides) is AttnBackend.fused
    lacking = None if capability is None else lacking_in_transformer_engine(spec, cp=cp, capability=capability, fused=fused)
    if lacking is None:
        return "transformer_engine"
    if choice == "auto" and "attention_backend" not in overrides:
        return "torch"
    raise UserError(lacking)


def chosen_backend(overrides: Mapping[str, Any]) -> AttnBackend:
    """Return Transformer Engine's attention chosen by `overrides`, the fields of `model.megatron`."""
    given = {name: value for name, value in overrides.items() if name == "attention_backend"}
    backend: AttnBackend = checked_fields("model.megatron", given, TransformerConfig).get("attention_backend", DEFAULT_BACKEND)
    return backend


def attention_name(attention: Attention, overrides: Mapping[str, Any]) -> str:
    """Return the attention's name as printed by runs and `--check`.

    `overrides` are the fields of `model.megatron`.
    """
    return "torch" if attention == "torch" else f"transformer_engine, {chosen_backend(overrides).name}"


def transformer_config(
    spec: ModelSpec,
    *,
    topology: "TopologySettings",
    dtype: torch.dtype,
    overrides: Mapping[str, Any],
    attention: Attention = "torch",
) -> TransformerConfig:
    """Return megatron-core's configuration of this model in this layout.

    The user's `overrides` have megatron's own field names. Raises UserError for a field absent from
    the installed release (with the closest name), a value of the wrong type, an override
    contradicting the checkpoint, the topology or the dtype (naming both values), and for
    combinations refused by megatron.
    """
    check_expert_layout(spec.moe, topology)
    checkpoint = _checkpoint_fields(spec) | attention_fields(spec, attention=attention)
    fixed = checkpoint | _topology_fields(topology, dtype)
    if attention == "torch":
        # The torch layers have one module for each expert.
        fixed["moe_grouped_gemm"] = False
    config_class = MLATransformerConfig if spec.mla is not None else TransformerConfig
    checked = checked_fields("model.megatron", overrides, config_class)
    for name, value in checked.items():
        if name in fixed and fixed[name] != value:
            owner = "checkpoint" if name in checkpoint else "trainer, with this topology, dtype and device,"
            raise UserError(f"model.megatron.{name} is {value!r}, but the {owner} needs {fixed[name]!r}; remove this override")
    check_available(checked, attention=attention, bf16=dtype is torch.bfloat16)
    # megatron-core looks for kernels on this machine, but the run's machine is another one with the
    # kernels.
    elsewhere = attention == "transformer_engine" and not transformer_engine_here()
    given = without_kernels(checked) if elsewhere else checked
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16 warns about its own default of an unset field.
            warnings.filterwarnings("ignore", message="full scope is deprecated.*")
            config = config_class(**(_default_fields(spec, attention) | given | fixed))
    except (ValueError, AssertionError, TypeError, ImportError, KeyError) as error:
        raise UserError(f"megatron-core refuses this model configuration: {error}; change model.megatron or training.topology") from error
    vars(config).update({name: checked[name] for name in checked.keys() - given.keys()})
    check_routing(config)
    check_recompute(config)
    if attention == "transformer_engine":
        check_attention_backend(config.attention_backend, dtype=dtype, environment=os.environ)
    stages = config.virtual_pipeline_model_parallel_size or 1
    if stages != topology.vpp:
        raise UserError(
            f"model.megatron.pipeline_model_parallel_layout has {stages} virtual stages on each pipeline rank, but vpp is {topology.vpp}; "
            f"set training.topology.vpp to {stages}"
        )
    return config


def _checkpoint_fields(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "layernorm_epsilon": spec.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[spec.activation],
        "add_bias_linear": spec.linear_bias,
        "hidden_dropout": 0.0,
        "layernorm_zero_centered_gamma": spec.zero_centered_norms,
        "apply_residual_connection_post_layernorm": False,
        "glu_linear_offset": 1.0 if spec.activation == "clamped_swiglu" else 0.0,
        "activation_func_clamp_value": spec.activation_limit,
        "mtp_num_layers": None,
        # Without this field the tensor-parallel marks are off. The gradient norm is summed by the marks,
        # and parameter_marks would be the only source.
        "perform_initialization": True,
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
        **moe_fields(spec.moe, num_layers=spec.num_layers),
    }


def _topology_fields(topology: "TopologySettings", dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields fixed by the layout, the dtype, the device and the trainer's loss contract."""
    values: dict[str, Any] = {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
        "context_parallel_size": topology.cp,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.expert_tp,
        "sequence_parallel": topology.sequence_parallel,
        "variable_seq_lengths": topology.pp > 1,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": False,
        # The trainer's losses are shares of an already normalised sum.
        "calculate_per_token_loss": True,
        "num_microbatches_with_partial_activation_checkpoints": None,
        # Ring exchange needs NVIDIA's own build of torch.
        "use_ring_exchange_p2p": False,
    }
    if topology.vpp > 1:
        # Two messages between the same pair of stages in one batch give wrong gradients.
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": False}
        # The trainer fills up the micro-batches of a step to a multiple of this size.
        values["microbatch_group_size_per_vp_stage"] = topology.pp
    elif topology.pp > 1:
        # Schedules without virtual stages refuse the overlap in their first pass.
        values["overlap_p2p_comm"] = False
    if local_device().kind == "cpu":
        # Freed outputs give wrong gradients with interleaved stages under gloo.
        values |= {"use_cpu_initialization": True, "deallocate_pipeline_outputs": False}
    return values


def _default_fields(spec: ModelSpec, attention: Attention) -> dict[str, Any]:
    """Return the fields left by megatron to its scripts.

    Fused kernels are on when available: with Transformer Engine on a GPU.
    """
    fused = local_device().kind == "cuda" and attention == "transformer_engine"
    return {
        "transformer_impl": "transformer_engine" if attention == "transformer_engine" else "local",
        **({"attention_backend": DEFAULT_BACKEND} if attention == "transformer_engine" else {}),
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
