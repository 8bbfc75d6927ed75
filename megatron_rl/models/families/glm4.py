"""GLM-4 (0414): norms before and behind attention and MLP, half of the channels rotated in neighbouring pairs."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="Glm4ForCausalLM",
    proved=DENSE_LAYOUTS | {"sync"},
    qkv_bias=None,
    partly_rotated=True,
    rotary_interleaved=True,
    names=TensorNames(attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm", gate_up="gate_up_proj"),
)
