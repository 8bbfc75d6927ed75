"""GLM-4 9B of 2024 as in transformers.

Half of the channels are rotated in neighbouring pairs, and gate and up are in one tensor.
"""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family
from megatron_rl.models.tensor_names import TensorNames

FAMILY = Family(
    architecture="GlmForCausalLM",
    proved=DENSE_LAYOUTS,
    not_synced="SGLang has no model of its own for it, and refuses that of transformers 5: Unsupported TP style 'colwise_gather_output'",
    default_norm_epsilon=1.5625e-7,
    qkv_bias=None,
    default_attention_bias=True,
    default_head_dim=128,
    default_rotary_fraction=0.5,
    rotary_interleaved=True,
    names=TensorNames(gate_up="gate_up_proj"),
)
