import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl.weights.transport import WeightSpec, fill_buckets, make_buckets


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
    buckets = make_buckets([WeightSpec.of(name, tensor) for name, tensor in weights], max_bytes=28)
    flats = [flat.clone() for flat in fill_buckets(weights, buckets)]
    assert [len(bucket) for bucket in buckets] == [2, 1]
    assert torch.equal(flats[0][:24].view(torch.float32).view(2, 3), weights[0][1])
    assert torch.equal(flats[0][24:].view(torch.bfloat16), weights[1][1])
    assert torch.equal(flats[1].view(torch.float32), weights[2][1])


@pytest.mark.parametrize(
    "weights",
    [
        [("a", torch.zeros(2))],
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


def test_all_buckets_are_in_the_memory_of_one() -> None:
    """A sync costs the memory of one bucket, however many there are and however their tensors lie in memory."""
    weights = [("a", torch.arange(6.0).view(2, 3).t()), ("b", torch.arange(4.0)), ("c", torch.arange(9.0)[::3])]
    buckets = make_buckets([WeightSpec.of(name, tensor) for name, tensor in weights], max_bytes=24)
    seen = [(flat.data_ptr(), flat.view(torch.float32).tolist()) for flat in fill_buckets(weights, buckets)]
    assert [values for _, values in seen] == [[0, 3, 1, 4, 2, 5], [0, 1, 2, 3], [0, 3, 6]]
    assert len({address for address, _ in seen}) == 1


@pytest.mark.parametrize("max_bytes", [1, 30, 100])
def test_the_attention_of_a_layer_is_never_cut(max_bytes: int) -> None:
    names = [f"model.layers.{layer}.self_attn.{part}" for layer in (1, 11) for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")]
    manifest = [WeightSpec(name, "float32", (2,)) for name in ("model.embed_tokens", *names, "model.norm")]
    buckets = make_buckets(manifest, max_bytes=max_bytes)
    assert [spec for bucket in buckets for spec in bucket] == manifest
    for layer in (1, 11):
        holding = [bucket for bucket in buckets if any(f".{layer}.self_attn." in spec.name for spec in bucket)]
        assert len(holding) == 1


def test_a_manifest_with_an_attention_in_parts_is_refused() -> None:
    apart = [WeightSpec(name, "float32", (2,)) for name in ("l.0.self_attn.q_a_proj", "l.0.mlp", "l.0.self_attn.kv_a_proj_with_mqa")]
    with pytest.raises(AssertionError, match="kv_a_proj_with_mqa is in bucket 2, but an engine may fuse it with tensors of bucket 0"):
        make_buckets(apart, max_bytes=1)
    assert len(make_buckets(apart)) == 1
