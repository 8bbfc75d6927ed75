"""The policy's end of a model: a distribution over tokens, as a few numbers for each position.

The logits are not returned. Legend: N positions, H hidden channels, V padded vocabulary, tp tensor
parallel size.
"""

from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_rl.algorithms.head_statistics import head_statistics
from megatron_rl.algorithms.log_prob import TORCH_ROWS, RowMaths, TokenStatistics
from megatron_rl.device import chosen_row_maths


def row_maths(hidden: Tensor) -> RowMaths:
    """Return the maths named by `chosen_row_maths` for the logits of `hidden` [N, H]."""
    if chosen_row_maths(hidden.device.type, str(hidden.dtype).removeprefix("torch.")) == "torch":
        return TORCH_ROWS
    # Machines without a GPU may lack Triton, and importing Triton takes a second.
    from megatron_rl.models.head_kernels import TRITON_ROWS

    return TRITON_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class TokenQuestion:
    """A question about next tokens: `targets` [N] are ids among the first `vocab_size` tokens."""

    targets: Tensor
    temperature: float
    vocab_size: int
    with_entropy: bool = True


class LanguageModelHead(ColumnParallelLinear):
    """megatron-core's output layer with an answer for token questions.

    An ordinary call returns logits, a call with a question returns token statistics. The statistics
    cover whole sequences' hidden states and are the same on every tensor parallel rank.
    """

    @classmethod
    def in_place_of(cls, layer: ColumnParallelLinear) -> "LanguageModelHead":
        """Return a head with the weight of `layer`, not a copy.

        The weight is None when tied to the embeddings of the same model chunk.
        """
        head = cls(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=layer.config.init_method,
            bias=False,
            skip_bias_add=layer.skip_bias_add,
            gather_output=layer.gather_output,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        head.weight = layer.weight
        # Choosing positions needs the gathered sequence, so the head must not gather again. The head sums
        # its input's gradient over ranks.
        head.sequence_parallel = False
        return head

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        question: TokenQuestion | None = None,
    ) -> Any:
        """Logits [N, 1, V / tp] of `input_` [N, 1, H] and a bias of None; or the TokenStatistics [N] of `input_` [N, H].

        `weight` [V / tp, H] is for a tied head. Collective over the tensor parallel ranks.
        """
        if question is None:
            return super().forward(input_, weight, runtime_gather_output)
        return self._answer(input_, self.weight if weight is None else weight, question)

    def _answer(self, hidden: Tensor, weight: Tensor, question: TokenQuestion) -> TokenStatistics:
        group = self.tp_group if self.tp_group.size() > 1 else None
        if group is not None:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        return head_statistics(
            hidden,
            weight,
            question.targets,
            temperature=question.temperature,
            vocab_size=question.vocab_size,
            vocab_start=self.tp_group.rank() * len(weight),
            group=group,
            with_entropy=question.with_entropy,
            # The attribute is megatron's mark of a parameter with summed gradients; a frozen or unwrapped
            # weight has no mark.
            gradient_buffer=vars(weight).get("main_grad"),
            rows=row_maths(hidden),
        )
