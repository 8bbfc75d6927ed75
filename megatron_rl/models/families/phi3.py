"""Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, optional windows."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="Phi3ForCausalLM",
    proved=DENSE_LAYOUTS | {"sync"},
    partly_rotated=True,
    windows="everywhere",
    # Read with longrope; meaningless without longrope.
    ignored=frozenset(["original_max_position_embeddings"]),
    fixed={"embd_pdrop": 0.0, "resid_pdrop": 0.0, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
    names=TensorNames(qkv="qkv_proj", gate_up="gate_up_proj"),
)
