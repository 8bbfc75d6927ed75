import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl.weights.bucket import WeightSpec, fill_buckets, make_buckets, make_manifest


@example([1, 1, 1, 1, 1], 8)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(4, 300))
def test_buckets_keep_every_weight_in_order_and_under_the_limit(sizes: list[int], limit: int) -> None:
    manifest = [WeightSpec(f"w{row}", "float32", (size,)) for row, size in enumerate(sizes)]
    buckets = make_buckets(manifest, max_bytes=limit)
    assert [spec for bucket in buckets for spec in bucket] == manifest
    filled = [sum(spec.num_bytes for spec in bucket) for bucket in buckets]
    assert all(len(bucket) == 1 or size <= limit for bucket, size in zip(buckets, filled, strict=True))
    assert all(size + later[0].num_bytes > limit for size, later in zip(filled[:-1], buckets[1:], strict=True)), "no bucket has room left"


def test_flat_buckets_hold_the_bytes_of_the_weights() -> None:
    weights = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.tensor([1, 2], dtype=torch.bfloat16)), ("c", torch.tensor([9.0]))]
    buckets = make_buckets(make_manifest(weights), max_bytes=28)
    flats = list(fill_buckets(weights, buckets))
    assert [len(bucket) for bucket in buckets] == [2, 1]
    assert torch.equal(flats[0][:24].view(torch.float32).view(2, 3), weights[0][1])
    assert torch.equal(flats[0][24:].view(torch.bfloat16), weights[1][1])
    assert torch.equal(flats[1].view(torch.float32), weights[2][1])


@pytest.mark.parametrize(
    "weights",
    [
        [("a", torch.zeros(2)), ("c", torch.zeros(3))],
        [("a", torch.zeros(2)), ("b", torch.zeros(4))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3, dtype=torch.bfloat16))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))],
    ],
)
def test_a_weight_that_differs_from_the_manifest_is_refused(weights: list[tuple[str, torch.Tensor]]) -> None:
    buckets = make_buckets([WeightSpec("a", "float32", (2,)), WeightSpec("b", "float32", (3,))])
    with pytest.raises(ValueError, match="the trainer exports"):
        list(fill_buckets(weights, buckets))
