"""The critic's end of a model: one number in place of a distribution over tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_rl.models.build import PolicyModel


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
        """Return values in float32, [T, 1, 1] of hidden states [T, 1, H], and no bias.

        The answer has the form of an output layer of megatron-core.
        """
        assert weight is None, "a value head is never tied to the embeddings"
        return nn.functional.linear(hidden_states.float(), self.weight.float()), None


def replace_heads(chunks: Sequence[PolicyModel]) -> None:
    """Replace the language model head of the model's last chunk by a value head.

    `chunks` are not wrapped in DDP yet. The model then answers values [N, 1] instead of hidden
    states [N, H].
    """
    for chunk in chunks:
        # A tied head would also sum gradients of the first and the last pipeline stage.
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            device = next(chunk.parameters()).device
            chunk.output_layer = ValueHead(chunk.config.hidden_size, dtype=chunk.config.params_dtype, device=device)
