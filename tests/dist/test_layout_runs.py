"""The comparison of layouts sees a difference wherever it is."""

from collections.abc import Callable

import numpy as np
import pytest
from layout_runs import Outcome, check_ranks_agree, compare

from megatron_rl.observe.metrics import Mean

SPOIL: dict[str, tuple[Callable[[Outcome], None], str]] = {
    "a weight": (lambda outcome: outcome["weights"]["b"].__imul__(1.5), "weights"),
    "a weight that is no number": (lambda outcome: outcome["weights"]["a"].__setitem__(0, np.nan), "weights"),
    "a log-prob": (lambda outcome: outcome["log_probs"][1].__setitem__(2, 7.0), "log_probs"),
    "a log-prob that is no number": (lambda outcome: outcome["log_probs"][1].__setitem__(2, np.nan), "log_probs"),
    "a loss": (lambda outcome: outcome["metrics"][1].update({"train/loss": Mean(9.0, 1.0)}), "loss"),
    "a metric that is no number": (lambda outcome: outcome["metrics"][0].update({"train/entropy": Mean(np.nan, 1.0)}), "metrics"),
    "a gradient norm": (lambda outcome: outcome["metrics"][1].update({"train/grad_norm": Mean(3.0, 1.0)}), "grad_norm"),
}


def make_outcome() -> Outcome:
    metrics = [{name: Mean(1.0 + step, 1.0) for name in ("train/loss", "train/grad_norm", "train/entropy")} for step in range(2)]
    return {
        "metrics": metrics,
        "weights": {"a": np.arange(3.0), "b": np.ones(4), "zero": np.zeros(2)},
        "digests": {"a": "1", "b": "2"},
        "log_probs": [np.zeros(3), -np.ones(3)],
        "arrangement": {},
    }


def test_equal_outcomes_do_not_differ() -> None:
    assert compare([make_outcome(), make_outcome()], [make_outcome()] * 2).largest == 0.0


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("name", SPOIL)
def test_a_difference_on_any_rank_is_seen(name: str, rank: int) -> None:
    spoil, quantity = SPOIL[name]
    outcomes, base = [make_outcome(), make_outcome()], [make_outcome(), make_outcome()]
    spoil(outcomes[rank])
    differences = compare(outcomes, base)
    assert getattr(differences, quantity) > 0.1 and differences.largest > 0.1


def test_ranks_that_gathered_other_bits_do_not_agree() -> None:
    outcomes = [make_outcome(), make_outcome()]
    check_ranks_agree(outcomes)
    outcomes[1]["digests"]["b"] = "3"
    with pytest.raises(AssertionError, match="different weights"):
        check_ranks_agree(outcomes)
