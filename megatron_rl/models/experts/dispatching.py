"""Tokens to experts on other ranks, where the ranks hold different numbers of tokens.

Legend: n tokens that a rank routes in one call, E experts, H hidden channels.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor, distributed


class UnevenAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """megatron-core's all-gather dispatcher for micro-batches that differ in tokens between data-parallel ranks.

    Upstream's takes for granted that all ranks hold as many tokens as this one, and mixes them up or hangs where they do not. Here
    each is padded to the longest with tokens that go to no expert.
    """

    routing_map: Tensor
    _num_tokens = 0

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [n, H] and weights [n, E] of the tokens of all ranks that share the experts, padding included."""
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
        """What the experts made of this rank's tokens [n, H]."""
        combined: Tensor = super().token_combine(hidden_states)
        return combined[: self._num_tokens]


def allow_uneven_tokens(model: torch.nn.Module) -> None:
    """Exchange the all-gather dispatchers of `model`, where it has them, for those that take any number of tokens from each rank."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and isinstance(layer.token_dispatcher, MoEAllGatherTokenDispatcher) and layer.ep_group.size() > 1:
            layer.token_dispatcher = UnevenAllGatherDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
