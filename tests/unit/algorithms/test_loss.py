"""The loss against a loop over tokens in Python, published values, and the traps that other trainers fell into."""

import math
from types import SimpleNamespace

import pytest
import torch
from step_emulation import Step, random_layouts, run_step, trivial_layout
from vector_format import neutral_objective

from megatron_rl.algorithms.aggregation import Aggregation, LossInputs
from megatron_rl.algorithms.coefficients import Coefficients
from megatron_rl.algorithms.loss import compute_loss
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import OffPolicy, current_share
from megatron_rl.errors import UserError
from megatron_rl.plugins.loader import load

# The shared vector V1 of the peer survey.
V1 = {
    "log_probs": [-.35, -1.2, -.05, -2.1, -.7, -3, -.9, -.15, -1.75, -2.4, -.6, -.25, -1.1, -.45, -1.6],
    "old_log_probs": [-.5, -1, -.06, -1.7, -.95, -2.6, -.7, -.4, -1.7, -2.1, -.85, -.2, -1.5, -.4, -1.25],
    "rollout_log_probs": [-.45, -1.1, -.05, -1.95, -.9, -2.2, -.75, -.35, -1.45, -2.3, -.8, -.22, -1.3, -.5, -1.3],
    "ref_log_probs": [-.6, -.8, -.1, -2.4, -.75, -2, -1.1, -.3, -1.2, -1.9, -.7, -.3, -1.4, -.55, -1],
    "entropy": [.8, 1.5, .2, 2.2, 1, 2.6, 1.1, .4, 1.9, 2.5, .9, .6, 1.3, .7, 1.7],
    "advantages": [1.2] * 6 + [-.7] * 3 + [.4] * 5 + [-.9],
}  # fmt: skip


def v1() -> Step:
    tokens = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in V1.items()}
    return Step(lengths=(6, 3, 5, 1), loss_mask=torch.ones(15, dtype=torch.bool), tokens=tokens)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (neutral_objective(policy_loss="gmpo"), -0.010433150),
        (neutral_objective(policy_loss="gpg", aggregation="token_mean"), 0.493333333),
        (neutral_objective(policy_loss="kl_cov", fraction=0.2, aggregation="token_mean"), -0.381598566),
        (neutral_objective(aggregation="token_mean", top_entropy_fraction=0.2), -0.127006360),
        (neutral_objective(aggregation="token_mean", off_policy_correction=OffPolicy(opsm=0.1)), -0.434468481),
        (neutral_objective(aggregation="token_mean", dual_clip=1.1), None),
    ],
)
def test_published_values(objective: Objective, expected: float | None) -> None:
    loss = run_step(objective, v1(), trivial_layout(4)).loss
    if expected is None:  # for negative advantages the ratios here stay below 1.1 times, except one of 1.284
        plain = run_step(neutral_objective(aggregation="token_mean"), v1(), trivial_layout(4)).loss
        assert loss == pytest.approx(plain - 0.7 * (math.exp(0.25) - 1.1) / 15)
    else:
        assert loss == pytest.approx(expected, abs=5e-9)


def loop_loss(objective, step: Step, token_loss) -> torch.Tensor:
    """The definition: per sequence, then the aggregation, with Python loops."""
    rows, start = [], 0
    for length in step.lengths:
        keep = [t for t in range(start, start + length) if step.loss_mask[t]]
        start += length
        if keep:
            rows.append(torch.stack([token_loss(t, keep) for t in keep]))
    count, size = sum(len(row) for row in rows), len(rows)
    return {
        "token_mean": lambda: sum(row.sum() for row in rows) / count,
        "sequence_mean_token_mean": lambda: sum(row.mean() for row in rows) / size,
        "sequence_mean_token_sum": lambda: sum(row.sum() for row in rows) / size,
        "sequence_mean_token_sum_norm": lambda: sum(row.sum() for row in rows) / size / objective.max_response_length,
        "token_sum": lambda: sum(row.sum() for row in rows),
    }[objective.aggregation]()


