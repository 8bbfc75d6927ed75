"""megatron-core's TransformerConfig for a model in a layout."""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.device import chosen_backends, local_device
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_fields import Attention, attention_fields
from megatron_rl.models.experts.moe_fields import BALANCED_BY, check_expert_layout, check_routing, default_moe_fields, moe_fields
from megatron_rl.models.model_spec import Activation, ModelSpec
from megatron_rl.models.unavailable_fields import check_attention_backend, check_available, check_recompute
from megatron_rl.models.upstream_fields import checked_fields

if TYPE_CHECKING:
    from megatron_rl.config.settings import TopologySettings

DEFAULT_BACKEND = AttnBackend.fused
"""Transformer Engine's attention where model.megatron.attention_backend names none: cuDNN's, which comes with torch."""


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """megatron-core's own is compiled at its first call."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamped_swiglu": _quick_gelu,
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def resolve_attention(
    choice: Literal["auto", "torch", "transformer_engine"], *, device_kind: Literal["cpu", "cuda"] | None = None
) -> Attention:
    """The attention to build for the setting `model.attention`, on a device of this kind, by default the one here.

    Raises UserError for Transformer Engine that is not installed.
    """
    installed = chosen_backends()["transformer-engine"] != "not installed"
    if choice == "transformer_engine" and not installed:
        raise UserError("model.attention is transformer_engine, which is not installed; install it or set model.attention=torch")
    if choice == "auto":
        return "transformer_engine" if installed and (device_kind or local_device().kind) == "cuda" else "torch"
    return choice


def attention_name(attention: Attention, overrides: Mapping[str, Any]) -> str:
    """The attention as runs and `--check` print it; `overrides` are the fields of `model.megatron`."""
    if attention == "torch":
        return "torch"
    chosen = checked_fields("model.megatron", overrides, TransformerConfig).get("attention_backend", DEFAULT_BACKEND)
    return f"transformer_engine, {chosen.name}"


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
    checked = checked_fields("model.megatron", overrides, config_class)
    check_available(checked, attention=attention, bf16=dtype is torch.bfloat16)
    for name, value in checked.items():
        if name in fixed and fixed[name] != value:
            owner = "checkpoint" if name in checkpoint else "trainer, with this topology, dtype and device,"
            raise UserError(f"model.megatron.{name} is {value!r}, but the {owner} needs {fixed[name]!r}; remove this override")
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16 warns about its own default of a field that is not set.
            warnings.filterwarnings("ignore", message="full scope is deprecated.*")
            config = config_class(**(_default_fields(spec, attention) | checked | fixed))
    except (ValueError, AssertionError, TypeError, ImportError, KeyError) as error:
        raise UserError(f"megatron-core refuses this model configuration: {error}; change model.megatron or training.topology") from error
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
        # Its absence leaves tensor-parallel marks off, by which the gradient norm is summed: parameter_marks would be their only source.
        "perform_initialization": True,
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
        **moe_fields(spec.moe, num_layers=spec.num_layers),
    }


def _topology_fields(topology: "TopologySettings", dtype: torch.dtype) -> dict[str, Any]:
    """What the layout, the dtype, the device and the trainer's loss contract leave no choice about."""
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
        # The trainer's losses are shares of a sum that is already normalised.
        "calculate_per_token_loss": True,
        "num_microbatches_with_partial_activation_checkpoints": None,
        # It needs a build of torch of NVIDIA's own.
        "use_ring_exchange_p2p": False,
    }
    if topology.vpp > 1:
        # Two messages between the same pair of stages in one batch give wrong gradients.
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": False}
        # The trainer fills up the micro-batches of a step to a multiple of it.
        values["microbatch_group_size_per_vp_stage"] = topology.pp
    elif topology.pp > 1:
        # Schedules without virtual stages refuse it in their first pass.
        values["overlap_p2p_comm"] = False
    if local_device().kind == "cpu":
        # Freed outputs give wrong gradients with interleaved stages under gloo.
        values |= {"use_cpu_initialization": True, "deallocate_pipeline_outputs": False}
    return values


def _default_fields(spec: ModelSpec, attention: Attention) -> dict[str, Any]:
    """What megatron leaves to its scripts. Fused kernels are on where they exist: with Transformer Engine on a GPU."""
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
