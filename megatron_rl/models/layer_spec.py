"""The layers of a pipeline stage: megatron-core's local ones with this project's attention and norm, or Transformer Engine's.

Legend: n tokens of an expert, H hidden channels.
"""

import dataclasses
import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_rl.models.attention.attention_choice import Attention
from megatron_rl.models.attention.latent import LatentAttention
from megatron_rl.models.attention.packed import PackedAttention
from megatron_rl.models.experts.moe_fields import has_experts
from megatron_rl.models.experts.router import PackedRouter, RoutedLayer
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.norms import AttentionWithNormsOverHeads, NormedRowParallelLinear, RMSNorm


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
        layer = get_gpt_layer_with_transformer_engine_spec(**arguments)
    else:
        layer = _torch_layer(get_gpt_layer_local_spec(normalization="RMSNorm", **arguments), spec, config)
    if issubclass(layer.submodules.self_attention.module, MultiLatentAttention):
        upstream = layer.submodules.self_attention
        assert upstream.module is MLASelfAttention, f"megatron-core builds latent attention as {upstream.module.__name__}"
        layer = _with(layer, self_attention=dataclasses.replace(upstream, module=LatentAttention))
    if experts:
        layer = _with(dataclasses.replace(layer, module=RoutedLayer), mlp=_with(layer.submodules.mlp, router=PackedRouter))
    return layer


def _torch_layer(layer: ModuleSpec, spec: ModelSpec, config: TransformerConfig) -> ModuleSpec:
    """Replace attention, norms and biased experts of a local layer; nothing else differs from upstream's."""
    names, attention, mlp = spec.names, layer.submodules.self_attention, layer.submodules.mlp
    head_norms = ("q_layernorm", "kv_layernorm" if config.multi_latent_attention else "k_layernorm") if config.qk_layernorm else ()
    attention = _with(attention, core_attention=PackedAttention, **dict.fromkeys(head_norms, RMSNorm))
    if spec.qk_norm_over_heads:
        attention = dataclasses.replace(attention, module=AttentionWithNormsOverHeads)
    if names.attention_output_norm is not None:
        attention = _with(attention, linear_proj=NormedRowParallelLinear)
    if names.mlp_output_norm is not None:
        mlp = _with(mlp, linear_fc2=NormedRowParallelLinear)
    if spec.linear_bias and isinstance(_submodules(mlp), MoESubmodules):
        experts = _submodules(mlp).experts
        assert isinstance(_submodules(experts), MLPSubmodules), f"megatron-core describes experts by {_submodules(experts)}"
        mlp = _with(mlp, experts=_with(experts, linear_fc2=ExpertRowParallelLinear))
    return _with(
        layer,
        self_attention=attention,
        mlp=mlp,
        input_layernorm=IdentityOp if names.attention_input_norm is None else RMSNorm,
        pre_mlp_layernorm=IdentityOp if names.mlp_input_norm is None else RMSNorm,
    )


def _submodules(part: Any) -> Any:
    """Return the submodules of a ModuleSpec, or since 0.18 of a constructor with arguments bound; None without."""
    return part.submodules if isinstance(part, ModuleSpec) else part.keywords.get("submodules")


def _with(part: Any, **changes: Any) -> Any:
    submodules = dataclasses.replace(_submodules(part), **changes)
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, submodules=submodules)
    return functools.partial(part.func, *part.args, **{**part.keywords, "submodules": submodules})


class ExpertRowParallelLinear(RowParallelLinear):
    """The last projection of an expert, on expert tensor parallel size 1.

    megatron-core builds biases for this size only. Upstream sums the gradient of the bias over
    tensor parallel ranks, as for a bias on a share of the tokens. But an expert sees all of its
    tokens, and the other ranks have other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self.bias, "sequence_parallel", False)  # noqa: B010 - a mark that megatron reads

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [n, H] without the bias, and the bias [H]."""
        output, bias = super().forward(input_)
        # The caller adds the bias in place. autograd forbids this on a view, such as the output of a sum
        # over one rank.
        return (output if self.explicit_expert_comm else output.clone()), bias
