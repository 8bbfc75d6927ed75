"""Log-prob, entropy and varentropy against their definitions, whole and in shards."""

import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl.algorithms import log_prob
from megatron_rl.algorithms.head_statistics import token_statistics


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """By definition, in float64; 0 ln 0 = 0."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    p = log_p.exp()
    finite = torch.where(p > 0, log_p, 0.0)
    entropy = -(p * finite).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy, (p * (finite + entropy[:, None]) ** 2).sum(-1)


def random_rows(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    logits = 3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, columns, (rows,), generator=generator)


def weighted(statistics: tuple[torch.Tensor, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(statistics), len(statistics[0]), generator=generator, dtype=torch.float64)
    return sum((weight * statistic).sum() for weight, statistic in zip(weights, statistics, strict=True))


def all_three(statistics: log_prob.TokenStatistics) -> tuple[torch.Tensor, ...]:
    assert statistics.entropy is not None and statistics.varentropy is not None
    return statistics.log_prob, statistics.entropy, statistics.varentropy


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk_elements", [1, 64, 2**18])
def test_values_and_gradients(temperature: float, chunk_elements: int, monkeypatch) -> None:
    monkeypatch.setitem(log_prob._CHUNK_ELEMENTS, "cpu", chunk_elements)
    logits, targets = random_rows(9, 31)
    got, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    statistics = all_three(token_statistics(got, targets, temperature=temperature, vocab_size=31))
    wanted = reference(expected, targets, temperature)
    for have, want in zip(statistics, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    weighted(statistics).backward()
    weighted(wanted).backward()
    torch.testing.assert_close(got.grad, expected.grad, rtol=1e-11, atol=1e-12)


def test_each_gradient_alone() -> None:
    logits, targets = random_rows(4, 7)
    for number in range(3):
        assert torch.autograd.gradcheck(
            lambda z, n=number: all_three(token_statistics(z, targets, temperature=0.8, vocab_size=7))[n], logits.clone().requires_grad_()
        )


def test_the_log_prob_alone() -> None:
    logits, targets = random_rows(6, 19)
    leaf = logits.clone().requires_grad_()
    statistics = token_statistics(leaf, targets, temperature=0.9, vocab_size=19, with_entropy=False)
    assert statistics.entropy is None and statistics.varentropy is None
    statistics.log_prob.sum().backward()
    expected = torch.nn.functional.one_hot(targets, 19) - torch.softmax(logits / 0.9, -1)
    torch.testing.assert_close(leaf.grad, expected / 0.9)


@pytest.mark.parametrize("padding", [0.0, 1e4, math.inf, -math.inf, math.nan])
def test_padded_columns_take_no_part(padding: float) -> None:
    logits, targets = random_rows(5, 11)
    wide = torch.cat([logits, torch.full((5, 5), padding, dtype=torch.float64)], 1).requires_grad_()
    statistics = all_three(token_statistics(wide, targets, temperature=1.0, vocab_size=11))
    for have, want in zip(statistics, reference(logits, targets, 1.0), strict=True):
        torch.testing.assert_close(have, want)
    weighted(statistics).backward()
    assert bool((wide.grad[:, 11:] == 0).all()) and bool(wide.grad.isfinite().all())


def test_minus_infinity_is_probability_zero() -> None:
    logits, targets = random_rows(6, 12)
    logits[:, 3:9] = -math.inf
    targets = targets % 3
    leaf = logits.clone().requires_grad_()
    statistics = all_three(token_statistics(leaf, targets, temperature=0.7, vocab_size=12))
    for have, want in zip(statistics, reference(logits, targets, 0.7), strict=True):
        torch.testing.assert_close(have, want)
    weighted(statistics).backward()
    assert bool(leaf.grad.isfinite().all()) and bool((leaf.grad[:, 3:9] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_hot_rows_and_their_gradients(dtype: torch.dtype) -> None:
    """The seed's clamp gave 1.2e-4 where the varentropy is 0, and log2 mixed with ln a factor of 2.08."""
    logits = torch.zeros(3, 40, dtype=dtype)
    logits[:, 5] = torch.tensor([200.0, 1e4, 30.0]).to(dtype)
    leaf = logits.requires_grad_()
    log_p, entropy, varentropy = all_three(token_statistics(leaf, torch.tensor([5, 5, 0]), temperature=1.0, vocab_size=40))
    assert bool((entropy >= 0).all()) and bool((varentropy >= 0).all()) and entropy[:2].tolist() == [0.0, 0.0]
    assert float(varentropy.detach().max()) < 1e-8
    (log_p.sum() + entropy.sum() + varentropy.sum()).backward()
    assert leaf.grad.dtype == dtype and bool(leaf.grad.isfinite().all())
    uniform = all_three(token_statistics(torch.zeros(1, 8), torch.tensor([0]), temperature=1.0, vocab_size=8))
    assert float(uniform[1]) == pytest.approx(math.log(8)) and float(uniform[2]) == 0.0


