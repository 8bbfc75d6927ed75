from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.derived import derive, dtype_name, request_deadline_s, start_deadline_s, step_deadline_s, sync_deadline_s
from megatron_rl.config.settings import Settings


def all_deadlines(settings: Settings) -> tuple[float, ...]:
    """Of a start, a sync, a step and a request."""
    model = settings.model
    of_bytes = start_deadline_s(model), sync_deadline_s(model), step_deadline_s(model)
    return *of_bytes, request_deadline_s(model, settings.rollout.sampling)


def test_deadlines_follow_from_bytes_and_tokens(settings_with: Callable[..., Settings], tmp_path: Path) -> None:
    """A model of 470 GB takes 1880 s more at 0.25 GB/s; a response of 12,000 tokens 3000 s at 4 a second."""
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(235 * 10**9)
    sized = (f"model.path={tmp_path}", "rollout.sampling.max_response_tokens=12000")
    assert all_deadlines(settings_with(*sized)) == pytest.approx((900 + 1880, 600 + 1880, 3600 + 1880, 600 + 3000))
    assert all_deadlines(settings_with(*sized, "model.deadline_s=50")) == (50, 50, 50, 50)


def test_a_model_that_is_not_at_hand_adds_no_seconds(settings_with: Callable[..., Settings]) -> None:
    assert all_deadlines(settings_with("model.path=/nowhere", "rollout.sampling.max_response_tokens=4")) == (900, 600, 3600, 601)


def test_sizes_add_up(settings_with: Callable[..., Settings]) -> None:
    derived = derive(
        settings_with(
            "training.topology={num_ranks: 16, tp: 2, pp: 2, cp: 2, sequence_parallel: true, ep: 4, etp: 1}",
            "training.optimizer_steps_per_batch=4",
            "run={directory: x, num_steps: 25, save_interval: 10}",
            "data={train: t, eval: e, prompts_per_step: 6, samples_per_prompt: 2, max_prompt_tokens: 10}",
            "rollout.sampling.max_response_tokens=30",
            "training.max_tokens_per_micro_batch=100",
        )
    )
    assert (derived.dp, derived.expert_dp) == (2, 2)
    assert (derived.sequences_per_step, derived.sequences_per_optimizer_step, derived.total_sequences) == (12, 3, 300)
    assert derived.optimizer_steps == 100
    assert (derived.max_sequence_tokens, derived.max_step_tokens, derived.micro_batch_tokens) == (40, 480, 200)
    assert (derived.evaluations, derived.checkpoints) == (4, 3)
    assert derived.groups_ahead == 0


def test_a_staleness_of_two_makes_two_steps_ahead(settings_with: Callable[..., Settings]) -> None:
    assert derive(settings_with("rollout.max_staleness=2", "data.prompts_per_step=6")).groups_ahead == 12


def test_supervised_rows_are_single_sequences(settings_with: Callable[..., Settings]) -> None:
    derived = derive(settings_with("objective.policy_loss=sft", "run.save_interval=0"))
    assert derived.sequences_per_step == 64
    assert derived.max_sequence_tokens is None
    assert (derived.evaluations, derived.checkpoints) == (0, 1)


def test_the_dtype_is_the_devices_where_none_is_set(settings_with: Callable[..., Settings]) -> None:
    auto, chosen = settings_with().model, settings_with("model.dtype=float32").model
    assert [dtype_name(model, device_kind="cpu") for model in (auto, chosen)] == ["float32", "float32"]
    assert [dtype_name(model, device_kind="cuda") for model in (auto, chosen)] == ["bfloat16", "float32"]
