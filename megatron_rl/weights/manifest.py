"""Which weights the trainer exports, from the architecture alone: no rank has to gather anything to know it."""

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import rules
from megatron_rl.weights.bucket import WeightSpec


def make_manifest(spec: ModelSpec, *, dtype: str) -> tuple[WeightSpec, ...]:
    """Every tensor that `export_hf_weights` gives for a model with parameters of `dtype`, such as "bfloat16", in its order."""
    return tuple(
        WeightSpec(tensor.name, "float32" if rule.float32 else dtype, tensor.shape)
        for rule in rules(spec)
        if rule.exported
        for tensor in rule.tensors
    )
