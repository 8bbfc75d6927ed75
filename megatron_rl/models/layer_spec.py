"""The layers of a pipeline stage: megatron-core's local ones with this project's attention and norm, or Transformer Engine's."""

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.models.attention import PackedAttention
from megatron_rl.models.spec import Attention


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm over the last dimension that works under sequence parallelism.

    megatron-core's torch norm refuses sequence parallelism. The attribute `sequence_parallel` on the weight is all that is missing:
    it makes megatron sum the weight's gradient over tensor parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - a mark that megatron reads, no attribute of Parameter


def layer_specs(config: TransformerConfig, *, attention: Attention, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers that this pipeline rank builds for one of its virtual stages, and the norm after them."""
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    arguments = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm, "qk_layernorm": config.qk_layernorm}
    if attention == "transformer_engine":
        # Transformer Engine is not importable everywhere, and its names exist only where it is.
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules([get_gpt_layer_with_transformer_engine_spec(**arguments)] * num_layers, layer_norm=TENorm)
    layer = _torch_layer(get_gpt_layer_local_spec(normalization="RMSNorm", **arguments), qk_norm=config.qk_layernorm)
    return TransformerBlockSubmodules([layer] * num_layers, layer_norm=RMSNorm)


def _torch_layer(layer: ModuleSpec, *, qk_norm: bool) -> ModuleSpec:
    """Replace attention and norms of a local layer; nothing else differs from upstream's."""
    attention = layer.submodules.self_attention
    norms = {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if qk_norm else {}
    attention = dataclasses.replace(
        attention, submodules=dataclasses.replace(attention.submodules, core_attention=PackedAttention, **norms)
    )
    submodules = dataclasses.replace(layer.submodules, self_attention=attention, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm)
    return dataclasses.replace(layer, submodules=submodules)
