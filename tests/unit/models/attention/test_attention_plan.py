"""The attention plan, and attention over it, against a plain float64 loop; context parallelism is played by slicing."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.data.packing import local_positions
from megatron_rl.models import packed_sequences as module
from megatron_rl.models.attention.attention_plan import plan_attention, with_window
from megatron_rl.models.attention.packed import attend
from megatron_rl.models.packed_sequences import packed_sequences

CASES = {
    "equal": [10] * 6,
    "ragged short": [7, 13, 1, 9, 10, 12, 2],
    "one long": [3, 5, 300, 4],
    "one": [17],
    "grouped long": [70, 90, 72, 88],
}
INVARIANT = None
"""In place of a number of keys: every length by the kernel of the exact mode."""


def naive(query, key, value, lengths, window=None, sinks=None):
    """Causal attention of each sequence, grouped heads, float64; a query sees the last `window` tokens, or all before it, and the sink."""
    outputs = []
    group = query.shape[1] // key.shape[1]
    for q, k, v in zip(*(x.double().split(list(lengths)) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(len(q), len(q)).triu(1).bool()
        if window is not None:
            hidden |= torch.ones(len(q), len(q)).tril(-window).bool()
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(outputs)


def zigzag(lengths, cp, rank):
    tokens, start = [], 0
    for length in lengths:
        chunks = np.array_split(np.arange(start, start + length), 2 * cp)
        tokens += [chunks[rank], chunks[2 * cp - 1 - rank]]
        start += length
    return np.concatenate(tokens)


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


def random_inputs(num_tokens, heads=4, groups=2, channels=8, value_channels=8):
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_tokens, heads, channels), (num_tokens, groups, channels), (num_tokens, groups, value_channels))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("short_keys", (0, 64, INVARIANT))
@pytest.mark.parametrize("window", (None, 1, 6, 75, 140))
def test_output_and_gradients_equal_a_plain_loop(case, short_keys, window, monkeypatch):
    monkeypatch.setattr("megatron_rl.models.attention.packed._SHORT_KEYS", short_keys or 0)
    lengths = CASES[case]
    inputs = random_inputs(sum(lengths), value_channels=6)
    plan = plan_attention(offsets(lengths))
    output = attend(*inputs, plan if window is None else with_window(plan, window), invariant=short_keys is INVARIANT)
    expected = naive(*inputs, lengths, window)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((output * direction).sum(), inputs)
    wanted = torch.autograd.grad((expected * direction.double()).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("short_keys", (0, 64, INVARIANT))
@pytest.mark.parametrize(("window", "value_channels"), ((None, 8), (1, 6), (6, 8), (75, 8)))
def test_sinks_take_their_share_of_every_softmax(case, short_keys, window, value_channels, monkeypatch):
    monkeypatch.setattr("megatron_rl.models.attention.packed._SHORT_KEYS", short_keys or 0)
    lengths = CASES[case]
    inputs = [*random_inputs(sum(lengths), value_channels=value_channels), torch.tensor([-3.0, 0.0, 1.5, 4.0], requires_grad=True)]
    plan = plan_attention(offsets(lengths))
    plan = plan if window is None else with_window(plan, window)
    output = attend(*inputs[:3], plan, sinks=inputs[3], invariant=short_keys is INVARIANT)
    expected = naive(*inputs[:3], lengths, window, inputs[3])
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((output * direction).sum(), inputs)
    wanted = torch.autograd.grad((expected * direction.double()).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("short_keys", (0, 64, INVARIANT))
@pytest.mark.parametrize("window", (None, 1, 7, 40))
def test_context_parallel_ranks_together_equal_a_plain_loop(cp, short_keys, window, monkeypatch):
    monkeypatch.setattr("megatron_rl.models.attention.packed._SHORT_KEYS", short_keys or 0)
    monkeypatch.setattr("megatron_rl.models.attention.attention_plan._SHORTEST_BLOCK", 5)
    lengths = [2 * cp * n for n in (1, 3, 5, 1, 12, 13, 2, 30)]
    inputs = random_inputs(sum(lengths))
    sinks = torch.tensor([-1.0, 0.0, 1.5, 3.0]) if window in (None, 7) else None
    shards = [torch.from_numpy(zigzag(lengths, cp, rank)) for rank in range(cp)]
    query, key, value = inputs
    gathered = torch.cat(shards)
    whole = torch.zeros(sum(lengths), 4, 8)
    for rank, tokens in enumerate(shards):
        plan = plan_attention(offsets(lengths), cp_size=cp, cp_rank=rank)
        plan = plan if window is None else with_window(plan, window)
        part = attend(query[tokens], key[gathered], value[gathered], plan, sinks=sinks, invariant=short_keys is INVARIANT)
        whole = whole.index_copy(0, tokens, part)
    expected = naive(*inputs, lengths, window, sinks)
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=1e-5)
    direction = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((whole * direction).sum(), inputs)
    wanted = torch.autograd.grad((expected * direction.double()).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_positions_follow_the_zigzag(cp):
    lengths = [2 * cp * n for n in (1, 4, 2)]
    position = np.concatenate([np.arange(length) for length in lengths])
    for rank in range(cp):
        tokens = zigzag(lengths, cp, rank) if cp > 1 else np.arange(sum(lengths))
        assert np.array_equal(local_positions(np.array(lengths), cp_size=cp, cp_rank=rank), position[tokens])


@pytest.mark.parametrize("seed", range(5))
def test_every_token_has_one_slot_and_padding_is_bounded(seed):
    lengths = np.random.default_rng(seed).integers(1, 600, 400)
    plan = plan_attention(offsets(lengths))
    assert torch.equal(plan.query_tokens[plan.token_queries], torch.arange(lengths.sum()))
    padding = torch.zeros(len(plan.query_tokens), dtype=torch.bool).index_fill(0, plan.query_padding, True)
    assert int((~padding).sum()) == lengths.sum()
    assert len(plan.query_tokens) <= 1.15 * lengths.sum()
    assert len(plan.buckets) < 40


def test_a_thousand_equal_sequences_are_one_unmoved_bucket():
    plan = plan_attention(np.arange(1025) * 10)
    assert plan.identity
    assert len(plan.buckets) == 1


def test_a_micro_batch_without_tokens_is_refused():
    with pytest.raises(ValueError, match="has no tokens"):
        packed_sequences(np.array([0]))


def test_lengths_that_context_parallelism_cannot_split_fail():
    with pytest.raises(ValueError, match="6 tokens cannot be split in 4 chunks"):
        plan_attention(np.array([0, 8, 14]), cp_size=2)


def test_values_of_another_sequence_do_not_matter():
    lengths = CASES["ragged short"]
    query, key, value = (x.detach() for x in random_inputs(sum(lengths)))
    plan = plan_attention(offsets(lengths))
    before = attend(query, key, value, plan)
    value[:7] += 1.0
    changed = (attend(query, key, value, plan) != before).flatten(1).any(1)
    assert changed[:7].all()
    assert not changed[7:].any()


def test_index_arrays_are_made_when_they_are_first_asked_for(monkeypatch):
    """Transformer Engine never asks, and each of them is a copy to the GPU."""
    made = []
    monkeypatch.setattr(module, "plan_attention", lambda *_, **__: made.append(1) or "plan")
    packed = packed_sequences(offsets([5, 9]))
    assert made == []
    assert (packed.plan, packed.plan, made) == ("plan", "plan", [1])


def test_windows_are_made_once_and_wide_windows_cost_nothing():
    packed = packed_sequences(offsets([5, 9, 20]))
    assert packed.windowed(4) is packed.windowed(4)
    assert packed.windowed(4) is dataclasses.replace(packed, logit_positions=torch.tensor([0])).windowed(4), (
        "views of the same sequences share it"
    )
    assert all(part.mask is None for bucket in packed.windowed(20).buckets for part in bucket.parts)
    assert any(part.mask is not None for bucket in packed.windowed(19).buckets for part in bucket.parts)


@pytest.mark.parametrize("cp", (1, 2))
def test_windows_are_planned_without_the_memory_of_a_device(cp):
    plan = with_window(plan_attention(offsets([300, 80]), cp_size=cp, device="meta"), 6)
    assert {part.mask.device.type for bucket in plan.buckets for part in bucket.parts} == {"meta"}


@pytest.mark.parametrize(("cp", "rank"), ((1, 0), (4, 0), (4, 3)))
def test_the_cost_of_a_window_grows_with_the_length(cp, rank):
    def scores(length):
        plan = with_window(plan_attention(offsets([length] * 3), cp_size=cp, cp_rank=rank), 100)
        return sum(part.query_length * part.key_length for bucket in plan.buckets for part in bucket.parts)

    assert scores(8192) < 2.1 * scores(4096)
    assert scores(8192) * cp < 3 * 100 * 8192, "a query is held against two or three windows of keys"
