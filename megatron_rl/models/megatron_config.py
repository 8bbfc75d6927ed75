"""megatron-core's TransformerConfig for a model in a layout."""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import DEFAULT_BACKEND, Attention, transformer_engine_here
from megatron_rl.models.experts.moe_fields import BALANCED_BY, check_expert_layout, check_routing
from megatron_rl.models.experts.moe_spec import MoeSpec
from megatron_rl.models.model_spec import Activation, MlaSpec, ModelSpec
from megatron_rl.models.unavailable_fields import check_attention_backend, check_available, check_recompute, without_kernels
from megatron_rl.models.upstream_fields import checked_fields
from megatron_rl.system.device import local_device


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute quick GELU without the compilation at the first call of megatron-core's version."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamped_swiglu": _quick_gelu,
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def transformer_config(
    spec: ModelSpec,
    *,
    topology: TopologySettings,
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
    checkpoint = _checkpoint_fields(spec) | _attention_fields(spec, attention=attention)
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
    config = _constructed(config_class, _default_fields(spec, attention) | given | fixed)
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


def _constructed(config_class: type[TransformerConfig], fields: Mapping[str, Any]) -> TransformerConfig:
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16 warns about its own default of an unset field.
            warnings.filterwarnings("ignore", message="full scope is deprecated.*")
            return config_class(**fields)
    except (ValueError, AssertionError, TypeError, ImportError, KeyError) as error:
        raise UserError(f"megatron-core refuses this model configuration: {error}; change model.megatron or training.topology") from error


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
        # and mark_parameters would be the only source.
        "perform_initialization": True,
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
        **_moe_fields(spec.moe, num_layers=spec.num_layers),
    }


def _attention_fields(spec: ModelSpec, *, attention: Attention) -> dict[str, Any]:
    """Return the fields of attention; with latent attention those of MLATransformerConfig."""
    values: dict[str, Any] = {
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "add_qkv_bias": spec.qkv_bias,
        # Of single heads: see AttentionWithNormsOverHeads.
        "qk_layernorm": (spec.qk_norm and not spec.qk_norm_over_heads) or spec.mla is not None,
        "attention_dropout": 0.0,
        "softmax_scale": spec.softmax_scale,
        "softmax_type": "learnable" if spec.attention_sinks else "vanilla",
        "window_size": None,
        "rotary_interleaved": False,
        "no_rope_freq": None,
        "qk_l2_norm": False,
        "attention_output_gate": False,
        "apply_query_key_layer_scaling": False,
        "multi_latent_attention": spec.mla is not None,
    }
    if spec.mla is not None:
        return values | _latent_fields(spec.mla, spec)
    return values | (_transformer_engine_fields(spec) if attention == "transformer_engine" else {})


def _latent_fields(mla: MlaSpec, spec: ModelSpec) -> dict[str, Any]:
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # Rotation is this project's. Only the softmax scale of megatron's rotation is used, computed from
        # the last two fields.
        "rope_type": "rope",
        "apply_rope_fusion": False,
        "rotary_scaling_factor": spec.rotary.factor,
        "mscale_all_dim": spec.rotary.mscale_all_dim,
    }


def _transformer_engine_fields(spec: ModelSpec) -> dict[str, Any]:
    """There megatron rotates, without YaRN's factor on cosine and sine, and the windows are Transformer Engine's."""
    values: dict[str, Any] = {}
    if spec.rotary.attention_factor != 1.0:
        # Queries and keys are each scaled by the factor, so scores are scaled by its square.
        values["softmax_scale"] = spec.rotary.attention_factor**2 / spec.head_dim**0.5
    if spec.sliding_window is not None:
        values["window_size"] = (spec.sliding_window - 1, 0)
        values["window_attn_skip_freq"] = [int(layer in spec.sliding_layers) for layer in range(spec.num_layers)]
    return values


def _moe_fields(moe: MoeSpec | None, *, num_layers: int) -> dict[str, Any]:
    """Return the fields fixed by these experts; `moe` None is a model without experts."""
    if moe is None:
        return {"num_moe_experts": None}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [0 if moe.is_dense(layer) else 1 for layer in range(num_layers)],
        "moe_router_topk": moe.num_experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_score_function": moe.score_function,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.groups_per_token,
        "moe_router_topk_scaling_factor": None if moe.routed_scaling_factor == 1.0 else moe.routed_scaling_factor,
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalize_top_k,
        "moe_router_force_load_balancing": False,
        "moe_apply_probs_on_input": False,
        "moe_latent_size": None,
    }


def _topology_fields(topology: TopologySettings, dtype: torch.dtype) -> dict[str, Any]:
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
    """Return the fields left to scripts; with Transformer Engine kernels are fused and a rank's experts computed in one call."""
    with_te = attention == "transformer_engine"
    fused = local_device().kind == "cuda" and with_te
    values: dict[str, Any] = {
        "transformer_impl": "transformer_engine" if with_te else "local",
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
    }
    if with_te:
        values["attention_backend"] = DEFAULT_BACKEND
    if spec.moe is not None:
        values["moe_grouped_gemm"] = with_te
        # Sums of many products decide the choice of experts: in bfloat16 near ties would fall either way.
        values["moe_router_dtype"] = "fp32"
        # Pre-training moves the bias until all experts are used alike. A prompt set of RL is narrow. The
        # bias would push its tokens away from the best experts, and change the policy behind the
        # objective's back.
        values["moe_router_bias_update_rate"] = 0.0
    return values