def test_bfloat16_is_computed_in_float32() -> None:
    logits, targets = random_rows(5, 5000, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    statistics = all_three(token_statistics(leaf, targets, temperature=1.0, vocab_size=5000))
    for have, want in zip(statistics, reference(logits, targets, 1.0), strict=True):
        assert have.dtype == torch.float32
        torch.testing.assert_close(have.double(), want, rtol=2e-5, atol=2e-5)
    statistics[0].sum().backward()
    exact = torch.nn.functional.one_hot(targets, 5000) - torch.softmax(logits.double(), -1)
    torch.testing.assert_close(leaf.grad, exact.to(torch.bfloat16))


def test_the_logits_are_read_only() -> None:
    logits, targets = random_rows(5, 33, torch.float32)
    before, version = logits.clone(), logits._version
    leaf = logits.requires_grad_()
    weighted(all_three(token_statistics(leaf, targets % 30, temperature=0.7, vocab_size=30))).backward()
    assert torch.equal(before, logits.detach()) and logits._version == version


def test_no_rows() -> None:
    leaf = torch.zeros(0, 7, requires_grad=True)
    statistics = token_statistics(leaf, torch.zeros(0, dtype=torch.int64), temperature=1.0, vocab_size=7)
    assert statistics.log_prob.shape == (0,)
    statistics.log_prob.sum().backward()
    assert leaf.grad.shape == (0, 7)


def test_shards_merge_to_the_whole_with_padding_and_infinity() -> None:
    logits, targets = random_rows(8, 24)
    logits[2:4, 8:16] = -math.inf
    targets[2:4] = 1
    targets = targets.clamp(max=20)
    shards = ((0, 8), (8, 8), (16, 5), (24, 0))
    partials = [
        log_prob.local_partials(
            logits[:, start % 24 : start % 24 + 8], targets, shard=log_prob.Shard(0.7, start, columns), with_entropy=True
        )
        for start, columns in shards
    ]
    merged, saved = log_prob.merged_rows(partials[0], torch.stack(partials))
    for have, want in zip((merged, saved[2], saved[3]), reference(logits[:, :21], targets, 0.7), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("gap", [0.0, 1.0, 50.0, 87.0, 88.0, 103.0, 104.0, 106.0, 200.0, 300.0])
def test_a_target_far_below_the_maximum_of_another_shard(gap: float) -> None:
    logits, _ = random_rows(4, 12, torch.float32)
    logits[:, 6:] -= gap
    logits[3, 6:] = -math.inf
    targets = torch.tensor([7, 11, 2, 5])
    shards = [log_prob.Shard(0.7, start, 6) for start in (0, 6)]
    pieces = logits.split(6, 1)
    partials = [
        log_prob.local_partials(piece, targets, shard=shard, with_entropy=True) for piece, shard in zip(pieces, shards, strict=True)
    ]
    weights = [torch.tensor(numbers) for numbers in ([1.0, -2.0, 0.5, 3.0], [0.3, 0.2, -0.1, 1.0], [0.7, 0.1, 0.4, -1.0])]
    got = []
    for piece, shard, local in zip(pieces, shards, partials, strict=True):
        log_probs, saved = log_prob.merged_rows(local, torch.stack(partials))
        gradient = log_prob.logit_gradient(piece, targets, shard, saved, weights)
        assert gradient is not None
        got.append(gradient)
    exact = logits.double().requires_grad_()
    statistics = reference(exact, targets, 0.7)
    torch.testing.assert_close(log_probs.double(), statistics[0].detach(), rtol=1e-6, atol=1e-5)
    sum((weight * statistic).sum() for weight, statistic in zip(weights, statistics, strict=True)).backward()
    torch.testing.assert_close(torch.cat(got, 1).double(), exact.grad.nan_to_num(), rtol=1e-5, atol=1e-5)


def _sharded(rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    logits, targets = random_rows(6, 20)
    logits[3, 10:] = -math.inf
    logits[4, :10] -= 800.0  # The first shard, which has the target, has a share of the mass that underflows float64.
    targets = targets.clamp(max=9)
    leaf = logits[:, rank * 10 : rank * 10 + 10].clone().requires_grad_()
    statistics = all_three(token_statistics(leaf, targets, temperature=0.7, vocab_size=17, vocab_start=rank * 10, group=dist.group.WORLD))
    weighted(statistics).backward()
    queue.put((rank, [statistic.detach().tolist() for statistic in statistics], leaf.grad.tolist()))
    dist.destroy_process_group()


def test_vocabulary_parallel_over_two_processes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_sharded, args=(rank, port, queue)) for rank in range(2)]
    for child in children:
        child.start()
    try:
        results = sorted(queue.get(timeout=60) for _ in children)
    finally:
        for child in children:
            child.join(10)
            child.kill()
    logits, targets = random_rows(6, 20)
    logits[3, 10:] = -math.inf
    logits[4, :10] -= 800.0  # The first shard, which has the target, has a share of the mass that underflows float64.
    whole = logits.clone().requires_grad_()
    statistics = all_three(token_statistics(whole, targets.clamp(max=9), temperature=0.7, vocab_size=17))
    weighted(statistics).backward()
    for rank, values, gradient in results:
        for have, want in zip(values, statistics, strict=True):
            torch.testing.assert_close(torch.tensor(have, dtype=torch.float64), want.detach())
        torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), whole.grad[:, rank * 10 : rank * 10 + 10])


@pytest.mark.parametrize(
    ("logits", "targets", "temperature", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), 1.0, "needs"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0.0, "temperature"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), 1.0, "targets"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), 1.0, "targets"),
    ],
)
def test_bad_input_is_refused(logits, targets, temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_statistics(logits, targets, temperature=temperature, vocab_size=3)
