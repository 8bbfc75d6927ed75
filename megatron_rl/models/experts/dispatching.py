"""Dispatch of tokens to experts on other ranks, for ranks with different numbers of tokens.

Legend: n tokens routed by a rank in one call, E experts, H hidden channels.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor, distributed


class UnevenAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """megatron-core's all-gather dispatcher, for ranks with different numbers of tokens.

    The ranks are data-parallel. Upstream's assumes the same number of tokens on all ranks, and
    otherwise mixes up tokens or hangs. Here each rank is padded to the longest with tokens for no
    expert.
    """

    routing_map: Tensor
    _num_tokens = 0

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return padded hidden states [n, H] and weights [n, E] of the ranks that share experts."""
        self._num_tokens = len(hidden_states)
        longest = torch.tensor(self._num_tokens, device=hidden_states.device)
        distributed.all_reduce(longest, distributed.ReduceOp.MAX, group=self.tp_ep_group)
        rows = (0, 0, 0, int(longest) - self._num_tokens)
        self.routing_map = torch.nn.functional.pad(self.routing_map, rows)
        gathered: tuple[Tensor, Tensor] = super().token_dispatch(
            torch.nn.functional.pad(hidden_states, rows), torch.nn.functional.pad(probs, rows)
        )
        return gathered

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' output for this rank's tokens [n, H]."""
        combined: Tensor = super().token_combine(hidden_states)
        return combined[: self._num_tokens]


def allow_uneven_tokens(model: torch.nn.Module) -> None:
    """Replace the all-gather dispatchers of `model`, if any, by dispatchers for uneven tokens."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and isinstance(layer.token_dispatcher, MoEAllGatherTokenDispatcher) and layer.ep_group.size() > 1:
            layer.token_dispatcher = UnevenAllGatherDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
