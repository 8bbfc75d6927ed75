"""Statistics from hidden states in chunks are those of whole logits, and no larger piece of the logits than a chunk ever exists."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.algorithms import head_statistics as module
from megatron_rl.algorithms.head_statistics import head_statistics, token_statistics
from megatron_rl.algorithms.log_prob import TORCH_ROWS, CandidateColumns, RowMaths, TokenStatistics

HIDDEN, VOCAB, TEMPERATURE = 6, 31, 0.7


def problem(rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head's weight with three rows of padding, targets."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB + 3, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def total(log_prob: torch.Tensor, entropy: torch.Tensor, varentropy: torch.Tensor) -> torch.Tensor:
    """Every row and every statistic counts differently."""
    rows = torch.arange(1, len(log_prob) + 1, dtype=torch.float64)
    return (rows.sin() * log_prob + rows.cos() * entropy + (2 * rows).sin() * varentropy).sum()


def all_three(statistics: TokenStatistics) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert statistics.entropy is not None and statistics.varentropy is not None
    return statistics.log_prob, statistics.entropy, statistics.varentropy


def expected(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By definition, in float64, with the gradients of `total`."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_p = (hidden @ weight[:VOCAB].t() / TEMPERATURE).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    values = log_p[torch.arange(len(targets)), targets], entropy, (log_p.exp() * (log_p + entropy[:, None]) ** 2).sum(-1)
    total(*values).backward()
    assert hidden.grad is not None and weight.grad is not None
    return *(value.detach() for value in values), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 100])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare weight", "gradient buffer"])
def test_chunks_change_neither_values_nor_gradients(chunk_rows: int, wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._CHUNK_LOGITS, "cpu", chunk_rows * (VOCAB + 3))
    hidden, weight, targets = problem(11)
    buffer = torch.ones_like(weight) if wrapped else None
    values = all_three(head_statistics(hidden, weight, targets, temperature=TEMPERATURE, vocab_size=VOCAB, gradient_buffer=buffer))
    total(*values).backward()
    assert hidden.grad is not None and weight.grad is not None
    weight_gradient = weight.grad if buffer is None else weight.grad + buffer - 1
    for have, want in zip((*values, hidden.grad, weight_gradient), expected(hidden, weight, targets), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-12)


def test_chunked_bfloat16_gradients_keep_the_float32_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = problem(600, torch.bfloat16)
    errors = []
    for rows in (600, 1):
        monkeypatch.setitem(module._CHUNK_LOGITS, "cpu", rows * (VOCAB + 3))
        weight.grad = None
        head_statistics(hidden, weight, targets, temperature=TEMPERATURE, vocab_size=VOCAB, with_entropy=False).log_prob.sum().backward()
        exact = hidden.detach().double(), weight.detach().double().requires_grad_()
        (exact[0] @ exact[1][:VOCAB].t() / TEMPERATURE).log_softmax(-1)[torch.arange(600), targets].sum().backward()
        assert weight.grad is not None and exact[1].grad is not None
        errors.append(float((weight.grad.double() - exact[1].grad).norm() / exact[1].grad.norm()))
    # Rounding every row's product is no worse than a few roundings of the sum; a sum in bfloat16 would be off by several percent.
    assert max(errors) < 0.01


def test_nothing_to_look_at_still_reaches_every_gradient() -> None:
    hidden, weight, targets = problem(0)
    statistics = head_statistics(hidden, weight, targets, temperature=TEMPERATURE, vocab_size=VOCAB)
    assert statistics.log_prob.shape == (0,)
    statistics.log_prob.sum().backward()
    assert hidden.grad is not None and weight.grad is not None and not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient_but_hidden_states_do() -> None:
    hidden, weight, targets = problem(4)
    want = expected(hidden, weight, targets)[3]
    weight.requires_grad_(False)
    total(*all_three(head_statistics(hidden, weight, targets, temperature=TEMPERATURE, vocab_size=VOCAB))).backward()
    assert hidden.grad is not None and weight.grad is None
    torch.testing.assert_close(hidden.grad, want, rtol=1e-11, atol=1e-12)


class LargestOf(TorchDispatchMode):
    """The most elements of any tensor with a vocabulary's columns that an operation makes, apart from views of `weight`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.elements = weight.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Callable[..., object], types: object, args: object = (), kwargs: object = None) -> object:
        made = func(*args, **(kwargs or {}))  # type: ignore[misc,dict-item]
        for tensor in made if isinstance(made, tuple | list) else [made]:
            logits = isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.shape[-1] in (VOCAB, VOCAB + 3)
            if logits and tensor.untyped_storage().data_ptr() != self.weight:
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("rows", [40, 400])
def test_logits_take_the_memory_of_one_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._CHUNK_LOGITS, "cpu", 8 * (VOCAB + 3))
    hidden, weight, targets = problem(rows)
    for train in (False, True):
        with LargestOf(weight) as largest, torch.set_grad_enabled(train):
            statistics = head_statistics(hidden, weight, targets, temperature=TEMPERATURE, vocab_size=VOCAB)
            if train:
                total(*all_three(statistics)).backward()
        # The softmax works in three planes of a chunk.
        assert largest.elements == 3 * 8 * VOCAB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 1])}, r"needs \[N, H\], \[V, H\] and \[N\]"),
        ({"temperature": 0.0}, "needs a positive one"),
    ],
)
def test_what_has_no_statistics_is_refused(change: dict, message: str) -> None:
    hidden, weight, targets = problem(3)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "temperature": 1.0, "vocab_size": VOCAB}
    with pytest.raises(ValueError, match=message):
        head_statistics(**{**arguments, **change})


