"""Mixtral: Mistral with experts in every layer, whose taken scores sum to 1."""

from megatron_rl.models.families.family import MIXTURE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="MixtralForCausalLM",
    proved=MIXTURE_LAYOUTS | {"sync"},
    windows="everywhere",
    router="softmax",
    expert_width_key="intermediate_size",
    normalize_top_k=True,
    # Noise on the router's input would differ between two runs.
    fixed={"router_jitter_noise": 0.0},
    names=TensorNames(mixture="block_sparse_moe", expert=("w1", "w3", "w2")),
)
