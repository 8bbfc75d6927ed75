"""The marks on parameters for megatron-core's sums of gradients and gradient norm over ranks.

The weight table sets and checks the marks. Gradients are clipped by the gradient norm, and
`tensor_model_parallel` decides the ranks counting a parameter: every tensor parallel rank with the
mark, rank 0 alone without. With Transformer Engine the builder of a layer sets the marks, and
releases differ. megatron-core 0.16 leaves the mark on the replicated down projections of latent
attention; Transformer Engine 2.18 leaves the mark off the weights of experts.
"""

from collections.abc import Sequence

from megatron_rl.models.build import PolicyModel
from megatron_rl.models.hf_weights import global_parameters, held_name
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Sharding, rules


def mark_parameters(chunks: Sequence[PolicyModel], spec: ModelSpec) -> None:
    """Give every parameter of this rank's chunks the mark of its layout.

    The chunks are not wrapped in DDP yet. The other marks are asserted to fit: `sequence_parallel`
    on parameters replicated over ranks with different tokens, and `allreduce` false on the experts
    of expert parallel ranks.
    """
    config, parameters = chunks[0].config, global_parameters(chunks)
    for rule in rules(spec):
        parameter = parameters.pop(held_name(rule, parameters), None)
        if parameter is None or rule.float32:
            continue  # of another rank, or a router's bias
        replicated = rule.sharding is Sharding.REPLICATED
        marks = vars(parameter)
        # Replicated means the same values on all tensor parallel ranks. Biases of whole experts are
        # different: each rank has its own.
        marks["tensor_model_parallel"] = not replicated or rule.of_expert
        sums_over_tokens, own_group = bool(marks.get("sequence_parallel", False)), not marks.get("allreduce", True)
        assert sums_over_tokens == (config.sequence_parallel and replicated and not rule.of_expert), (
            f"{rule.megatron} is {rule.sharding.value} with sequence parallelism {config.sequence_parallel}, but its mark "
            f"sequence_parallel is {sums_over_tokens}: its gradient would not be the sum over ranks"
        )
        assert own_group == (rule.of_expert and config.expert_model_parallel_size > 1), (
            f"{rule.megatron} is {'' if rule.of_expert else 'not '}of an expert, but its mark allreduce is {not own_group}: its gradient "
            "would be summed over the wrong ranks"
        )
    assert not parameters, f"the weight table has no row for {next(iter(parameters))}"
