"""The marks on parameters by which megatron-core sums gradients and their norm over ranks, set and checked by the weight table.

Which rank counts a parameter in the gradient norm, by which gradients are clipped, follows from `tensor_model_parallel`: every tensor
parallel rank counts one that has it, rank 0 alone one that has it not. With Transformer Engine the marks are set by whoever builds a
layer, and releases differ: megatron-core 0.16 leaves it on the replicated down projections of latent attention, Transformer Engine 2.18
leaves it off the weights of experts.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron_rl.models.build import PolicyModel
from megatron_rl.models.hf_weights import global_parameters, held_name
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Rule, Sharding, rules


def mark_parameters(chunks: Sequence[PolicyModel], spec: ModelSpec) -> None:
    """Give every parameter of this rank's chunks, not wrapped in DDP yet, the mark that its layout has.

    Of the other marks it is asserted that they fit: `sequence_parallel` on what is replicated over ranks that have different tokens, and
    `allreduce` false on the experts of expert parallel ranks.
    """
    config = chunks[0].config
    for rule, parameter in _trained(chunks, spec):
        replicated = rule.sharding is Sharding.REPLICATED
        marks = vars(parameter)
        # Tensor parallel ranks have the same of it. Biases of whole experts they have not: those are of each rank's own.
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


def _trained(chunks: Sequence[PolicyModel], spec: ModelSpec) -> Iterator[tuple[Rule, Tensor]]:
    """The parameters of this rank with their rules, without the routers' biases, which have no gradient."""
    parameters = global_parameters(chunks)
    for rule in rules(spec):
        parameter = parameters.pop(held_name(rule, parameters), None)
        if parameter is not None and not rule.float32:
            yield rule, parameter
    assert not parameters, f"the weight table has no row for {next(iter(parameters))}"