def candidate_columns(sets: list[list[int]]) -> CandidateColumns:
    counts = [len(each) for each in sets]
    rows = torch.repeat_interleave(torch.arange(len(sets), dtype=torch.int32), torch.tensor(counts))
    columns = torch.tensor([column for each in sets for column in each], dtype=torch.int32)
    return CandidateColumns(columns, rows, torch.tensor(counts, dtype=torch.int32), [0, *itertools.accumulate(counts)])


def over_candidates(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, sets: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """By definition, a row and a candidate at a time: log-prob, entropy and varentropy, with the gradients of `total`; full entropy."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    rows, full = [], []
    for row, target, columns in zip(hidden, targets.tolist(), sets, strict=True):
        logits = [row @ weight[column] / TEMPERATURE for column in range(VOCAB)]
        for chosen, out in ((columns or range(VOCAB), rows), (range(VOCAB), full)):
            normaliser = torch.stack([logits[column].exp() for column in chosen]).sum().log()
            log_p = {column: logits[column] - normaliser for column in chosen}
            entropy = -sum(log_p[column].exp() * log_p[column] for column in chosen)
            varentropy = sum(log_p[column].exp() * (log_p[column] + entropy) ** 2 for column in chosen)
            out.append(torch.stack([log_p.get(target, torch.tensor(torch.nan)), entropy, varentropy]))
    values = torch.stack(rows).unbind(1)
    total(*values).backward()
    assert hidden.grad is not None and weight.grad is not None
    return *(value.detach() for value in values), hidden.grad, weight.grad, torch.stack(full)[:, 1].detach()


# Unequal sizes: one candidate, two, many, all by name, and a row without a record, which has all.
SETS = [[4], [7, 0], [30, 2, 9, 11, 5], list(range(VOCAB)), [], [12], [29, 30], [1, 0, 2, 3], [8, 20], [16], [3, 28, 17]]


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("rows", [TORCH_ROWS, None], ids=["torch", "whole logits"])
def test_statistics_over_candidates_are_those_of_a_loop(rows: RowMaths | None, chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._CHUNK_LOGITS, "cpu", chunk_rows * (VOCAB + 3))
    hidden, weight, targets = problem(len(SETS))
    targets = torch.tensor([each[len(each) // 2] if each else int(target) for each, target in zip(SETS, targets, strict=True)])
    options = {"temperature": TEMPERATURE, "vocab_size": VOCAB, "candidates": candidate_columns(SETS)}
    if rows is None:
        logits = hidden @ weight.t()
        before = logits.detach().clone()
        statistics = token_statistics(logits, targets, **options)
        assert torch.equal(logits, before)
    else:
        statistics = head_statistics(hidden, weight, targets, **options, rows=rows)
    total(*all_three(statistics)).backward()
    found = (*all_three(statistics), hidden.grad, weight.grad, statistics.full_entropy)
    for have, want in zip(found, over_candidates(hidden, weight, targets, SETS), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-12)
    alone = torch.tensor([len(each) == 1 for each in SETS])
    assert hidden.grad is not None and (hidden.grad.abs().sum(1) == 0).equal(alone) and (statistics.log_prob == 0).equal(alone)


def test_log_probs_over_candidates_need_no_entropy() -> None:
    hidden, weight, _ = problem(len(SETS))
    targets = torch.tensor([each[-1] if each else 0 for each in SETS])
    options = {"temperature": TEMPERATURE, "vocab_size": VOCAB, "candidates": candidate_columns(SETS), "with_entropy": False}
    statistics = head_statistics(hidden, weight, targets, **options)
    assert statistics.entropy is None and statistics.full_entropy is None
    torch.testing.assert_close(statistics.log_prob, over_candidates(hidden, weight, targets, SETS)[0], rtol=1e-11, atol=1e-12)