def ratio(x, level: str, t: int, keep: list[int]):
    if level == "sequence":
        return torch.stack([x["log_probs"][k] - x["old_log_probs"][k] for k in keep]).mean().exp()
    return (x["log_probs"][t] - x["old_log_probs"][t]).exp()


def clipped(x, o: SimpleNamespace, t: int, keep: list[int]):
    r, a = ratio(x, o.ratio_level, t, keep), x["advantages"][t]
    return -torch.minimum(r * a, r.clamp(1 - o.clip_low, 1 + o.clip_high) * a)


def sapo(x, o: SimpleNamespace, t: int, keep: list[int]):
    a = x["advantages"][t]
    tau = ARGS["sapo"]["tau_positive" if a > 0 else "tau_negative"]
    return -4 / tau * torch.sigmoid(tau * (ratio(x, o.ratio_level, t, keep) - 1)) * a


def cispo(x, o: SimpleNamespace, t: int, keep: list[int]):
    r = ratio(x, o.ratio_level, t, keep).detach().clamp(1 - o.clip_low, 1 + o.clip_high)
    return -r * x["advantages"][t] * x["log_probs"][t]


def vespo(x, o: SimpleNamespace, t: int, keep: list[int]):
    w = sum(x["log_probs"][k] - x["old_log_probs"][k] for k in keep).detach().exp()
    sign = "positive" if x["advantages"][t] >= 0 else "negative"
    k, lam = ARGS["vespo"][f"k_{sign}"], ARGS["vespo"][f"lambda_{sign}"]
    return -(w**k * torch.exp(lam - lam * w)) * x["advantages"][t] * x["log_probs"][t]


def dppo_tv(x, o: SimpleNamespace, t: int, keep: list[int]):
    move = (x["log_probs"][t].exp() - x["old_log_probs"][t].exp()).detach()
    allowed = move <= o.clip_high if x["advantages"][t] > 0 else move >= -o.clip_low
    weight = ratio(x, o.ratio_level, t, keep).detach().clamp(max=ARGS["dppo_tv"]["ratio_cap"]) if allowed else 0.0
    return -x["advantages"][t] * weight * x["log_probs"][t]


def dppo_kl(x, o: SimpleNamespace, t: int, keep: list[int]):
    p, q = x["old_log_probs"][t].exp(), x["log_probs"][t].exp().detach()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    blocked = q > p and kl > o.clip_high if x["advantages"][t] > 0 else q < p and kl > o.clip_low
    weight = 0.0 if blocked else ratio(x, o.ratio_level, t, keep).detach().clamp(max=ARGS["dppo_tv"]["ratio_cap"])
    return -x["advantages"][t] * weight * x["log_probs"][t]


def value(x, o: SimpleNamespace, t: int, keep: list[int]):
    v, old, target = x["values"][t], x["old_values"][t], x["returns"][t]
    near = old + (v - old).clamp(-ARGS["value"]["value_clip"], ARGS["value"]["value_clip"])
    return 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2)


def gmpo(x, o: SimpleNamespace, t: int, keep: list[int]):
    a = x["advantages"][t]
    logs = torch.stack([x["log_probs"][k] - x["old_log_probs"][k] for k in keep])
    near = logs.clamp(-o.clip_low, o.clip_high)
    return -a * (torch.minimum(logs, near) if a > 0 else torch.maximum(logs, near)).mean().exp()


# Arguments of losses that differ from their defaults, and from each other.
ARGS = {
    "sapo": {"tau_positive": 1.7, "tau_negative": 0.6},
    "value": {"value_clip": 0.15},
    "vespo": {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 0.5, "lambda_negative": 1.25},
    **{key: {"ratio_cap": 1.04} for key in ("dppo_tv", "dppo_kl")},
}

