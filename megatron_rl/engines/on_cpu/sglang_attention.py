"""SGLang's attention without a GPU, made fast: its `torch_native` backend calls torch once per request and layer.

That loop is most of a small model's generation time; see `batched_attention` for what takes its place.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from megatron_rl.engines.on_cpu.batched_attention import Bucket, attend, make_buckets


class BatchedTorchAttention(TorchNativeAttnBackend):
    """Causal self-attention over buckets. Sliding windows and cross-attention stay what they were: request by request.

    Sinks, which SGLang's own has not, are computed over buckets with the window of their layer.
    """

    buckets: tuple[Bucket, ...]
    invariant = False
    """Whether requests are computed alike whatever else is in their batch."""
    sinks: Tensor | None = None
    """[H], of the layer that is being computed."""

    def forward_extend(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the attention of new tokens [N, H * D]."""
        self.sinks = sinks
        return super().forward_extend(*args, **kwargs)

    def forward_decode(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the attention of one new token of each request [N, H * D]."""
        self.sinks = sinks
        return super().forward_decode(*args, **kwargs)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Lay the buckets of this forward pass out, once for all layers."""
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens
        new_lengths = torch.ones_like(lengths) if forward_batch.forward_mode.is_decode() else forward_batch.extend_seq_lens
        pool = self.req_to_token_pool.req_to_token
        rows, new_lengths = forward_batch.req_pool_indices, new_lengths.to(lengths.dtype)
        self.buckets = tuple(make_buckets(pool, rows, lengths, new_lengths, invariant=self.invariant))

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.sinks is None and (kwargs["is_cross_attn"] or kwargs["sliding_window_size"] is not None or not kwargs["causal"]):
            return super()._run_sdpa_forward_extend(query, output, k_cache, v_cache, *args, **kwargs)
        window = kwargs["sliding_window_size"]
        attend(query, output, k_cache, v_cache, self.buckets, kwargs["scaling"], sinks=self.sinks, window=window)
        return output

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.sinks is None and (kwargs["is_cross_attn"] or kwargs["sliding_window_size"] is not None):
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **kwargs)
        window = kwargs["sliding_window_size"]
        attend(query, output, k_cache, v_cache, self.buckets, kwargs["scaling"], sinks=self.sinks, window=window)
        return output


class InvariantTorchAttention(BatchedTorchAttention):
    """The same for an engine whose requests must not feel each other."""

    invariant = True


def register(*, invariant: bool) -> None:
    """Take the place of the backend `torch_native`, by whose name SGLang's CPU path asks for it."""
    register_attention_backend("torch_native")(InvariantTorchAttention if invariant else BatchedTorchAttention)
