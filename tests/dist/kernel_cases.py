"""The Triton kernels against float64, on a GPU or in Triton's interpreter; `test_head_kernels.py` runs this file in a process for it."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms import head_statistics as chunking
from megatron_rl.algorithms.head_statistics import head_statistics
from megatron_rl.algorithms.log_prob import TORCH_ROWS, CandidateColumns, Shard, TokenStatistics, merged_rows
from megatron_rl.models import head_kernels
from megatron_rl.models.head_kernels import TRITON_ROWS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A temperature, and which of the statistics have a gradient.
ASKED = [(0.7, (True, True, True)), (1.0, (True, True, False)), (2.5, (True, False, False)), (0.7, (False, False, True))]
# The interpreter cuts float32 to bfloat16 off; a GPU rounds to nearest.
BFLOAT16_ULP = 2**-8 if DEVICE == "cuda" else 2**-7


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real tile would hold every vocabulary of these tests."""
    monkeypatch.setattr(head_kernels, "_TILE", 16)


def random_rows(rows: int, columns: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    logits = scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return logits.to(dtype).to(DEVICE), torch.randint(0, columns, (rows,), generator=generator).to(DEVICE)


def defined(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Log-prob, entropy and varentropy by definition; 0 ln 0 = 0."""
    log_p = torch.log_softmax(logits, -1)
    finite = torch.where(log_p == -math.inf, 0.0, log_p)
    entropy = -(log_p.exp() * finite).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy, (log_p.exp() * (finite + entropy[:, None]) ** 2).sum(-1)


def total(statistics: Sequence[Tensor], asked: Sequence[bool]) -> Tensor:
    """A sum in which every row and every statistic asked for counts differently."""
    rows = torch.arange(1, len(statistics[0]) + 1, dtype=torch.float64, device=statistics[0].device)
    factors = (rows.sin(), rows.cos(), (2 * rows).sin())
    terms = [(factor * value).sum() for factor, value, wanted in zip(factors, statistics, asked, strict=True) if wanted]
    return sum(terms[1:], terms[0])


def all_three(statistics: TokenStatistics) -> tuple[Tensor, Tensor, Tensor]:
    assert statistics.entropy is not None and statistics.varentropy is not None
    return statistics.log_prob, statistics.entropy, statistics.varentropy


def shards_of(columns: int, *, vocab_size: int, num_ranks: int, temperature: float) -> list[Shard]:
    width = columns // num_ranks
    return [Shard(temperature, rank * width, max(0, min(width, vocab_size - rank * width))) for rank in range(num_ranks)]


def kernel_results(
    logits: Tensor, targets: Tensor, upstream: Sequence[Tensor | None], *, vocab_size: int, num_ranks: int, temperature: float
) -> tuple[list[Tensor], Tensor]:
    """The three statistics [T] of the ranks' merged partials, and the gradient [T, V] put together from theirs."""
    shards = shards_of(logits.shape[1], vocab_size=vocab_size, num_ranks=num_ranks, temperature=temperature)
    pieces = logits.chunk(num_ranks, 1)
    partials = [TRITON_ROWS.partials(piece, targets, shard=shard, with_entropy=True) for piece, shard in zip(pieces, shards, strict=True)]
    gradients = []
    for piece, shard, local in zip(pieces, shards, partials, strict=True):
        log_prob, saved = merged_rows(local, torch.stack(partials))
        gradients.append(TRITON_ROWS.gradient(piece, targets, shard, saved, upstream))
    return [log_prob, saved[2], saved[3]], torch.cat(gradients, 1)


def expected_results(
    logits: Tensor, targets: Tensor, asked: Sequence[bool], *, vocab_size: int, temperature: float
) -> tuple[list[Tensor], Tensor, list[Tensor | None]]:
    """The same in float64 by autograd, and the gradients of the statistics."""
    exact = logits.double().requires_grad_()
    values = defined(exact[:, :vocab_size] / temperature, targets)
    upstream = torch.autograd.grad(total(values, asked), values, retain_graph=True, allow_unused=True)
    (gradient,) = torch.autograd.grad(total(values, asked), exact)
    return [value.detach() for value in values], gradient.nan_to_num(), [None if row is None else row.float() for row in upstream]


# 50 is no multiple of the tile, 20 columns per rank neither; 4 ranks of 20 leave the third a part and the last one only padding.
@pytest.mark.parametrize(
    ("columns", "vocab_size", "num_ranks"), [(50, 50, 1), (53, 50, 1), (16, 16, 1), (5, 3, 1), (64, 61, 2), (80, 50, 4)]
)
@pytest.mark.parametrize(("temperature", "asked"), ASKED)
def test_values_and_gradients(columns: int, vocab_size: int, num_ranks: int, temperature: float, asked: Sequence[bool]) -> None:
    logits, targets = random_rows(3, columns)
    logits[:, vocab_size:] = math.nan
    values, gradient, upstream = expected_results(logits, targets % vocab_size, asked, vocab_size=vocab_size, temperature=temperature)
    sizes = {"vocab_size": vocab_size, "num_ranks": num_ranks, "temperature": temperature}
    have, have_gradient = kernel_results(logits, targets % vocab_size, upstream, **sizes)
    for one, other in zip(have, values, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(have_gradient.double(), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_minus_infinity_has_no_mass_in_tiles_and_shards(num_ranks: int) -> None:
    logits, targets = random_rows(4, 70)
    logits[0, 3:50] = logits[1, :36] = logits[2, 34:] = -math.inf
    targets[:] = torch.tensor([1, 60, 2, 69])
    values, gradient, upstream = expected_results(logits, targets, (True, True, True), vocab_size=70, temperature=0.7)
    have, have_gradient = kernel_results(logits, targets, upstream, vocab_size=70, num_ranks=num_ranks, temperature=0.7)
    for one, other in zip(have, values, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(have_gradient.double(), gradient, rtol=1e-5, atol=1e-5)
    assert bool((have_gradient[logits == -math.inf] == 0).all())


@pytest.mark.parametrize("gap", [0.0, 88.0, 103.0, 106.0, 300.0])
def test_a_target_far_below_the_maximum_of_another_shard(gap: float) -> None:
    logits, _ = random_rows(3, 64)
    logits[:, 32:] -= gap
    targets = torch.tensor([40, 63, 5], device=DEVICE)
    values, gradient, upstream = expected_results(logits, targets, (True, True, True), vocab_size=64, temperature=0.7)
    have, have_gradient = kernel_results(logits, targets, upstream, vocab_size=64, num_ranks=2, temperature=0.7)
    torch.testing.assert_close(have[0].double(), values[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(have_gradient.double(), gradient, rtol=1e-5, atol=1e-5)


def test_uniform_and_one_hot_rows_are_exact_and_nothing_cancels() -> None:
    logits = torch.zeros(4, 50, device=DEVICE)
    logits[1, 17], logits[2, 49] = 200.0, 1e4
    # A small variance about a mean that is far from the maximum: one tile is 9 below, and holds all the mass but 1/8.
    logits[3, 1:] = torch.linspace(-0.01, 0.01, 49, device=DEVICE) - 2.0
    targets = torch.tensor([7, 17, 49, 0], device=DEVICE)
    have, _ = kernel_results(logits, targets, [torch.ones(4, device=DEVICE), None, None], vocab_size=50, num_ranks=1, temperature=1.0)
    assert have[1][1:3].tolist() == [0.0, 0.0] and have[2][:3].tolist() == [0.0] * 3 and have[0][1:3].tolist() == [0.0, 0.0]
    for one, other in zip(have, defined(logits.double(), targets), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_stays_none(bad: float) -> None:
    logits, targets = random_rows(2, 40)
    logits[0, 21] = bad
    upstream = [torch.ones(2, device=DEVICE)] * 3
    (log_prob, entropy, varentropy), gradient = kernel_results(logits, targets, upstream, vocab_size=40, num_ranks=1, temperature=1.0)
    for values in (log_prob, entropy, varentropy, gradient.sum(1)):
        assert values.isfinite().tolist() == [False, True]


def test_a_row_of_minus_infinity_alone_gets_no_gradient() -> None:
    logits, targets = random_rows(2, 20)
    logits[1] = -math.inf
    _, gradient = kernel_results(logits, targets, [torch.ones(2, device=DEVICE)] * 3, vocab_size=20, num_ranks=2, temperature=1.0)
    assert bool(gradient[0].any()) and not bool(gradient[1].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits, targets = random_rows(3, 70, dtype)
    values, gradient, upstream = expected_results(logits, targets, (True, True, True), vocab_size=70, temperature=0.7)
    have, have_gradient = kernel_results(logits, targets, upstream, vocab_size=70, num_ranks=2, temperature=0.7)
    for one, other in zip(have, values, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    # One rounding of the result, and the absolute error of float32 before it.
    assert have_gradient.dtype == dtype
    torch.testing.assert_close(have_gradient.double(), gradient, rtol=BFLOAT16_ULP, atol=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
def test_logits_are_written_to_only_on_demand(in_place: bool) -> None:
    logits, targets = random_rows(3, 37)
    before, shard = logits.clone(), Shard(1.0, 0, 30)
    local = TRITON_ROWS.partials(logits, targets % 30, shard=shard, with_entropy=True)
    assert torch.equal(logits, before)
    _, saved = merged_rows(local, local[None])
    upstream = [torch.ones(3, device=DEVICE)] * 3
    result = TRITON_ROWS.gradient(logits, targets % 30, shard, saved, upstream, in_place=in_place)
    assert (result is logits) == in_place and torch.equal(logits, before) == (not in_place)
    assert not bool(result[:, 30:].any())
    assert TRITON_ROWS.gradient(logits, targets, shard, saved, [None] * 3) is None


def test_log_prob_alone_is_that_of_all_three() -> None:
    logits, targets = random_rows(3, 50)
    shard = Shard(0.7, 0, 50)
    alone = TRITON_ROWS.partials(logits, targets, shard=shard, with_entropy=False)
    together = TRITON_ROWS.partials(logits, targets, shard=shard, with_entropy=True)
    torch.testing.assert_close(alone[:, [0, 1, 4]], together[:, [0, 1, 4]], rtol=1e-6, atol=0)


def test_rows_beyond_two_gigabytes_are_found() -> None:
    """65,536 rows of 151,936 logits have more elements than an int32 counts."""
    stride = 2**30
    # Untouched memory is not taken.
    storage = torch.empty(2 * stride + 20, dtype=torch.bfloat16, device=DEVICE)
    logits = storage.as_strided((3, 20), (stride, 1))
    values, targets = random_rows(3, 20, torch.bfloat16)
    logits.copy_(values)
    have = TRITON_ROWS.partials(logits, targets, shard=Shard(1.0, 0, 20), with_entropy=True)
    torch.testing.assert_close(have, TRITON_ROWS.partials(values, targets, shard=Shard(1.0, 0, 20), with_entropy=True))


# Whole head: hidden states and weight.

HIDDEN, VOCAB, PADDED = 7, 45, 48


def head_problem(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).to(DEVICE).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype).to(DEVICE).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (rows,), generator=generator).to(DEVICE)


def head_expected(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, *, dropped: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`dropped` [N, VOCAB] are no candidates."""
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = exact[0] @ exact[1][:VOCAB].t() / temperature
    values = defined(logits if dropped is None else logits.masked_fill(dropped, -math.inf), targets)
    total(values, (True, True, True)).backward()
    assert exact[0].grad is not None and exact[1].grad is not None
    return *(value.detach() for value in values), exact[0].grad, exact[1].grad


def run_ranks(
    run: Callable[..., TokenStatistics], pieces: Sequence[Tensor], partials: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[TokenStatistics]:
    """What each rank gets of a gather of all ranks' partials: two rounds, of which the first collects them."""
    group = object()
    monkeypatch.setattr(dist, "get_world_size", lambda of: len(pieces))

    def collect(out: list[Tensor], local: Tensor, group: object) -> None:
        partials.append(local)
        for target in out:
            target.copy_(local)

    def gather(out: list[Tensor], local: Tensor, group: object) -> None:
        for target, partial in zip(out, partials, strict=True):
            target.copy_(partial)

    monkeypatch.setattr(dist, "all_gather", collect)
    for rank, piece in enumerate(pieces):
        run(rank, piece, group)
    monkeypatch.setattr(dist, "all_gather", gather)
    return [run(rank, piece, group) for rank, piece in enumerate(pieces)]


def some_candidates(targets: Tensor) -> tuple[CandidateColumns, Tensor]:
    """The target and others, more in each row, and the mask [N, VOCAB] of the other columns."""
    sets = [sorted({target, *range(4, 4 + row**3)} & set(range(VOCAB))) for row, target in enumerate(targets.tolist())]
    counts, columns = [len(each) for each in sets], torch.tensor([column for each in sets for column in each], device=DEVICE)
    rows = torch.arange(len(sets), device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
    dropped = torch.ones(len(sets), VOCAB, dtype=torch.bool, device=DEVICE)
    dropped[rows, columns] = False
    return CandidateColumns(columns.int(), rows.int(), torch.tensor(counts, device=DEVICE), [0, *itertools.accumulate(counts)]), dropped


@pytest.mark.parametrize(
    ("rows", "num_ranks", "chunk_rows", "restricted"),
    [(1, 1, 2, False), (5, 1, 2, False), (5, 2, 2, False), (1, 4, 2, False), (5, 4, 100, False), (5, 1, 2, True), (5, 4, 2, True)],
)
def test_head_of_ranks(rows: int, num_ranks: int, chunk_rows: int, restricted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    width = PADDED // num_ranks
    monkeypatch.setitem(chunking._CHUNK_LOGITS, DEVICE, chunk_rows * width)
    hidden, weight, targets = head_problem(rows, torch.float32)
    pieces = [piece.detach().clone().requires_grad_() for piece in weight.chunk(num_ranks)]
    candidates, dropped = some_candidates(targets) if restricted else (None, None)

    def run(rank: int, piece: Tensor, group: object) -> TokenStatistics:
        place = {"vocab_size": VOCAB, "vocab_start": rank * width, "group": group}
        return head_statistics(hidden, piece, targets, temperature=0.7, **place, rows=TRITON_ROWS, candidates=candidates)

    ranks = run_ranks(run, pieces, [], monkeypatch)
    *values, hidden_gradient, weight_gradient = head_expected(hidden, weight, targets, 0.7, dropped=dropped)
    whole = head_expected(hidden, weight, targets, 0.7)[1]
    for statistics in ranks:
        for have, want in zip(all_three(statistics), values, strict=True):
            torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
        if restricted:
            torch.testing.assert_close(statistics.full_entropy.double(), whole, rtol=1e-5, atol=1e-5)
        total(all_three(statistics), (True, True, True)).backward()
    assert hidden.grad is not None
    # The gradient of the hidden states sums over ranks.
    torch.testing.assert_close(hidden.grad.double(), hidden_gradient, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([piece.grad for piece in pieces]).double(), weight_gradient, rtol=1e-5, atol=1e-5)


def test_no_rows_at_all() -> None:
    hidden, weight, targets = head_problem(0, torch.float32)
    statistics = head_statistics(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB, rows=TRITON_ROWS)
    assert statistics.log_prob.shape == (0,)
    statistics.log_prob.sum().backward()
    assert hidden.grad is not None and weight.grad is not None and not bool(weight.grad.any())


@pytest.mark.parametrize("buffered", [False, True])
def test_bfloat16_head_is_as_good_as_torch(buffered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round logits and their gradient to bfloat16 once; neither may add an error of its own."""
    monkeypatch.setitem(chunking._CHUNK_LOGITS, DEVICE, 3 * PADDED)
    errors = {}
    for rows in (TORCH_ROWS, TRITON_ROWS):
        hidden, weight, targets = head_problem(9, torch.bfloat16)
        buffer = torch.zeros_like(weight, dtype=torch.float32) if buffered else None
        statistics = all_three(
            head_statistics(hidden, weight, targets, temperature=0.7, vocab_size=VOCAB, gradient_buffer=buffer, rows=rows)
        )
        total(statistics, (True, True, True)).backward()
        assert hidden.grad is not None and weight.grad is not None
        weight_gradient = weight.grad.double() + (0 if buffer is None else buffer)
        results = (*statistics, hidden.grad.double(), weight_gradient)
        exact = head_expected(hidden, weight, targets, 0.7)
        errors[rows.name] = [float((have - want).detach().norm() / want.norm()) for have, want in zip(results, exact, strict=True)]
    # Logits of about 4 are off by 2^-7 at most, log-probs as much over the temperature, and so relatively are gradients.
    assert max(errors["triton"]) < 0.02
    for torch_error, triton_error in zip(errors["torch"], errors["triton"], strict=True):
        assert triton_error < 2 * torch_error + 1e-6
