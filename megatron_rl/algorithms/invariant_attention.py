"""Attention whose every query has the same bits in any batch, on a CPU in float32.

Engine and trainer attend by this where both are to give the same log-probs to the last bit. torch's
fused kernel chooses products and orders of summation by its number of queries and keys. With both
padded, a query alone equals the same query within a whole sequence. Seen with torch 2.13 on CPUs
with AVX2 and AVX-512, heads of 8 to 256 channels, up to 1300 keys.

Legend: S sequences, H query heads, G key-value heads, Q queries, K keys, D channels.
"""

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

FEW_KEYS, ALL_KEYS = 128, 512
"""Products over so many keys sum in one order; the kernel takes keys in blocks of the second number."""
BLOCK = 16
"""Queries at least, and lanes of the vector units, which compute another exponential function at a row's end."""


def attend_invariantly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None) -> Tensor:
    """Return attention [S, H, Q, D] of `query` [S, H, Q, D] to `key` and `value` [S, G, K, D].

    `mask` [S or 1, H or 1, Q, K] is True where a query sees a key, or numbers to add to scores. None
    is the causal triangle of Q = K.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    more_queries, more_keys = -num_queries % BLOCK, -num_keys % (BLOCK if num_keys <= FEW_KEYS else ALL_KEYS)
    query = pad(query, (0, 0, 0, more_queries))
    key, value = (pad(x, (0, 0, 0, more_keys)).repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if mask is not None:
        mask = pad(mask, (0, more_keys, 0, more_queries), value=float("-inf") if mask.is_floating_point() else False)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return attended[:, :, :num_queries]
