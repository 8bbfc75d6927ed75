"""GLM-4 (0414): norms before and behind attention and MLP, half of the channels rotated in neighbouring pairs."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family
from megatron_rl.models.tensor_names import TensorNames

FAMILY = Family(
    architecture="Glm4ForCausalLM",
    proved=DENSE_LAYOUTS | {"sync"},
    default_norm_epsilon=1.5625e-7,
    qkv_bias=None,
    default_attention_bias=True,
    default_head_dim=128,
    default_rotary_fraction=0.5,
    rotary_interleaved=True,
    names=TensorNames(attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm", gate_up="gate_up_proj"),
)
