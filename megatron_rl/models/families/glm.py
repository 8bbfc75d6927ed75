"""GLM-4 9B of 2024: half of the channels rotated in neighbouring pairs, gate and up in one tensor."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="GlmForCausalLM",
    proved=DENSE_LAYOUTS,
    not_synced="SGLang has no model of its own for it, and refuses that of transformers 5: Unsupported TP style 'colwise_gather_output'",
    qkv_bias=None,
    partly_rotated=True,
    rotary_interleaved=True,
    names=TensorNames(gate_up="gate_up_proj"),
)
