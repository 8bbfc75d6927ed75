"""A request alone and among others, through the parts that an engine on a CPU computes it with."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from megatron_rl.algorithms.head_statistics import token_statistics
from megatron_rl.engines.on_cpu.batched_attention import attend, make_buckets
from megatron_rl.engines.on_cpu.deterministic_cpu import invariant_products, log_softmax, murmur_hash, product, sum_and_product
from megatron_rl.models.attention.attention_plan import plan_attention
from megatron_rl.models.attention.packed import attend as attend_in_training


@pytest.fixture
def products() -> Iterator[None]:
    """Products on the CPU go through blocks."""
    with warnings.catch_warnings():
        # torch tells once that a kernel is replaced.
        warnings.simplefilter("ignore")
        library = invariant_products()
    yield
    library._destroy()


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 40])
def test_products_have_their_value(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows, columns, addend = (torch.randn(shape, generator=generator) for shape in ((num_rows, 24), (24, 7), (7,)))
    expected = np.array([[sum(float(a) * float(b) for a, b in zip(row, column, strict=True)) for column in columns.T] for row in rows])
    expected = expected.reshape(num_rows, 7)
    np.testing.assert_allclose(product(rows, columns).numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(
        sum_and_product(addend, rows, columns, beta=2, alpha=3).numpy(), 2 * addend.numpy() + 3 * expected, atol=1e-5
    )


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_feel_the_others(with_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((67, 96), (40, 96), (40,)))
    together = linear(rows, weight, bias if with_bias else None)
    for first, count in ((0, 1), (5, 3), (30, 16), (2, 64), (66, 1)):
        part = rows[first : first + count]
        assert torch.equal(linear(part, weight, bias if with_bias else None), together[first : first + count])
        assert torch.equal(torch.matmul(part, weight.T), torch.matmul(rows, weight.T)[first : first + count])


@pytest.mark.parametrize("decoding", [True, False])
def test_the_attention_of_a_request_does_not_feel_the_others(decoding: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 10, 16, 13, 3, 40, 33, 64, 1])
    new = torch.ones_like(lengths) if decoding else lengths
    starts = lengths.cumsum(0) - lengths
    # The longest request fills the context: a power of two may not.
    slots = torch.zeros(len(lengths), 64, dtype=torch.int32)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        slots[row, :length] = torch.arange(start + 1, start + length + 1)
    caches = [torch.randn(int(lengths.sum()) + 1, 2, 8, generator=generator) for _ in range(2)]
    query = torch.randn(int(new.sum()), 4, 8, generator=generator)

    def attention(rows: torch.Tensor) -> list[torch.Tensor]:
        own = torch.cat([query.split(new.tolist())[row] for row in rows.tolist()])
        output = torch.empty_like(own)
        attend(own, output, *caches, make_buckets(slots, rows, lengths[rows], new[rows]), None, invariant=True)
        return list(output.split(new[rows].tolist()))

    together = attention(torch.arange(len(lengths)))
    for rows in ([0], [1], [0, 4], [7, 6, 5], [3, 8], [2, 1, 0]):
        assert all(torch.equal(one, together[row]) for row, one in zip(rows, attention(torch.tensor(rows)), strict=True))


def test_prompts_decoding_and_training_attend_alike() -> None:
    """A query alone, the last of its prompt, and within the whole sequence: to the last bit."""
    generator = torch.Generator().manual_seed(0)
    lengths, context = [1, 5, 16, 63, 65, 200, 257, 300, 513], 520
    starts = np.concatenate([[0], np.cumsum(lengths)])
    query, key, value = (torch.randn(int(starts[-1]), heads, 16, generator=generator) for heads in (4, 2, 2))
    trained = attend_in_training(query, key, value, plan_attention(starts), invariant=True)
    caches = [torch.cat([torch.zeros(1, 2, 16), x]) for x in (key, value)]
    slots = torch.zeros(len(lengths), context, dtype=torch.int32)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        slots[row, :length] = torch.arange(start + 1, start + length + 1)
    rows = torch.arange(len(lengths))
    for cut in (1, 2, 9, 64, 127, 129, 133, 199, 255, 256, 258, 290):
        for decoding in (True, False):
            seen = torch.tensor([min(cut, length) for length in lengths])
            new = torch.ones_like(seen) if decoding else seen
            own = torch.cat([torch.arange(start + one - few, start + one) for start, one, few in zip(starts, seen, new, strict=False)])
            output = torch.empty(len(own), 4, 16)
            attend(query[own], output, *caches, make_buckets(slots, rows, seen, new), None, invariant=True)
            assert torch.equal(output, trained[own]), (cut, decoding)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_trainer(temperature: float) -> None:
    """SGLang divides logits by temperatures [N, 1] in place, and takes torch's log-softmax of them."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = 4 * torch.randn(50, 1003, generator=generator), torch.randint(0, 1003, (50,), generator=generator)
    ours = token_statistics(logits, targets, temperature=temperature, vocab_size=1003).log_prob
    scaled = logits.clone().div_(torch.full((50, 1), temperature))
    assert torch.equal(torch.nn.functional.log_softmax(scaled, dim=-1).gather(1, targets[:, None])[:, 0], ours)
    expected = scaled.double() - scaled.double().exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(log_softmax(scaled, -1, False).double(), expected, rtol=2e-7, atol=1e-6)


def reference_hash(words: list[int]) -> int:
    """MurmurHash3_x86_32 of 32-bit words with seed 0, by Austin Appleby's description, in Python's integers."""

    def rotate(word: int, count: int) -> int:
        return (word << count | word >> (32 - count)) % 2**32

    state = 0
    for word in words:
        word = rotate(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        state = (rotate(state ^ word, 13) * 5 + 0xE6546B64) % 2**32
    state ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor % 2**32
    return state ^ state >> 16


def test_the_hash_is_that_of_the_algorithm() -> None:
    # Known values of MurmurHash3_x86_32: b"test" with seed 0, and four bytes 0.
    assert reference_hash([int.from_bytes(b"test", "little")]) == 0xBA6BD213
    assert reference_hash([0]) == 0x2362F9DE
    seeds, positions, columns = [0, 2**55 + 5, 2**63 - 1, 77], [0, 3, 2**31, 12], [0, 1, 31, 151_935]
    got = murmur_hash(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [reference_hash([seed % 2**32, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == expected
