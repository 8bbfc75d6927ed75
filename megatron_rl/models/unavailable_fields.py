"""Fields of megatron-core's TransformerConfig with an effect only after its own checks.

Such fields pass the checks, then fail or do nothing when the model is built or run.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import Attention, transformer_engine_here

NEEDS_TRANSFORMER_ENGINE = frozenset(
    [
        *("fp8", "fp4", "apply_rope_fusion", "fused_single_qkv_rope", "gradient_accumulation_fusion", "use_te_activation_func"),
        *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "moe_enable_deepep", "overlap_moe_expert_parallel_comm"),
        *("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "use_te_rng_tracker", "delay_wgrad_compute"),
        *("cpu_offloading", "fine_grained_activation_offloading"),
    ]
)
"""Kernels of GPUs, which the torch layers do not call: on, some end in upstream's traceback, the others change nothing."""

_REFUSED = {
    "config_logger_dir": "the process groups that it would write cannot be written",
    "heterogeneous_block_specs": "every layer here is that of the checkpoint's config.json",
    "hybrid_context_parallel": "micro-batches are packed and balanced before megatron-core sees them",
    "tp_comm_overlap": "megatron-core leaves the buffers of Transformer Engine's overlap to the training script, and none are made here",
    "test_mode": "the models here have no biases for it to look at",
}
_NARROW = frozenset({"fp8", "fp4"})
"""Products of narrow numbers, which Transformer Engine has for multiples of 8 tokens alone (its utils.py, assert_dim_for_fp8_exec)."""
_APEX_KERNELS = "fused_weight_gradient_mlp_cuda"
"""What megatron-core imports for it in its linear layers, of which the head is one with Transformer Engine, too."""
_OFF = (None, False, 0, "", "none")
_DEFAULT_RECOMPUTED = ["core_attn"]
"""What megatron-core fills in, whatever is recomputed."""
_RECOMPUTED_BY_TRANSFORMER_ENGINE = frozenset({"layernorm", "moe_act"})
"""Modules whose checkpoint drops its own output, which megatron-core does with the state of Transformer Engine alone."""


def check_available(overrides: Mapping[str, Any], *, attention: Attention, bf16: bool) -> None:
    """Raise UserError for a field turned on in `overrides` and unusable here or with `attention`."""
    for name, value in overrides.items():
        obstacle = None if value in _OFF else _obstacle(name, value, attention=attention, bf16=bf16)
        if obstacle is not None:
            raise UserError(f"model.megatron.{name} is {value!r}{obstacle}")


def _obstacle(name: str, value: Any, *, attention: Attention, bf16: bool) -> str | None:
    """Return the reason and the fix for an unusable field, else None."""
    if name in _REFUSED:
        return f", which is not supported: {_REFUSED[name]}; remove it"
    if attention != "torch":
        if name in _NARROW:
            return (
                ", but Transformer Engine multiplies such matrices for multiples of 8 tokens only, and a micro-batch has as many as its "
                "sequences; remove it"
            )
        if name == "gradient_accumulation_fusion" and transformer_engine_here() and find_spec(_APEX_KERNELS) is None:
            return (
                f", which needs Apex built with its CUDA extensions ({_APEX_KERNELS}), but that is not installed; remove it, or build "
                "Apex from NVIDIA's repository"
            )
        return None
    if name in NEEDS_TRANSFORMER_ENGINE:
        return (
            ", which needs a GPU with Transformer Engine, but the layers are torch's; remove it, or set model.attention to "
            "transformer_engine where that is installed"
        )
    if name == "moe_token_dispatcher_type" and value == "flex":
        return ", which needs DeepEP's kernels for GPUs, but the layers are torch's; set it to alltoall or allgather"
    if name == "fp32_residual_connection" and bf16:
        return " with bfloat16 weights, which torch's layers cannot multiply with float32; remove it, or set model.dtype to float32"
    return None


_BACKEND_SWITCHES = {"NVTE_FLASH_ATTN": AttnBackend.flash, "NVTE_FUSED_ATTN": AttnBackend.fused, "NVTE_UNFUSED_ATTN": AttnBackend.unfused}


def check_attention_backend(backend: AttnBackend, *, dtype: torch.dtype, environment: Mapping[str, str]) -> None:
    """Raise UserError unless Transformer Engine's attention is one known kernel for `dtype`.

    Left to choose, Transformer Engine changes silently from flash or cuDNN's attention to a kernel
    writing the whole matrix of scores, whenever a GPU, a library or a shape does not suit the
    faster ones.
    """
    if backend not in _BACKEND_SWITCHES.values():
        raise UserError(
            f"model.megatron.attention_backend is {backend.name}, with which Transformer Engine may take an attention whose memory grows "
            "with the square of the length; set it to fused (cuDNN), flash (where flash-attn is installed) or unfused"
        )
    if dtype is torch.float32 and backend is not AttnBackend.unfused:
        raise UserError(
            f"model.dtype is float32, but Transformer Engine's {backend.name} attention computes bfloat16; set model.dtype to bfloat16, or "
            "model.attention to torch"
        )
    for name, chosen_by in _BACKEND_SWITCHES.items():
        needed = str(int(chosen_by is backend))
        if environment.get(name, needed) != needed:
            raise UserError(
                f"the environment variable {name} is {environment[name]}, but model.megatron.attention_backend {backend.name} needs "
                f"{needed}; unset it"
            )


def check_recompute(config: TransformerConfig) -> None:
    """Raise UserError for units not dividing a stage, and modules never recomputed."""
    if config.recompute_granularity == "full" and config.recompute_method == "uniform":
        _check_units(config)
    modules = config.recompute_modules or _DEFAULT_RECOMPUTED
    if config.recompute_granularity != "selective" and modules != _DEFAULT_RECOMPUTED:
        raise UserError(
            f"model.megatron.recompute_modules is {modules}, which has no effect with recompute_granularity "
            f"{config.recompute_granularity}; set model.megatron.recompute_granularity to selective, or remove recompute_modules"
        )
    lacking = _RECOMPUTED_BY_TRANSFORMER_ENGINE.intersection(modules)
    if config.recompute_granularity == "selective" and lacking and config.transformer_impl == "local" and not transformer_engine_here():
        raise UserError(
            f"model.megatron.recompute_modules has {', '.join(sorted(lacking))}, which megatron-core recomputes with Transformer Engine "
            "only; remove it, or install Transformer Engine"
        )


def _check_units(config: TransformerConfig) -> None:
    unit = config.recompute_num_layers
    if unit in (None, 1):
        return
    if config.pipeline_model_parallel_layout is not None:
        raise UserError(
            f"model.megatron.recompute_num_layers is {unit} with a pipeline_model_parallel_layout, whose stages may have any number of "
            "layers; set recompute_num_layers to 1"
        )
    vpp = config.virtual_pipeline_model_parallel_size
    for pp_rank in range(config.pipeline_model_parallel_size):
        layers = get_num_layers_to_build(config, vp_stage=None if vpp is None else 0, pp_rank=pp_rank)
        if layers % unit:
            # The last unit would run past the stage's layers.
            raise UserError(
                f"model.megatron.recompute_num_layers is {unit} with recompute_method uniform, but pipeline stage {pp_rank} has {layers} "
                f"layers, which are not divisible by it; choose a divisor of {layers}, or recompute_method block"
            )


def without_kernels(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overrides` without fields of a GPU's kernels, to measure a rank on torch's layers."""
    return {
        name: value
        for name, value in overrides.items()
        if name not in NEEDS_TRANSFORMER_ENGINE and value != "flex" and name != "fp32_residual_connection"
    }
