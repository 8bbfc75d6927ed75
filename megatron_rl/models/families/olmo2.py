"""OLMo-2: norms behind attention and MLP, and one norm over the queries (the keys) of all heads."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    proved=DENSE_LAYOUTS | {"sync"},
    qk_norm=True,
    qk_norm_over_heads=True,
    names=TensorNames(
        attention_input_norm=None,
        attention_output_norm="post_attention_layernorm",
        mlp_input_norm=None,
        mlp_output_norm="post_feedforward_layernorm",
    ),
)
