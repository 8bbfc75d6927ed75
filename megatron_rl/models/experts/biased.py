"""Experts with a bias in the last projection.

Legend: n tokens of an expert, H hidden channels.
"""

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_rl.models.module_specs import submodules_of, with_submodules


class ExpertRowParallelLinear(RowParallelLinear):
    """The last projection of an expert, on expert tensor parallel size 1.

    megatron-core builds biases for this size only. Upstream sums the gradient of the bias over
    tensor parallel ranks, as for a bias on a share of the tokens. But an expert sees all of its
    tokens, and the other ranks have other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self.bias, "sequence_parallel", False)  # noqa: B010 - a mark that megatron reads

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [n, H] without the bias, and the bias [H]."""
        output, bias = super().forward(input_)
        # The caller adds the bias in place. autograd forbids this on a view, such as the output of a sum
        # over one rank.
        return (output if self.explicit_expert_comm else output.clone()), bias


def with_expert_biases(layer: ModuleSpec) -> ModuleSpec:
    """Return the torch layer `layer` of experts, with this module's last projections."""
    mlp = layer.submodules.mlp
    experts = submodules_of(mlp).experts
    assert isinstance(submodules_of(experts), MLPSubmodules), f"megatron-core describes experts by {submodules_of(experts)}"
    return with_submodules(layer, mlp=with_submodules(mlp, experts=with_submodules(experts, linear_fc2=ExpertRowParallelLinear)))
