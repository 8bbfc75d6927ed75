from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.derived import dtype_name, request_deadline_s, reward_workers, start_deadline_s, step_deadline_s, sync_deadline_s
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


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (7, 1), (8, 2), (255, 63), (256, 64), (1024, 64)])
def test_reward_workers_take_a_quarter_of_the_cores(cores: int, workers: int) -> None:
    assert reward_workers(cores) == workers


def test_the_dtype_is_the_devices_where_none_is_set(settings_with: Callable[..., Settings]) -> None:
    auto, chosen = settings_with().model, settings_with("model.dtype=float32").model
    assert [dtype_name(model, device_kind="cpu") for model in (auto, chosen)] == ["float32", "float32"]
    assert [dtype_name(model, device_kind="cuda") for model in (auto, chosen)] == ["bfloat16", "float32"]
