"""Root mean square norms, and parameters split over tensor parallel ranks.

Legend: T tokens on this rank, H heads on this rank, D channels of a head, tp tensor parallel size.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed.nn.functional import all_reduce


def split_parameter(config: TransformerConfig, group: torch.distributed.ProcessGroup, size: int, *, value: float) -> torch.nn.Parameter:
    """Return this rank's part [size / tp] of a parameter filled with `value`."""
    device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
    parameter = torch.nn.Parameter(torch.full((size // group.size(),), value, device=device, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


class SplitModule(torch.nn.Module):
    """A module of `split_parameter`s alone."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return megatron-core's checkpoint entry, split over tensor parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets)


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm over the last dimension, usable under sequence parallelism.

    megatron-core's torch norm refuses sequence parallelism. Only the attribute `sequence_parallel`
    on the weight is missing: with this mark megatron sums the weight's gradient over tensor
    parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - a mark that megatron reads, no attribute of Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return x [T, 1, width] times the weight, or 1 + the weight, over its root mean square."""
        if not self.zero_centered:
            return super().forward(x)
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class NormOverHeads(SplitModule):
    """Norm of [T, 1, H, D] over the channels of all heads on all tensor parallel ranks."""

    def __init__(self, config: TransformerConfig, *, num_heads: int) -> None:
        super().__init__()
        self.eps, self.width = config.layernorm_epsilon, num_heads * config.kv_channels
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.weight = split_parameter(config, self.group, self.width, value=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, 1, H, D] over the root mean square of the channels of all ranks. Collective over tensor parallel ranks."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.group.size() > 1:
            # Every rank uses the whole sum, so the gradient of the sum is that of all ranks together.
            squares = all_reduce(squares, group=self.group)
        normalised = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normalised * self.weight.float()).to(x.dtype).view_as(x)


class AttentionWithNormsOverHeads(SelfAttention):
    """Self-attention with norms of queries and keys over all heads.

    The layer's specification and config name no such norms. megatron-core would build norms one
    head wide and sum their gradients over tensor parallel ranks. Here each rank has its own
    channels.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_layernorm = NormOverHeads(config, num_heads=config.num_attention_heads)
        self.k_layernorm = NormOverHeads(config, num_heads=config.num_query_groups)


class NormedRowParallelLinear(RowParallelLinear):
    """The last projection of attention or an MLP, with a norm before the residual stream."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.output_layernorm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """As upstream's [T, 1, hidden size], with the norm; there is no bias to add."""
        output, bias = super().forward(input_)
        assert bias is None, "a bias would be added behind the norm"
        return self.output_layernorm(output), None
