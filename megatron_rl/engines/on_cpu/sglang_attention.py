"""SGLang's attention without a GPU over buckets of requests.

Its `torch_native` backend calls torch once per request and layer: most of a small model's time.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from megatron_rl.engines.on_cpu.batched_attention import Bucket, attend, make_buckets


class BatchedTorchAttention(TorchNativeAttnBackend):
    """Causal self-attention over buckets; sliding windows and cross-attention stay SGLang's.

    Sinks, which SGLang's backend lacks, are computed over buckets with the window of their layer.
    """

    buckets: tuple[Bucket, ...]
    invariant = False  # a request is computed alike in any batch
    sinks: Tensor | None = None  # [H], of the present layer

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
        self.buckets = tuple(make_buckets(pool, rows, lengths, new_lengths))

    def _run_sdpa_forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._run(super()._run_sdpa_forward_extend, *args, causal_only=True, **kwargs)

    def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._run(super()._run_sdpa_forward_decode, *args, causal_only=False, **kwargs)

    def _run(self, original: Callable[..., Tensor], *args: Any, causal_only: bool, **kwargs: Any) -> Tensor:
        """Return the output, written over buckets or by the `original` method."""
        window = kwargs["sliding_window_size"]
        others = kwargs["is_cross_attn"] or window is not None or (causal_only and not kwargs["causal"])
        if self.sinks is None and others:
            return original(*args, **kwargs)
        query, output, keys, values, *_ = args
        attend(query, output, keys, values, self.buckets, kwargs["scaling"], sinks=self.sinks, window=window, invariant=self.invariant)
        return output


class InvariantTorchAttention(BatchedTorchAttention):
    """The same for a deterministic engine."""

    invariant = True


def register(*, invariant: bool) -> None:
    """Replace the backend `torch_native`, which SGLang takes on a CPU."""
    register_attention_backend("torch_native")(InvariantTorchAttention if invariant else BatchedTorchAttention)
