"""Experts whose last projection has a bias.

Legend: n tokens of an expert, H hidden channels.
"""

import dataclasses
from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


class ExpertRowParallelLinear(RowParallelLinear):
    """The last projection of an expert, on expert tensor parallel size 1, the only one for which megatron-core builds biases.

    Upstream lets the gradient of the bias be summed over tensor parallel ranks, as that of a bias on a share of the tokens; but an expert
    sees all of its tokens, and those ranks have other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self.bias, "sequence_parallel", False)  # noqa: B010 - a mark that megatron reads

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [n, H] without the bias, and the bias [H]."""
        output, bias = super().forward(input_)
        # The caller adds the bias in place, which autograd forbids on the output of a sum over one rank, a view.
        return (output if self.explicit_expert_comm else output.clone()), bias


def with_expert_biases(layer: ModuleSpec) -> ModuleSpec:
    """The torch layer `layer`, which has experts, with these as their last projections."""
    mlp = layer.submodules.mlp
    experts = mlp.submodules.experts
    assert isinstance(experts.submodules, MLPSubmodules), f"megatron-core describes experts by {experts.submodules}"
    projections = dataclasses.replace(experts.submodules, linear_fc2=ExpertRowParallelLinear)
    described = dataclasses.replace(mlp.submodules, experts=dataclasses.replace(experts, submodules=projections))
    mlp = dataclasses.replace(mlp, submodules=described)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mlp=mlp))
