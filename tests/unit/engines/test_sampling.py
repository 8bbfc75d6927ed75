from dataclasses import replace

import pytest
from pydantic import ValidationError

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.config.eval_sets import EvalSampling
from megatron_rl.config.settings import SamplingSettings
from megatron_rl.engines.entropy_processor import PARAMETER
from megatron_rl.engines.sampling import LOWEST_TEMPERATURE, Sampling, eval_sampling, make_sampling
from megatron_rl.errors import UserError

OTHERS = ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})
SETTINGS = SamplingSettings(temperature=0.8, max_response_tokens=5, stop=("x",), stop_token_ids=(4, 2))


def test_the_end_of_sequence_token_always_stops() -> None:
    assert make_sampling(SETTINGS, eos_token_ids=(2, 9)) == Sampling(temperature=0.8, max_tokens=5, stop=("x",), stop_token_ids=(4, 2, 9))


def test_greedy_is_temperature_zero() -> None:
    assert make_sampling(SETTINGS, eos_token_ids=(), greedy=True).temperature == 0.0


def test_a_request_leaves_nothing_to_generation_config() -> None:
    request = make_sampling(SETTINGS, eos_token_ids=(9,)).request()
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert request.items() >= neutral.items()
    assert request["temperature"] == 0.8
    assert request["max_new_tokens"] == 5
    assert request["stop"] == ["x"]
    assert request["stop_token_ids"] == [4, 2, 9]


@pytest.mark.parametrize(
    ("chosen", "recorded"), [({"top_p": 0.9, "top_k": 64}, True), ({"min_p": 0.1, "top_k": 4096}, True), ({"top_k": 5}, True), ({}, False)]
)
def test_candidates_are_recorded_where_tokens_are_left_out(chosen: dict[str, float], recorded: bool) -> None:
    settings = SETTINGS.model_copy(update=chosen)
    sampling, greedy = (make_sampling(settings, eos_token_ids=(9,), greedy=greedy) for greedy in (False, True))
    assert sampling.request().items() >= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, **chosen}.items()
    assert sampling.records_candidates is recorded
    # A greedy response is compared with, not trained on.
    assert greedy.request()["top_k"] == -1 and not greedy.records_candidates


def test_entropy_aware_sampling_is_in_requests_of_training_alone() -> None:
    entropy = EntropyAware(thresholds=(0.5, 0.25))
    settings = SETTINGS.model_copy(update={"entropy": entropy})
    sampling, greedy = (make_sampling(settings, eos_token_ids=(9,), greedy=greedy) for greedy in (False, True))
    numbers = {PARAMETER: [0.8, 0.5, 0.25, 1.0, 1, 1.0, 1.2, 40, 1.0, 1.3, 0, 1.0, 2.0, 0, 0.9]}
    assert sampling.request()["custom_params"] == replace(sampling, seed=3).request(2)["custom_params"] == numbers
    assert sampling.request().items() >= {"temperature": 0.8, "top_p": 1.0, "top_k": -1}.items() and not sampling.records_candidates
    plain = make_sampling(SETTINGS, eos_token_ids=(9,))
    others = (greedy, plain, eval_sampling(settings, EvalSampling(temperature=0.5), eos_token_ids=(9,)))
    assert all("custom_params" not in each.request() and each.entropy is None for each in others)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 9e-7}, {"max_tokens": 0},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}, {"min_p": 1.0}, {"min_p": -0.1}, {"top_p": 0.9, "records_candidates": True},
        *({"entropy": EntropyAware(thresholds=(1.0, 1.0)), **other} for other in OTHERS),
    ],
)  # fmt: skip
def test_impossible_sampling_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="needs"):
        Sampling(**{"max_tokens": 1, **options})


def test_the_settings_begin_where_the_engine_samples() -> None:
    assert SamplingSettings(temperature=0.01).temperature > LOWEST_TEMPERATURE
    with pytest.raises(ValidationError, match="temperature"):
        SamplingSettings(temperature=1e-7)
