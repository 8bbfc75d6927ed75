"""Fields of megatron-core's TransformerConfig that pass its own checks and fail, or do nothing, when the model is built or run."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_fields import Attention

NEEDS_TRANSFORMER_ENGINE = frozenset(
    {
        "cpu_offloading",
        "cuda_graph_impl",
        "delay_wgrad_compute",
        "enable_cuda_graph",
        "external_cuda_graph",
        "fine_grained_activation_offloading",
        "fp4",
        "fp8",
        "fused_single_qkv_rope",
        "gradient_accumulation_fusion",
        "moe_enable_deepep",
        "moe_permute_fusion",
        "moe_router_fusion",
        "overlap_moe_expert_parallel_comm",
        "tp_comm_overlap",
        "use_te_activation_func",
        "use_te_rng_tracker",
    }
)
"""Kernels of GPUs, which the torch layers do not call: on, some end in upstream's traceback, the others change nothing."""

_REFUSED = {
    "config_logger_dir": "the process groups that it would write cannot be written",
    "heterogeneous_block_specs": "every layer here is that of the checkpoint's config.json",
    "hybrid_context_parallel": "micro-batches are packed and balanced before megatron-core sees them",
    "test_mode": "the models here have no biases for it to look at",
}
_OFF = (None, False, 0, "", "none")


def check_available(overrides: Mapping[str, Any], *, attention: Attention, bf16: bool) -> None:
    """Raise UserError for a field that is on in `overrides` and cannot work here or with this `attention`."""
    for name, value in overrides.items():
        if value in _OFF:
            continue
        if name in _REFUSED:
            raise UserError(f"model.megatron.{name} is {value!r}, which is not supported: {_REFUSED[name]}; remove it")
        if attention != "torch":
            continue
        if name in NEEDS_TRANSFORMER_ENGINE:
            raise UserError(
                f"model.megatron.{name} is {value!r}, which needs a GPU with Transformer Engine, but the layers are torch's; remove it, or "
                "set model.attention to transformer_engine where that is installed"
            )
        if name == "moe_token_dispatcher_type" and value == "flex":
            raise UserError(
                "model.megatron.moe_token_dispatcher_type is 'flex', which needs DeepEP's kernels for GPUs, but the layers are torch's; "
                "set it to alltoall or allgather"
            )
        if name == "fp32_residual_connection" and bf16:
            raise UserError(
                "model.megatron.fp32_residual_connection is True with bfloat16 weights, which torch's layers cannot multiply with float32; "
                "remove it, or set model.dtype to float32"
            )


def without_kernels(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` without what needs a GPU's kernels, for measuring a rank on torch's layers."""
    return {
        name: value
        for name, value in overrides.items()
        if name not in NEEDS_TRANSFORMER_ENGINE and value != "flex" and name != "fp32_residual_connection"
    }
