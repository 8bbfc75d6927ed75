"""Optimizer and gradient-buffer fields by megatron-core's own names, checked before anything is built."""

import math
import types

import pytest
import torch

from megatron_rl.config.settings import ScheduleSettings
from megatron_rl.errors import UserError
from megatron_rl.training.optimizer import build_scheduler, make_configs, validate_ddp_fields, validate_optimizer_fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adam_beta3": 0.9}, r"training\.optimizer\.adam_beta3 .* did you mean training.optimizer.adam_beta[12]"),
        ({"learning_rate": 1.0}, r"did you mean training\.optimizer\.lr\?"),
        ({"overlap_grad_reduce": True}, r"did you mean training\.ddp\.overlap_grad_reduce\?"),
        ({"fp8": "hybrid"}, r"did you mean model\.megatron\.fp8\?"),
        ({"lr": 11}, r"optimizer\.lr is 11\.0, needs a number from 0 to 10"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1, needs"),
        ({"adam_beta1": 1.0}, r"adam_beta1 is 1\.0, needs a number >= 0 and < 1"),
        ({"adam_eps": 0}, r"adam_eps is 0\.0, needs a number > 0"),
        ({"clip_grad": -1}, r"clip_grad is -1\.0, needs a number >= 0"),
        ({"optimizer_cpu_offload": True}, r"stay on the ranks' device"),
        ({"bf16": True}, r"model\.dtype"),
        ({"lr": 1e-6, "min_lr": 1e-5}, "at least min_lr"),
        ({"lr": "fast"}, r"training\.optimizer\.lr is fast: "),
        ({"use_distributed_optimizer": [1]}, r"training\.optimizer\.use_distributed_optimizer is \[1\]"),
        ({"optimizer": "sgd"}, "only 'adam'"),
        ({"loss_scale": 128.0}, "losses of routers would not be scaled"),
        ({"overlap_param_gather_with_optimizer_step": True}, "schedule of its own"),
        ({"sgd_momentum": 0.5}, "sgd_momentum is 0.5, which has no effect, because adam does not read it; remove it"),
        ({"hysteresis": 3}, "hysteresis cannot be set, because there is no float16"),
        ({"pin_cpu_grads": True}, "only optimizer_cpu_offload reads it"),
        ({"log_num_zeros_in_grad": True}, "no metric shows it"),
        ({"overlap_param_gather": True}, "field of training.ddp"),
        ({"decoupled_min_lr": 0.1}, "decoupled_lr is not set"),
    ],
)
def test_optimizer_fields_that_cannot_be_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_optimizer_fields(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlap_grad_reducee": True}, "did you mean training.ddp.overlap_grad_reduce"),
        ({"average_in_collective": True}, "sums over ranks"),
        ({"num_distributed_optimizer_instances": 2}, "only 1 is supported"),
        ({"bucket_size": 0}, r"bucket_size is 0, needs an integer >= 1"),
        ({"nccl_ub": True}, "not part of its releases"),
        ({"bucket_size": "big"}, r"training\.ddp\.bucket_size is big: "),
    ],
)
def test_ddp_fields_that_cannot_be_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_ddp_fields(fields)


def test_fields_reach_both_configurations_with_named_dtypes() -> None:
    optimizer, ddp = make_configs({"use_distributed_optimizer": True, "adam_beta2": 0.95}, {"bucket_size": 1000}, dtype=torch.bfloat16)
    assert optimizer.use_distributed_optimizer and ddp.use_distributed_optimizer
    assert (optimizer.adam_beta2, optimizer.bf16, optimizer.lr, ddp.bucket_size) == (0.95, True, 1e-6, 1000)
    assert make_configs({"exp_avg_dtype": "float32"}, {}, dtype=torch.float32)[0].exp_avg_dtype is torch.float32


def test_fields_that_megatron_leaves_without_a_value_may_be_null() -> None:
    assert validate_optimizer_fields({"weight_decay": None}) == {"weight_decay": None}
    assert validate_ddp_fields({"bucket_size": None}) == {"bucket_size": None}


