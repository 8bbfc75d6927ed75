"""The same optimizer step gives the same loss, gradients and metrics however it is split."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_emulation import Layout, Step, StepResult, random_layouts, run_step, trivial_layout
from vector_format import neutral_objective

from megatron_rl.algorithms.aggregation import Aggregation
from megatron_rl.algorithms.objective import PRESETS, Objective
from megatron_rl.algorithms.off_policy import OffPolicy
from megatron_rl.algorithms.return_advantage import ValueLoss

AGGREGATIONS = Aggregation.__args__
CORRECTIONS = (
    None,
    OffPolicy(mode="truncate", high=1.1),
    OffPolicy(mode="mask", low=0.7, high=1.3, keep_rejected_in_denominator=False),
    OffPolicy(mode="truncate", level="sequence", high=1.5, veto=0.4, opsm=0.05),
    OffPolicy(mode="mask", level="geometric", low=0.9, high=1.1, opsm=0.0, keep_rejected_in_denominator=False),
)
ENTROPIES = (
    {},
    {"entropy_coef": 0.02},
    {"entropy_coef": 0.02, "entropy_mode": "matched"},
    {"entropy_coef": 0.02, "top_entropy_fraction": 0.4},
)
LOSSES = ("gpg", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "distillation", "sft", "value")


def assert_same(got: StepResult, expected: StepResult, tolerance: float) -> None:
    assert math.isfinite(expected.loss)
    assert got.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    for name, gradient in expected.gradients.items():
        assert bool(gradient.isfinite().all())
        torch.testing.assert_close(got.gradients[name], gradient, rtol=tolerance, atol=tolerance)
    assert got.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert got.metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def variants() -> list[Objective | ValueLoss]:
    """Every preset x aggregation, every two of preset, correction and entropy mode, and the losses without a preset."""
    made = []
    for preset, aggregation in itertools.product(PRESETS, AGGREGATIONS):
        made.append({"preset": preset, "aggregation": aggregation, "max_response_length": 9, "kl_loss_coef": 0.1})
    for (number, preset), (place, correction) in itertools.product(enumerate(PRESETS), enumerate(CORRECTIONS)):
        entropy = ENTROPIES[(number + place) % len(ENTROPIES)]
        made.append({"preset": preset, "max_response_length": 9, "off_policy_correction": correction, **entropy})
    for loss, level in itertools.product(LOSSES, ("token", "sequence")):
        args = {"clip_cov": {"low": -1.0, "fraction": 0.3}, "kl_cov": {"fraction": 0.3}}.get(loss, {})
        if level == "token" or loss in ("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "distillation"):
            made.append({"policy_loss": loss, **({"ratio_level": level} if level == "sequence" else {}), **args})
    made.append(
        {
            "dual_clip": 1.5,
            "ratio_cap": 1.1,
            "kl_loss_coef": 0.2,
            "kl_unbiased": True,
            "kl_estimator": "k2",
            "kl_control": {},
        }
    )
    return [neutral_objective(**config) for config in made]


VARIANTS = variants()


@pytest.mark.parametrize("part", range(4))
def test_every_variant_under_fixed_layouts(part: int, make_step) -> None:
    step = make_step([5, 1, 8, 3, 1, 6], seed=part, masked_rows=(3,))
    layouts = [
        Layout(ranks=(((4, 0), (5,)), ((2,), (3, 1))), cp=2, pad=2, padding=math.nan),
        Layout(ranks=(((0, 1, 2, 3, 4, 5), ()),), cp=3, padding=math.inf),
        Layout(ranks=(((5, 4, 3),), ((),), ((2, 1, 0),)), pad=1, padding=7.77),
    ]
    for number, objective in enumerate(VARIANTS[part::4]):
        base = run_step(objective, step, trivial_layout(6))
        assert_same(run_step(objective, step, layouts[number % 3]), base, 1e-12)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_under_any_layout(data, make_step) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), label="lengths")
    masked = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=3), label="fully masked")
    step = make_step(
        lengths, seed=data.draw(st.integers(0, 10**6), label="seed"), masked_rows=masked, spread=data.draw(st.sampled_from([0.0, 0.4, 3.0]))
    )
    objective = data.draw(st.sampled_from(VARIANTS), label="objective")
    layout = data.draw(st.sampled_from(random_layouts(len(lengths), count=8, seed=len(lengths))), label="layout")
    base = run_step(objective, step, trivial_layout(len(lengths)))
    # Huge ratios sum to huge losses, of which 1e-12 is a share.
    assert_same(run_step(objective, step, layout), base, 1e-12)


def test_float32_agrees_to_1e_6(make_step) -> None:
    step = make_step([7, 2, 9, 4], seed=3)
    single = Step(step.lengths, step.loss_mask, {k: v.float() if v.is_floating_point() else v for k, v in step.tokens.items()})
    for preset in PRESETS:
        objective = neutral_objective(preset=preset, max_response_length=9)
        base = run_step(objective, single, trivial_layout(4))
        got = run_step(objective, single, Layout(ranks=(((3, 0),), ((1,),), ((2,),)), cp=2, padding=math.nan))
        assert got.loss == pytest.approx(base.loss, rel=1e-6, abs=1e-6)
        torch.testing.assert_close(got.gradients["log_probs"], base.gradients["log_probs"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 7.77])
def test_masked_positions_may_hold_anything(value: float, make_step) -> None:
    step = make_step([5, 3, 4], seed=1, masked_rows=(1,))
    spoiled = {
        name: torch.where(step.loss_mask, tensor, torch.tensor(value, dtype=tensor.dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in step.tokens.items()
    }
    for objective in VARIANTS[::11]:
        base = run_step(objective, step, trivial_layout(3))
        assert_same(run_step(objective, Step(step.lengths, step.loss_mask, spoiled), trivial_layout(3)), base, 0.0)


def test_a_step_without_trainable_tokens_says_so(make_step) -> None:
    step = make_step([4, 2], seed=0, masked_rows=(0, 1))
    for objective in VARIANTS[::11]:  # a stride that meets every aggregation and correction
        result = run_step(objective, step, Layout(ranks=(((0,), ()), ((), (1,))), cp=2))
        assert result.loss == 0.0
        assert all(bool((gradient == 0).all()) for gradient in result.gradients.values())
        assert result.metrics["empty_step"] == 1.0


def test_clip_cov_choice_depends_on_the_seed_and_on_nothing_else(make_step) -> None:
    step = make_step([9, 9, 9], seed=5)
    objective = neutral_objective(policy_loss="clip_cov", low=-5.0, fraction=0.3)
    losses = {run_step(objective, step, trivial_layout(3), seed=seed).loss for seed in range(6)}
    assert len(losses) > 3
