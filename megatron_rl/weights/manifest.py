"""Which weights the trainer exports, from the architecture alone: no rank has to gather anything to know it."""

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import rules, tensor_shapes
from megatron_rl.weights.bucket import WeightSpec


def make_manifest(spec: ModelSpec, *, dtype: str) -> tuple[WeightSpec, ...]:
    """Every tensor that `export_hf_weights` gives for a model with parameters of `dtype`, such as "bfloat16", in its order."""
    float32 = {name for rule in rules(spec) if rule.float32 for name in rule.hugging_face}
    return tuple(WeightSpec(name, "float32" if name in float32 else dtype, shape) for name, shape in tensor_shapes(spec))
