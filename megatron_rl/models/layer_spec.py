"""The layers of a pipeline stage: megatron-core's local ones with this project's attention and norm, or Transformer Engine's."""

import dataclasses

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.models.attention.attention_fields import Attention
from megatron_rl.models.attention.latent import LatentAttention
from megatron_rl.models.attention.packed import PackedAttention
from megatron_rl.models.experts.biased import with_expert_biases
from megatron_rl.models.experts.moe_fields import has_experts
from megatron_rl.models.experts.router import with_packed_router
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.module_specs import with_submodules
from megatron_rl.models.norms import RMSNorm, with_norms


def layer_specs(spec: ModelSpec, config: TransformerConfig, *, attention: Attention, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of one virtual stage of this pipeline rank, and the norm after the layers."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [_layer(spec, config, attention, experts=has_experts(config, layer)) for layer in here]
    if attention == "transformer_engine":
        # Transformer Engine is not importable everywhere, and its names exist only after an import.
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules(layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(layers, layer_norm=RMSNorm)


def _layer(spec: ModelSpec, config: TransformerConfig, attention: Attention, *, experts: bool) -> ModuleSpec:
    arguments = {
        "num_experts": config.num_moe_experts if experts else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if attention == "transformer_engine":
        layer = _with_latent_attention(get_gpt_layer_with_transformer_engine_spec(**arguments))
    else:
        layer = _torch_layer(get_gpt_layer_local_spec(normalization="RMSNorm", **arguments), config)
        layer = with_norms(layer, spec)
        if experts and spec.linear_bias:
            layer = with_expert_biases(layer)
    return with_packed_router(layer)


def _torch_layer(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Replace attention and norms of a local layer; nothing else differs from upstream's."""
    attention = layer.submodules.self_attention
    names = ("q_layernorm", "kv_layernorm" if config.multi_latent_attention else "k_layernorm")
    norms = dict.fromkeys(names, RMSNorm) if config.qk_layernorm else {}
    attention = with_submodules(attention, core_attention=PackedAttention, **norms)
    return _with_latent_attention(with_submodules(layer, self_attention=attention, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm))


def _with_latent_attention(layer: ModuleSpec) -> ModuleSpec:
    """Replace upstream's latent attention, where present, by this project's."""
    attention = layer.submodules.self_attention
    if not issubclass(attention.module, MultiLatentAttention):
        return layer
    assert attention.module is MLASelfAttention, f"megatron-core builds latent attention as {attention.module.__name__}"
    return with_submodules(layer, self_attention=dataclasses.replace(attention, module=LatentAttention))
