"""The end of a model: a distribution over tokens, as a few numbers for each position, or a critic's value.

Legend: N positions, H hidden channels, V padded vocabulary, tp tensor parallel size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megatron_rl.algorithms.head_statistics import drawn_log_probs, head_statistics
from megatron_rl.algorithms.log_prob import TORCH_ROWS, RowMaths, TokenStatistics
from megatron_rl.system.device import chosen_row_maths


def row_maths(hidden: Tensor) -> RowMaths:
    """Return the maths named by `chosen_row_maths` for the logits of `hidden` [N, H]."""
    if chosen_row_maths(hidden.device.type, str(hidden.dtype).removeprefix("torch.")) == "torch":
        return TORCH_ROWS
    # Machines without a GPU may lack Triton, and importing Triton takes a second.
    from megatron_rl.models.head_kernels import TRITON_ROWS

    return TRITON_ROWS


class LanguageModelHead(ColumnParallelLinear):
    """megatron-core's output layer, which also answers about next tokens, the same on every tensor parallel rank."""

    @classmethod
    def in_place_of(cls, layer: ColumnParallelLinear) -> "LanguageModelHead":
        """Return a head that shares the weight of `layer`: None when tied in the same chunk."""
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
        **question: Any,
    ) -> Any:
        """Logits [N, 1, V / tp] of `input_` [N, 1, H] and a bias of None; or the TokenStatistics [N] of `input_` [N, H].

        `weight` [V / tp, H] is for a tied head. `question` are `targets` [N] among the first
        `vocab_size` tokens, `temperature`, `with_entropy` and `candidates`; or `entropy` instead of the
        last two, for the log-probs of entropy-aware sampling alone. Collective over the tensor parallel
        ranks.
        """
        if not question:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        group = self.tp_group if self.tp_group.size() > 1 else None
        if group is not None:
            input_ = copy_to_tensor_model_parallel_region(input_, group=group)
        if "entropy" in question:
            return TokenStatistics(drawn_log_probs(input_, weight, group=group, **question), None, None)
        return head_statistics(
            input_,
            weight,
            vocab_start=self.tp_group.rank() * len(weight),
            group=group,
            # The attribute is megatron's mark of a parameter with summed gradients; a frozen or unwrapped
            # weight has no mark.
            gradient_buffer=vars(weight).get("main_grad"),
            rows=row_maths(input_),
            **question,
        )


class ValueHead(nn.Module):
    """A linear layer from hidden states to one value, in place of a model's `output_layer`.

    The model is a PolicyModel. Every tensor-parallel rank has the whole layer and gets whole
    sequences, so no sum over ranks is needed. The weights start at zero: the first values are 0
    under every layout, and the gradient reaches the backbone from the second step on.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden_states: Tensor, weight: None = None) -> tuple[Tensor, None]:
        """Return values in float32, [T, 1, 1] of hidden states [T, 1, H], and no bias."""
        assert weight is None, "a value head is never tied to the embeddings"
        return nn.functional.linear(hidden_states.float(), self.weight.float()), None


def replace_heads(chunks: Sequence[GPTModel]) -> None:
    """Give the last chunk a value head, before DDP; its answers are values [N, 1]."""
    for chunk in chunks:
        # A tied head would also sum gradients of the first and the last pipeline stage.
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            device = next(chunk.parameters()).device
            chunk.output_layer = ValueHead(chunk.config.hidden_size, dtype=chunk.config.params_dtype, device=device)
