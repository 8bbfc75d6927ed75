"""Gemma-3, text alone: four norms of 1 + weight, scaled embedding, GELU, and layers with a window, rotated by another base."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    config_class="Gemma3TextConfig",
    # Proved with a tied head, as in published models. SGLang omits a separate head, and a run's parity
    # probe refuses this.
    proved=DENSE_LAYOUTS | {"sync"},
    qk_norm=True,
    activation="gelu_pytorch_tanh",
    zero_centered_norms=True,
    scaled_embedding=True,
    query_scalar_key="query_pre_attn_scalar",
    windows="given",
    window_theta_key="rope_local_base_freq",
    # Layer types without `layer_types` follow from the pattern, in transformers' class. The class writes the
    # pattern under its private name beside the resulting types.
    ignored=frozenset(["_sliding_window_pattern", "cache_implementation", "sliding_window_pattern"]),
    # Softcaps are Gemma-2's; Gemma-3 has null there.
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    names=TensorNames(
        attention_output_norm="post_attention_layernorm",
        mlp_input_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    ),
)
