"""The critic's end of a model: one number in place of a distribution over tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_rl.models.build import PolicyModel


class ValueHead(nn.Module):
    """A linear layer from hidden states to one value, in the place of a PolicyModel's `output_layer`.

    Every tensor-parallel rank has the whole of it and gets whole sequences, so that no rank needs a sum of another's. It starts at
    zero: the first values are 0 whatever the layout, and the gradient reaches the backbone from the second step on.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden_states: Tensor, weight: None = None) -> tuple[Tensor, None]:
        """Values in float32, [T, 1, 1] of hidden states [T, 1, H], and no bias: what an output layer of megatron-core answers."""
        assert weight is None, "a value head is never tied to the embeddings"
        return nn.functional.linear(hidden_states.float(), self.weight.float()), None


def replace_heads(chunks: Sequence[PolicyModel]) -> None:
    """Give the chunk that ends the model a value head instead of its language model head; `chunks` are not wrapped in DDP yet.

    Such a model answers values [N, 1] where a policy answers hidden states [N, H].
    """
    for chunk in chunks:
        # A tied head would also sum gradients of the first and the last pipeline stage.
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            device = next(chunk.parameters()).device
            chunk.output_layer = ValueHead(chunk.config.hidden_size, dtype=chunk.config.params_dtype, device=device)
