import numpy as np
import pytest
import torch

from megatron_rl.engines.on_cpu.batched_attention import attend, make_buckets

HEADS, KV_HEADS, SIZE, CONTEXT = 4, 2, 8, 64


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None, window: int | None = None
) -> np.ndarray:
    """Causal attention of the last rows of one sequence, head by head in float64; `query` [Q, H, D], `keys`, `values` [L, G, D]."""
    q, k, v = query.double().numpy(), keys.double().numpy(), values.double().numpy()
    result = np.empty_like(q)
    for row in range(len(q)):
        visible = len(k) - len(q) + row + 1
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            first = 0 if window is None else max(visible - 1 - window, 0)
            scores = k[first:visible, group] @ q[row, head] / np.sqrt(SIZE)
            weights = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(sinks[head].item() - scores.max())
            result[row, head] = weights @ v[first:visible, group] / (weights.sum() + sink)
    return result


@pytest.mark.parametrize(("sinks", "window"), [(None, None), (torch.tensor([-3.0, 0.0, 1.5, 4.0]), None), (torch.tensor([2.0] * 4), 5)])
@pytest.mark.parametrize(
    ("lengths", "new_lengths"),
    [
        ([1], [1]),
        ([5, 9, 64, 2, 8], [1, 1, 1, 1, 1]),
        ([5, 9, 64, 2, 8], [5, 9, 64, 2, 8]),
        ([40, 6, 17, 33, 3, 31], [1, 6, 16, 2, 3, 31]),
    ],
)
def test_batched_attention_equals_attention_by_request(
    lengths: list[int], new_lengths: list[int], sinks: torch.Tensor | None, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_slots = sum(lengths) + 1
    caches = [torch.randn(num_slots, KV_HEADS, SIZE, generator=generator) for _ in range(2)]
    for cache in caches:
        cache[0] = 1e30  # the slot that padding points at
    slots = torch.randperm(num_slots - 1, generator=generator) + 1
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    slots_of_row = torch.randint(0, num_slots, (len(lengths) + 2, CONTEXT), generator=generator, dtype=torch.int32)
    for row, own in zip(rows, slots.split(lengths), strict=True):
        slots_of_row[row, : len(own)] = own
    query = torch.randn(sum(new_lengths), HEADS, SIZE, generator=generator)
    output = torch.full_like(query, float("nan"))

    buckets = make_buckets(slots_of_row, rows, torch.tensor(lengths), torch.tensor(new_lengths))
    attend(query, output, *caches, buckets, None, sinks=sinks, window=window)

    for own, part, result in zip(slots.split(lengths), query.split(new_lengths), output.split(new_lengths), strict=True):
        np.testing.assert_allclose(result.numpy(), reference(part, caches[0][own], caches[1][own], sinks, window), atol=1e-5)


def test_padding_at_most_doubles() -> None:
    lengths = torch.tensor([1, 2, 3, 4, 5, 8, 9, 16, 17, 30, 33, 64])
    buckets = make_buckets(
        torch.zeros(len(lengths), CONTEXT, dtype=torch.int32), torch.arange(len(lengths)), lengths, torch.ones_like(lengths)
    )
    assert sum(bucket.slots.numel() for bucket in buckets) <= 2 * int(lengths.sum())
