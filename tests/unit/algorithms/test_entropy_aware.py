"""Draws by quadrant against a float64 loop: on rows of logits, in chunks of a head, and over their settings."""

import dataclasses

import numpy as np
import pytest
import torch
from shaped_draws import draw_by_definition, entropies, softmax

from megatron_rl.algorithms import head_statistics
from megatron_rl.algorithms.entropy_aware import DRAWS, QUADRANTS, Draw, EntropyAware, reshaped
from megatron_rl.algorithms.head_statistics import LEAST_LOG_PROB, drawn_log_probs

VOCAB, TEMPERATURE = 31, 0.7
PLAIN = EntropyAware(thresholds=(1.2, 0.8))
OWN = EntropyAware(
    thresholds=(1.2, 0.8),
    quadrants={
        "argmax": Draw(temperature=0.5, top_k=2),
        "branch": Draw(temperature=1.7, top_k=9, top_p=0.8),
        "explore": Draw(top_p=0.55),
        "resample": Draw(temperature=0.8, top_k=100, top_p=0.97),
    },
)


def rows(count: int = 240, *, seed: int = 0) -> torch.Tensor:
    """Logits of all sharpnesses, some -inf, in float64."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(count, VOCAB)) * np.exp(random.uniform(-3, 2, size=(count, 1)))
    # Two peaks over a flat rest: much varentropy with little and with much entropy.
    logits[::3, :2] += random.uniform(2, 9, size=(len(logits[::3]), 1))
    logits[::5, 20:] = -np.inf
    return torch.tensor(logits)


def drawn(logits: torch.Tensor, entropy: EntropyAware, temperature: float = TEMPERATURE) -> torch.Tensor:
    return torch.log_softmax(reshaped(logits, [entropy.numbers(temperature=temperature)]) / temperature, -1)


@pytest.mark.parametrize("entropy", [PLAIN, OWN], ids=["defaults", "own"])
def test_draws_are_those_of_a_float64_loop(entropy: EntropyAware) -> None:
    logits = rows()
    wanted = [draw_by_definition(row, entropy, temperature=TEMPERATURE) for row in logits.tolist()]
    names = [name for _, name in wanted]
    assert min(names.count(name) for name in QUADRANTS) >= 8
    expected = torch.tensor([row for row, _ in wanted], dtype=torch.float64)
    torch.testing.assert_close(drawn(logits, entropy), expected, rtol=1e-12, atol=1e-12)
    # In float32 a candidate at a border may go either way.
    low = drawn(logits.float(), entropy)
    same = (low.isinf() == expected.isinf()).all(-1)
    assert low.dtype == torch.float32 and same.float().mean() > 0.98
    torch.testing.assert_close(low[same].double(), expected[same], rtol=1e-5, atol=1e-5)
    measured = torch.tensor([entropies(softmax(row, TEMPERATURE)) for row in logits.tolist()], dtype=torch.float64)
    assert [QUADRANTS[place] for place in entropy.places(*measured.unbind(-1)).tolist()] == names


def test_the_settings_of_each_row_are_its_own() -> None:
    logits, cases = rows(24), [(PLAIN, 0.7), (OWN, 1.3), (PLAIN, 2.0)]
    numbers = [entropy.numbers(temperature=temperature) for entropy, temperature in cases * 8]
    got = reshaped(logits, numbers)
    for number, (entropy, temperature) in enumerate(cases * 8):
        torch.testing.assert_close(
            got[number : number + 1], reshaped(logits[number : number + 1], [entropy.numbers(temperature=temperature)])
        )


def test_ties_at_the_last_candidate_stay() -> None:
    three = torch.tensor([[5.0, 5.0, 5.0, 0.0, -1.0]])
    anywhere = EntropyAware(thresholds=(9.0, 9.0))
    assert drawn(three, anywhere).exp()[0, :3].tolist() == pytest.approx([1 / 3] * 3)
    assert drawn(three, anywhere)[0, 3:].tolist() == [float("-inf")] * 2


def test_no_token_is_left_out_by_rounding_alone() -> None:
    """The sum of as many probabilities in float32 is above 1 before their end."""
    many = torch.tensor(np.random.default_rng(0).normal(size=(4, 50_000)), dtype=torch.float32)
    assert drawn(many, EntropyAware(thresholds=(0.0, 99.0))).isfinite().all()


def test_a_threshold_is_high_from_itself_on() -> None:
    entropy = EntropyAware(thresholds=(0.5, 0.25))
    places = entropy.places(torch.tensor([0.5, 0.499, 0.5, 0.499]), torch.tensor([0.25, 0.25, 0.249, 0.249]))
    assert [QUADRANTS[place] for place in places.tolist()] == ["resample", "branch", "explore", "argmax"]


@pytest.mark.parametrize("chunk_logits", [1, 7 * VOCAB, 2**24])
def test_a_head_gives_the_log_probs_of_the_draw(chunk_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head_statistics._CHUNK_LOGITS, "cpu", chunk_logits)
    random, padded = np.random.default_rng(3), VOCAB + 5
    hidden, weight = (
        torch.tensor(random.normal(size=(40, 6))) * torch.linspace(0.1, 4, 40)[:, None],
        torch.tensor(random.normal(size=(padded, 6))),
    )
    # Padding columns beyond the vocabulary are the likeliest.
    weight[VOCAB:] *= 50
    targets = torch.tensor(random.integers(0, VOCAB, 40))
    wanted = [draw_by_definition(row, OWN, temperature=TEMPERATURE)[0] for row in (hidden @ weight[:VOCAB].t()).tolist()]
    found = [max(row[target], LEAST_LOG_PROB) for row, target in zip(wanted, targets.tolist(), strict=True)]
    expected = torch.tensor(found, dtype=torch.float64)
    assert 3 < (expected == LEAST_LOG_PROB).sum() < 37
    options = {"entropy": OWN, "temperature": TEMPERATURE, "vocab_size": VOCAB, "group": None}
    torch.testing.assert_close(drawn_log_probs(hidden, weight, targets, **options), expected)
    assert len(drawn_log_probs(hidden[:0], weight, targets[:0], **options)) == 0


def test_numbers_are_what_the_settings_say() -> None:
    assert PLAIN.numbers(temperature=0.5) == [0.5, 1.2, 0.8, 1.0, 1, 1.0, 1.2, 40, 1.0, 1.3, 0, 1.0, 2.0, 0, 0.9]
    one = dataclasses.replace(PLAIN, quadrants={"explore": Draw(top_k=3)})
    assert one.numbers(temperature=0.5)[9:12] == [1.0, 3, 1.0], "a draw takes the place of its quadrant's as a whole"
    assert DRAWS.keys() == set(QUADRANTS)


@pytest.mark.parametrize("thresholds", [(-0.1, 1.0), (1.0, -0.1), (float("inf"), 1.0)])
def test_impossible_thresholds_are_refused(thresholds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="thresholds"):
        EntropyAware(thresholds=thresholds)