def test_overlap_without_what_it_overlaps_is_refused() -> None:
    with pytest.raises(UserError, match=r"training\.optimizer\.use_distributed_optimizer"):
        make_configs({}, {"overlap_param_gather": True}, dtype=torch.float32)


def test_what_megatron_cannot_build_here_is_refused() -> None:
    for fields in ({"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}, {"exp_avg_dtype": "bfloat16"}):
        with pytest.raises(UserError, match="megatron-core refuses the combination"):
            make_configs(fields, {}, dtype=torch.float32)


def test_contradicting_sections_are_refused() -> None:
    with pytest.raises(UserError, match="set one of them"):
        make_configs({"use_distributed_optimizer": True}, {"use_distributed_optimizer": False}, dtype=torch.float32)


def rates(schedule: ScheduleSettings, *, steps: int, lr: float = 1.0, min_lr: float = 0.0) -> list[float]:
    """The learning rate of each optimizer step."""
    config = make_configs({"lr": lr, "min_lr": min_lr}, {}, dtype=torch.float32)[0]
    optimizer = types.SimpleNamespace(param_groups=[{"lr": 0.0}])
    scheduler = build_scheduler(optimizer, config, schedule, total_steps=steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return seen


def test_warm_up_wastes_no_step_at_rate_zero() -> None:
    assert rates(ScheduleSettings(warmup_steps=3), steps=6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


PEAK, FLOOR, WARMUP, DECAY, ANNEAL = 2.0, 0.1, 3, 20, 2


def closed_form(style: str, step: int) -> float:
    """The rate of a step counted from 0, as a share of the way from the floor to the peak; the inverse square root as one of the peak."""
    if step <= WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    if style == "inverse_square_root":
        return max(FLOOR, PEAK * math.sqrt(WARMUP / step))
    fallen = min(1.0, (step - WARMUP) / (DECAY - WARMUP))
    annealed = min(1.0, max(0.0, (step - (DECAY - ANNEAL)) / ANNEAL))
    shares = {
        "constant": 1.0,
        "linear": 1 - fallen,
        "cosine": 0.5 * (1 + math.cos(math.pi * fallen)),
        "wsd": 1 - math.sqrt(annealed),
    }
    return FLOOR + shares[style] * (PEAK - FLOOR)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse_square_root", "wsd"])
def test_rates_are_those_of_the_closed_form(style: str) -> None:
    fields = {"decay_steps": DECAY} if style in ("linear", "cosine", "wsd") else {}
    schedule = ScheduleSettings.model_validate({"decay_style": style, "warmup_steps": WARMUP, **fields})
    seen = rates(schedule, steps=DECAY + 4, lr=PEAK, min_lr=FLOOR)
    assert seen == pytest.approx([closed_form(style, step) for step in range(DECAY + 4)], rel=1e-12)


def test_wsd_anneals_the_last_tenth_when_not_told() -> None:
    seen = rates(ScheduleSettings(decay_style="wsd"), steps=41)
    assert seen[37:40] == pytest.approx([1.0, 1 - math.sqrt(1 / 4), 1 - math.sqrt(2 / 4)])


def test_wsd_anneals_one_step_of_a_short_run() -> None:
    assert rates(ScheduleSettings(decay_style="wsd", decay_steps=12), steps=13)[10:] == pytest.approx([1.0, 1.0, 0.0])


def test_a_constant_rate_may_warm_up_for_longer_than_the_run() -> None:
    assert rates(ScheduleSettings(warmup_steps=9), steps=3) == pytest.approx([0.1, 0.2, 0.3])


def test_warm_up_without_a_fall_is_refused() -> None:
    with pytest.raises(UserError, match="warmup_steps 8 of 5 decay steps"):
        rates(ScheduleSettings(warmup_steps=8, decay_style="linear"), steps=5)
