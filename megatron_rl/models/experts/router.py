"""The router of a mixture of experts and the dispatch of its tokens, exact under every layout.

The router counts tokens, adds auxiliary losses and replays recorded experts. Upstream's auxiliary
losses are means over a micro-batch of a rank, and so depend on the sequences sharing a micro-batch.
Upstream's replay keeps the experts of one micro-batch in global state. Here the router gets
everything with the call: the packed sequences of the micro-batch.

Legend: n tokens of one call, E experts, K experts of each token, H hidden channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, distributed

from megatron_rl.models.experts.moe_fields import num_mixture_layers
from megatron_rl.models.experts.routed_tokens import RoutedTokens, RouterStep, Routing, balance_loss, z_loss
from megatron_rl.models.packed_sequences import PackedSequences


class PackedRouter(TopKRouter):
    """Chooses experts for packed sequences. The layer sets `routing_call` for the time of a call; None asks for no losses and no replay."""

    routing_call: Routing | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [n, E], zero for others, and taken experts [n, E] by `logits` [n, 1, E]."""
        logits = logits.view(-1, self.config.num_moe_experts)
        call = self.routing_call
        if call is None:
            return self._choose(logits, None)
        tokens = call.tokens.part(self.tp_group.rank(), len(logits))
        assert len(tokens.sequence_index) == len(logits), f"{len(logits)} tokens came to a router that was given {len(tokens.real)}"
        record = _Record(tokens, self._layer) if call.replay and tokens.experts is not None else None
        probabilities, taken = self._choose(logits, record)
        if call.step is None or not torch.is_grad_enabled():
            return probabilities, taken
        self._count(call.step, tokens, taken, record)
        return self._attach_losses(call.step, tokens, logits, probabilities), taken

    @property
    def _layer(self) -> int:
        """Number of this router among the mixture layers of the whole model."""
        return num_mixture_layers(self.config, before=int(self.layer_number) - 1)

    def _choose(self, logits: Tensor, record: "_Record | None") -> tuple[Tensor, Tensor]:
        config = self.config
        probabilities, taken = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            # The fused kernel would ignore the record.
            fused=config.moe_router_fusion and record is None,
            router_replay=record,
        )
        return probabilities, taken

    def _count(self, step: RouterStep, tokens: RoutedTokens, taken: Tensor, record: "_Record | None") -> None:
        with torch.no_grad():
            load = (taken & tokens.real.unsqueeze(-1)).sum(0)
            if self.enable_expert_bias:
                self.local_tokens_per_expert += load
            nothing = load.new_zeros(())
            masks = {"replayed": record.used, "changed": record.changed, "reordered": record.reordered} if record else {}
            counts = {name: mask.sum() for name, mask in masks.items()} or dict.fromkeys(("replayed", "changed", "reordered"), nothing)
            step.count(self._layer, load=load, **counts)

    def _attach_losses(self, step: RouterStep, tokens: RoutedTokens, logits: Tensor, probabilities: Tensor) -> Tensor:
        balance = squares = None
        if step.balance_coef:
            # Without sequence parallelism the tensor-parallel ranks hold the same tokens.
            group = self.tp_cp_group if self.config.sequence_parallel else self.cp_group
            scores = _normalised_scores(logits, self.score_function)
            balance = balance_loss(scores, tokens, top_k=self.topk, num_sequences=step.num_sequences, group=group)
        if step.z_coef:
            squares = z_loss(logits.float(), tokens, num_tokens=step.num_tokens)
        return step.attach(probabilities, layer=self._layer, balance=balance, z_loss=squares)


def _normalised_scores(logits: Tensor, score_function: str) -> Tensor:
    """Return the affinities of tokens to experts, with sum 1, [n, E] in float32."""
    if score_function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


class _Record:
    """Recorded experts for one call of one layer, in the form of megatron-core's replay.

    When the record names the router's own choice of experts, the router's order is kept. Such a
    replay changes no bit.
    """

    def __init__(self, tokens: RoutedTokens, layer: int) -> None:
        assert tokens.experts is not None and tokens.recorded is not None, "a record has both"
        # Keep the record contiguous and of its own type until on the GPU: any other copy goes through
        # pageable memory and blocks.
        self._experts = tokens.experts[layer]
        self.used = tokens.recorded
        self.changed = self.reordered = torch.zeros_like(tokens.recorded)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores [n, K] and numbers [n, K] of recorded experts, else the router's."""
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._experts.to(own.device, non_blocking=True).to(own.dtype)
        self.changed = self.used & (experts.sort(-1).values != own.sort(-1).values).any(-1)
        # Both sides name experts by falling weight: the order is what a record of numbers shows of the weights.
        self.reordered = self.used & ~self.changed & (experts != own).any(-1)
        chosen = torch.where(self.changed.unsqueeze(-1), experts, own)
        return scores.gather(1, chosen), chosen


class RoutedLayer(TransformerLayer):
    """A transformer layer with experts, which passes the routed tokens on to its router.

    Activation recompute runs the layer again, with the packed sequences of the first run. A router
    with a memory of the last micro-batch would take the wrong sequences.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recompute_experts = self.mlp.moe_layer_recompute
        if self._recompute_experts:
            # Recomputed here, with the norm, because upstream's checkpoint would run the router again without
            # its layer.
            self.mlp.moe_layer_recompute = self.recompute_pre_mlp_layernorm = False

    @contextmanager
    def _routing(self, routing: Routing | None) -> Iterator[None]:
        before, self.mlp.router.routing_call = self.mlp.router.routing_call, routing
        try:
            yield
        finally:
            self.mlp.router.routing_call = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's, while the router knows of the micro-batch."""
        packed = kwargs.get("packed_seq_params")
        with self._routing(packed.routing if isinstance(packed, PackedSequences) else None):
            return super().forward(*args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._recompute_experts or not torch.is_grad_enabled():
            return super()._forward_mlp(hidden_states, *args, **kwargs)
        routing = self.mlp.router.routing_call

        def run(hidden_states: Tensor) -> Any:
            with self._routing(routing):
                return TransformerLayer._forward_mlp(self, hidden_states, *args, **kwargs)

        return tensor_parallel.checkpoint(run, False, hidden_states)


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
        return super().token_dispatch(torch.nn.functional.pad(hidden_states, rows), torch.nn.functional.pad(probs, rows))

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