CLIPPED = ("clip", "cispo", "gmpo", "dppo_tv", "dppo_kl")
WITH_LEVEL = ("clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "distillation")

REFERENCES = {
    "gmpo": gmpo,
    "clip": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "value": value,
    "gpg": lambda x, o, t, keep: -x["advantages"][t] * x["log_probs"][t],
    "sft": lambda x, o, t, keep: -x["log_probs"][t],
    "distillation": lambda x, o, t, keep: -ratio(x, o.ratio_level, t, keep) * (x["ref_log_probs"][t] - x["old_log_probs"][t]),
}


@pytest.mark.parametrize("aggregation", Aggregation.__args__)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_against_a_loop_over_tokens(name: str, level: str, aggregation: str, make_step) -> None:
    # Chosen so that tokens of both signs lie beyond each bound and between the two distances.
    step = make_step([9, 1, 14, 2, 6], seed=9, masked_rows=(3,))
    low, high = (0.006, 0.02) if name == "dppo_kl" else (0.05, 0.16)
    chosen = {"ratio_level": level if name in WITH_LEVEL else None, "clip_low": low, "clip_high": high}
    settings = {key: value for key, value in chosen.items() if value is not None and (key == "ratio_level" or name in CLIPPED)}
    objective = neutral_objective(policy_loss=name, aggregation=aggregation, max_response_length=6, **settings, **ARGS.get(name, {}))
    plain = SimpleNamespace(ratio_level=level, clip_low=low, clip_high=high)
    leaves = {k: v.clone().requires_grad_() if k in ("log_probs", "values") else v for k, v in step.tokens.items()}
    expected = loop_loss(objective, step, lambda t, keep: REFERENCES[name](leaves, plain, t, keep))
    expected.backward()
    result = run_step(objective, step, trivial_layout(5))
    assert result.loss == pytest.approx(float(expected.detach()), abs=1e-12)
    moved = "values" if name == "value" else "log_probs"
    torch.testing.assert_close(result.gradients[moved], leaves[moved].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("coefficient", [0.3, 2.0])
def test_kl_cov_penalises_the_tokens_of_largest_covariance(coefficient: float, make_step) -> None:
    step = make_step([5, 1, 4, 7], seed=11)
    x, keep = step.tokens, step.loss_mask
    a, p = x["advantages"], x["log_probs"]
    covariance = torch.where(keep, (a - a[keep].mean()) * (p - p[keep].mean()), -torch.inf)
    chosen = covariance >= covariance.sort(descending=True).values[int(0.3 * int(keep.sum())) - 1]
    log_ratio = p - x["old_log_probs"]
    losses = -log_ratio.exp() * a + torch.where(chosen, coefficient * log_ratio.abs(), 0.0)
    objective = neutral_objective(policy_loss="kl_cov", fraction=0.3, coef=coefficient, aggregation="token_mean")
    assert run_step(objective, step, trivial_layout(4)).loss == pytest.approx(float(losses[keep].mean()), abs=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_the_correction_at_each_level_against_a_loop(level: str, mode: str, make_step) -> None:
    step = make_step([5, 1, 4, 7], seed=13, spread=0.3)
    low, high, expected, start, bounded = 0.8, 1.15, 0.0, 0, 0
    for length in step.lengths:
        keep = [t for t in range(start, start + length) if step.loss_mask[t]]
        start += length
        logs = [float(step.tokens["old_log_probs"][t] - step.tokens["rollout_log_probs"][t]) for t in keep]
        for t, log in zip(keep, logs, strict=True):
            w = math.exp({"token": log, "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[level])
            inside = low <= w <= high
            bounded += not inside
            weight = min(max(w, low), high) if mode == "truncate" else w * inside
            expected -= weight * float(step.tokens["advantages"][t] * step.tokens["log_probs"][t])
    correction = OffPolicy(mode=mode, level=level, low=low, high=high)
    objective = neutral_objective(policy_loss="gpg", aggregation="token_sum", off_policy_correction=correction)
    assert 0 < bounded < int(step.loss_mask.sum()) or level != "token"
    assert run_step(objective, step, trivial_layout(4)).loss == pytest.approx(expected, abs=1e-12)


def test_a_veto_drops_a_sequence_with_one_token_far_below(make_step) -> None:
    step = make_step([5, 1, 4, 7], seed=18, spread=0.3)
    ratio = (step.tokens["old_log_probs"] - step.tokens["rollout_log_probs"]).exp()
    veto, expected, start, dropped = 0.6, 0.0, 0, 0
    for length in step.lengths:
        keep = [t for t in range(start, start + length) if step.loss_mask[t]]
        start += length
        if any(ratio[t] < veto for t in keep):
            dropped += 1
            assert any(ratio[t] >= veto for t in keep)
            continue
        expected -= sum(float(step.tokens["advantages"][t] * step.tokens["log_probs"][t]) for t in keep)
    assert 0 < dropped < 4
    objective = neutral_objective(policy_loss="gpg", aggregation="token_sum", off_policy_correction=OffPolicy(veto=veto))
    assert run_step(objective, step, trivial_layout(4)).loss == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("in_rewards", [False, True])
def test_the_kl_for_control_is_the_mean_of_sequence_means(in_rewards: bool, make_step) -> None:
    step = make_step([9, 1, 4, 2], seed=19, masked_rows=(3,))
    means, start = [], 0
    for length in step.lengths:
        d = [
            float(step.tokens["ref_log_probs"][t] - step.tokens["log_probs"][t]) for t in range(start, start + length) if step.loss_mask[t]
        ]
        start += length
        if d:
            means.append(sum(x * x / 2 if in_rewards else math.exp(x) - 1 - x for x in d) / len(d))
    term = {"kl_reward": {"coef": 0.1, "estimator": "k2", "control": {}}} if in_rewards else {"kl": {"coef": 0.1, "control": {}}}
    objective = Objective.of(advantage="gae", **term)
    metrics = run_step(objective, step, trivial_layout(4)).metrics
    assert metrics["kl_per_sequence"] == pytest.approx(sum(means) / len(means), abs=1e-12)


@pytest.mark.parametrize("keep_rejected", [True, False])
def test_rejected_tokens_leave_the_denominator_only_when_asked(keep_rejected: bool) -> None:
    """Masks of one sequence [w = 1, w = e^1] with bound 2: token 2 is rejected."""
    step = Step(
        lengths=(2,),
        loss_mask=torch.ones(2, dtype=torch.bool),
        tokens={
            "log_probs": torch.tensor([-1.0, -1.0], dtype=torch.float64),
            "old_log_probs": torch.tensor([-1.0, -1.0], dtype=torch.float64),
            "rollout_log_probs": torch.tensor([-1.0, -2.0], dtype=torch.float64),
            "advantages": torch.tensor([1.0, 1.0], dtype=torch.float64),
        },
    )
    correction = OffPolicy(mode="mask", high=2.0, keep_rejected_in_denominator=keep_rejected)
    for aggregation in ("token_mean", "sequence_mean_token_mean"):
        loss = run_step(neutral_objective(aggregation=aggregation, off_policy_correction=correction), step, trivial_layout(1)).loss
        assert loss == pytest.approx(-0.5 if keep_rejected else -1.0)


def decoupled_loss(step: Step, versions: list[int], *, version: int, interpolates: bool) -> tuple[float, list[float], int]:
    """Decoupled PPO by a loop in Python: the token mean, its derivatives by the log-probs [T], and the clipped tokens."""
    total, slopes, clipped, tokens = 0.0, [0.0] * len(versions), 0, {name: each.tolist() for name, each in step.tokens.items()}
    count = int(step.loss_mask.sum())
    for t, keep in enumerate(step.loss_mask.tolist()):
        if not keep:
            continue
        age, now, behaviour, a = version - versions[t], tokens["log_probs"][t], tokens["rollout_log_probs"][t], tokens["advantages"][t]
        share = 1.0 if versions[t] < 0 else (version - 1 - versions[t]) / age if interpolates and age else 0.0
        proximal = (1 - share) * behaviour + share * now
        weight, r = min(math.exp(proximal - behaviour), 1.3) if interpolates else 1.0, math.exp(now - proximal)
        near = min(max(r, 0.95), 1.1)
        total -= weight * min(r * a, near * a) / count
        slopes[t] = -weight * r * a / count if r * a <= near * a else 0.0
        clipped += r * a > near * a
    return total, slopes, clipped


@pytest.mark.parametrize("proximal", ["interpolated", "rollout"])
def test_a_proximal_policy_without_a_pass_against_a_loop(proximal: str, make_step) -> None:
    """Sequences of 9, 1, 14 and 6 tokens of ages 0 to 4, some made by nobody; `old_log_probs` must not be read."""
    step, interpolates = make_step([9, 1, 14, 6], seed=21), proximal == "interpolated"
    versions = [(-1, 7, 6, 5, 4, 3, 7, 5)[t % 8] for t in range(30)]
    share = current_share(torch.tensor(versions), version=7, interpolates=interpolates)
    tokens = {**step.tokens, "current_share": torch.where(step.loss_mask, share, torch.nan)}
    tokens["old_log_probs"] = torch.full((30,), torch.nan, dtype=torch.float64)
    weights = {"off_policy": {"mode": "truncate", "high": 1.3}} if interpolates else {}
    loss = {"kind": "clip", "low": 0.05, "high": 0.1}
    objective = Objective.of(proximal=proximal, policy_loss=loss, aggregation="token_mean", **weights)
    expected, slopes, clipped = decoupled_loss(step, versions, version=7, interpolates=interpolates)
    assert 3 < clipped < 20
    for layout in (trivial_layout(4), *random_layouts(4, count=4, seed=3)):
        result = run_step(objective, Step(step.lengths, step.loss_mask, tokens), layout)
        assert result.loss == pytest.approx(expected, abs=1e-12)
        torch.testing.assert_close(result.gradients["log_probs"], torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_share_of_the_current_policy_is_the_published_one() -> None:
    """A-3PO: 1 - 1 / d at an age of d versions, and the rollout's own log-probs at ages 0 and 1."""
    versions = torch.tensor([-1, 0, 3, 4, 6, 7, 8])
    found = current_share(versions, version=8, interpolates=True)
    torch.testing.assert_close(found, torch.tensor([1, 7 / 8, 4 / 5, 3 / 4, 1 / 2, 0, 0], dtype=torch.float64))
    assert current_share(versions, version=8, interpolates=False).tolist() == [1, 0, 0, 0, 0, 0, 0]


def test_rejected_tokens_have_no_gradient_with_inner_weights() -> None:
    correction = OffPolicy(mode="mask", low=0.9, high=1.1)
    ratios = (v1().tokens["old_log_probs"] - v1().tokens["rollout_log_probs"]).exp()
    rejected = (ratios < 0.9) | (ratios > 1.1)
    assert 0 < int(rejected.sum()) < 15
    for name in ("clip", "vespo", "gpg"):
        gradient = run_step(neutral_objective(policy_loss=name, off_policy_correction=correction), v1(), trivial_layout(4)).gradients[
            "log_probs"
        ]
        assert bool((gradient[rejected] == 0).all())


def test_vespo_takes_the_off_policy_weight_of_the_sequence() -> None:
    """One sequence of one token: W = (pi / pi_old) x min(pi_old / pi_rollout, high)."""
    numbers = {"log_probs": -1.0, "old_log_probs": -1.2, "rollout_log_probs": -1.5, "advantages": 1.0}
    tokens = {name: torch.tensor([number], dtype=torch.float64) for name, number in numbers.items()}
    step = Step(lengths=(1,), loss_mask=torch.ones(1, dtype=torch.bool), tokens=tokens)
    for high, weight in ((10.0, math.exp(0.5)), (1.1, 1.1 * math.exp(0.2))):
        for level in ("token", "sequence", "geometric"):
            correction = OffPolicy(mode="truncate", level=level, high=high)
            loss = run_step(neutral_objective(policy_loss="vespo", off_policy_correction=correction), step, trivial_layout(1)).loss
            assert loss == pytest.approx(weight**2 * math.exp(3 - 3 * weight))


@pytest.mark.parametrize("aggregation", Aggregation.__args__)
def test_the_entropy_bonus_means_the_same_for_every_aggregation(aggregation: str) -> None:
    plain = neutral_objective(aggregation=aggregation, max_response_length=6)
    bonus = neutral_objective(aggregation=aggregation, max_response_length=6, entropy_coef=0.01)
    difference = run_step(plain, v1(), trivial_layout(4)).loss - run_step(bonus, v1(), trivial_layout(4)).loss
    assert difference == pytest.approx(0.01 * sum(V1["entropy"]) / 15, abs=1e-12)


def test_matched_entropy_goes_through_the_aggregation() -> None:
    bonus = neutral_objective(aggregation="sequence_mean_token_sum", entropy_coef=0.01, entropy_mode="matched")
    plain = neutral_objective(aggregation="sequence_mean_token_sum")
    difference = run_step(plain, v1(), trivial_layout(4)).loss - run_step(bonus, v1(), trivial_layout(4)).loss
    assert difference == pytest.approx(0.01 * sum(V1["entropy"]) / 4, abs=1e-12)


def test_top_entropy_bonus_counts_the_tokens_that_are_trained() -> None:
    plain = neutral_objective(aggregation="token_mean", top_entropy_fraction=0.2)
    bonus = neutral_objective(aggregation="token_mean", top_entropy_fraction=0.2, entropy_coef=0.1)
    difference = run_step(plain, v1(), trivial_layout(4)).loss - run_step(bonus, v1(), trivial_layout(4)).loss
    assert difference == pytest.approx(0.1 * (2.6 + 2.5 + 2.2) / 3)


def test_an_adaptive_coefficient_at_zero_still_measures() -> None:
    objective = neutral_objective(aggregation="token_mean", entropy_control={})
    still = run_step(objective, v1(), trivial_layout(4), coefficients=Coefficients(0.0, 0.0))
    acting = run_step(objective, v1(), trivial_layout(4), coefficients=Coefficients(0.1, 0.0))
    assert "policy_loss" in still.metrics and float(still.gradients["entropy"].abs().sum()) == 0.0
    assert still.loss - acting.loss == pytest.approx(0.1 * sum(V1["entropy"]) / 15)
    assert acting.metrics["policy_loss"] == pytest.approx(still.loss)


def test_the_policy_loss_is_logged_where_it_differs() -> None:
    assert "policy_loss" not in run_step(neutral_objective(), v1(), trivial_layout(4)).metrics


def test_logged_entropy_is_never_negative_and_ignores_padding() -> None:
    step = v1()
    mask = step.loss_mask.clone()
    mask[[2, 7]] = False
    spoiled = dict(step.tokens) | {"entropy": torch.where(mask, step.tokens["entropy"], -1.0)}
    kept = [number for number, keep in zip(V1["entropy"], mask.tolist(), strict=True) if keep]
    metrics = run_step(neutral_objective(), Step(step.lengths, mask, spoiled), trivial_layout(4)).metrics
    assert metrics["entropy"] == pytest.approx(sum(kept) / 13)


def test_masked_kl_keeps_metric_and_denominator() -> None:
    """Zero-variance groups under mask_kl: no KL gradient there, unchanged weight elsewhere, raw KL logged."""
    step = v1()
    kl_mask = torch.ones(15, dtype=torch.bool)
    kl_mask[:6] = False
    masked = Step(step.lengths, step.loss_mask, {**step.tokens, "advantages": torch.zeros(15, dtype=torch.float64), "kl_mask": kl_mask})
    full = Step(step.lengths, step.loss_mask, {**step.tokens, "advantages": torch.zeros(15, dtype=torch.float64)})
    objective = neutral_objective(aggregation="token_mean", kl_loss_coef=0.1)
    some, every = (run_step(objective, s, trivial_layout(4)) for s in (masked, full))
    assert bool((some.gradients["log_probs"][:6] == 0).all())
    torch.testing.assert_close(some.gradients["log_probs"][6:], every.gradients["log_probs"][6:])
    assert bool((every.gradients["log_probs"][:6] != 0).all())
    assert some.metrics["kl_k3"] == every.metrics["kl_k3"]


def test_the_unbiased_kl_has_the_gradient_of_the_score_function() -> None:
    step = v1()
    on_policy = Step(step.lengths, step.loss_mask, {**step.tokens, "old_log_probs": step.tokens["log_probs"]})
    zero = {**on_policy.tokens, "advantages": torch.zeros(15, dtype=torch.float64)}
    objective = neutral_objective(aggregation="token_sum", kl_loss_coef=1.0, kl_estimator="k1", kl_unbiased=True)
    gradient = run_step(objective, Step(step.lengths, step.loss_mask, zero), trivial_layout(4)).gradients["log_probs"]
    torch.testing.assert_close(gradient, step.tokens["log_probs"] - step.tokens["ref_log_probs"] + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["clip", "cispo", "sapo", "vespo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "distillation"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extremes_stay_finite(name: str, level: str, dtype: torch.dtype) -> None:
    log_probs = torch.tensor([-1000.0, -0.001, -1000.0, -0.5, 0.0, -2.0], dtype=dtype, requires_grad=True)
    inputs = LossInputs(
        loss_mask=torch.ones(6, dtype=torch.bool),
        sequence_index=torch.tensor([0, 1, 2, 2, 3, 3]),
        sequence_tokens=torch.tensor([1, 1, 2, 2]),
        log_probs=log_probs,
        old_log_probs=torch.tensor([-0.001, -1000.0, -0.5, -1000.0, 0.0, -2.0], dtype=dtype),
        rollout_log_probs=torch.tensor([-1000.0, -0.1, -0.5, -1000.0, -1000.0, 0.0], dtype=dtype),
        ref_log_probs=torch.tensor([-0.001, -1000.0, -1000.0, 0.0, -1000.0, -2.0], dtype=dtype),
        entropy=torch.zeros(6, dtype=dtype, requires_grad=True),
        advantages=torch.tensor([1.0, -1.0, 0.0, 0.0, -2.0, 3.0], dtype=dtype),
    )
    correction = OffPolicy(mode="truncate", level="sequence", high=2.0)
    objective = neutral_objective(
        policy_loss=name,
        **({"ratio_level": level} if name in WITH_LEVEL else {}),
        kl_loss_coef=0.1,
        kl_unbiased=True,
        entropy_coef=0.1,
        off_policy_correction=correction,
    )
    output = compute_loss(objective, inputs, num_tokens=6, num_trajectories=4)
    output.loss.backward()
    assert bool(output.loss.isfinite()) and log_probs.grad is not None and bool(log_probs.grad.isfinite().all())
    assert all(bool(total.isfinite()) for total, _ in output.metrics.values())


def test_what_is_missing_is_named() -> None:
    inputs = LossInputs(
        loss_mask=torch.ones(1, dtype=torch.bool), sequence_index=torch.zeros(1, dtype=torch.int64), sequence_tokens=torch.ones(1)
    )
    settings = {"num_tokens": 1, "num_trajectories": 1}
    with pytest.raises(ValueError, match="log_probs"):
        compute_loss(neutral_objective(), inputs, **settings)
    with pytest.raises(ValueError, match="statistics"):
        compute_loss(neutral_objective(top_entropy_fraction=0.5), inputs, **settings)
    with pytest.raises(ValueError, match="max_response_length"):
        run_step(neutral_objective(aggregation="sequence_mean_token_sum_norm"), v1(), trivial_layout(4))


def test_a_loss_of_ones_own_by_path(monkeypatch, tmp_path) -> None:
    (tmp_path / "my_losses.py").write_text(
        "from megatron_rl.algorithms.policy_loss import PolicyLossTerms\n"
        "def double(*, objective, terms, factor: float = 2.0):\n    return PolicyLossTerms(-factor * terms.log_probs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for args, factor in (({}, 2), ({"factor": 3.0}, 3)):
        own = Objective.of(policy_loss={"kind": "plug_in", "path": "my_losses:double", "args": args}, aggregation="token_sum")
        loss = run_step(own.loaded(load), v1(), trivial_layout(4)).loss
        assert loss == pytest.approx(-factor * sum(V1["log_probs"]))
    with pytest.raises(ValueError, match="my_losses:double is not loaded"):
        run_step(own, v1(), trivial_layout(4))
    for path in ("my_losses:missing", "no_such_module:double"):
        with pytest.raises(UserError, match=f"objective.policy_loss {path}"):
            Objective.of(policy_loss=path).loaded(load)
