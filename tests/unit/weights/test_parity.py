import numpy as np
import pytest

from megatron_rl.errors import ParityError
from megatron_rl.types import Prompt
from megatron_rl.weights.parity import check_parity, make_probe, sequences


def test_probe_continues_real_prompts_with_valid_tokens() -> None:
    prompts = [Prompt(id="a", token_ids=np.array([1, 2, 3]), text="abc"), Prompt(id="b", token_ids=np.arange(20), text="long")]
    probe = make_probe(prompts, vocab_size=30, num_sequences=3, length=10, seed=0)
    first, second, third = sequences(probe)
    assert first[:3].tolist() == third[:3].tolist() == [1, 2, 3]
    assert second[:9].tolist() == list(range(9))
    assert probe.tokens.max() < 30
    assert probe.loss_mask.sum() == 27
    again = make_probe(prompts, vocab_size=30, num_sequences=3, length=10, seed=0)
    assert np.array_equal(again.tokens, probe.tokens)


def test_equal_log_probs_pass_and_masked_tokens_do_not_count() -> None:
    trainer = np.array([np.nan, -1.0, -2.0], np.float32)
    engine = np.array([7.77, -1.0, -2.0001], np.float32)
    report = check_parity(engine, trainer, mask_T=np.array([False, True, True]), threshold=1e-4)
    assert report.num_tokens == 2
    assert report.mean == pytest.approx(5e-5, rel=1e-2)


@pytest.mark.parametrize("value", [-1.5, np.nan, -np.inf])
def test_a_difference_above_the_threshold_stops_the_run(value: float) -> None:
    trainer = np.full(4, -1.0, np.float32)
    engine = np.array([-1.0, -1.0, -1.0, value], np.float32)
    with pytest.raises(ParityError, match="engine and trainer disagree"):
        check_parity(engine, trainer, mask_T=np.ones(4, np.bool_), threshold=1e-2)
