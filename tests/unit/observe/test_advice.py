"""Advice on recorded rows: none on healthy runs, one sentence with a setting on each thing that is wrong.

tests/data/rows/runs.json has rows of real runs: healthy ones, one with a slowed engine, and those of examples/troubleshooting.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.derived import one_reward
from megatron_rl.config.settings_reference import setting_fields
from megatron_rl.observe.advice import FEWEST_ROWS, NEWEST, advise
from megatron_rl.observe.live_state import WaitState
from megatron_rl.observe.metrics import find_info

Rows: TypeAlias = dict[int, dict[str, float]]
RUNS: dict[str, Rows] = {
    name: {int(step): row for step, row in rows.items()}
    for name, rows in json.loads((Path(__file__).parents[2] / "data" / "rows" / "runs.json").read_text()).items()
}
HEALTHY = ("synchronous", "asynchronous", "reasoning", "supervised", "solved")
BROKEN = {
    "wrong_template": r"9\d% of groups have the reward 0.0 alone .*: 8\d% of responses do not end; mend data.prompt_key or the chat",
    "no_label": "100% of groups have the reward 0.0 alone .*: no prompt has a label; set data.label_key",
    "blind_reward": r"100% of groups have the reward 0.0 alone .*: \d\d% of answers have their label in them; mend reward.function",
    "high_rate": r"the reward has fallen from 0.462 to 0.127 \(since step 10\): lower training.optimizer.lr \(0.005 now\)",
    "collapse": "entropy has collapsed to 22% of the first steps' .since step 12.: .*objective.entropy.coef",
    "stale": "tokens made 2.5 versions ago are worth 28% .* .since step 8.: lower rollout.max_staleness or training.optimizer.lr",
}
"""What is said of the runs of examples/troubleshooting, whose page repeats it."""
LATE = WaitState(name="training of step 9", owners=("Megatron rank 1",), seconds=60, usual_s=5, deadline_s=3600, late=True)


def changed(**values: float | Callable[[int, float], float]) -> Rows:
    """The healthy synchronous run with other values of metrics, whose names have - for /."""
    rows = {step: dict(row) for step, row in RUNS["synchronous"].items()}
    for step, row in rows.items():
        for given, value in values.items():
            name = given.replace("__", "/", 1)
            row[name] = value if not callable(value) else value(step, row.get(name, 1.0))
    return rows


BARREN = {
    step: {name: value for name, value in row.items() if not name.startswith("rollout/zero_variance_fraction/")}
    | {"rollout/zero_variance_fraction/-1.0": 0.95}
    for step, row in changed(rollout__reward=-1.0, rollout__zero_variance_fraction=0.95, rollout__label_found_fraction=0.05).items()
}
WRONG: dict[str, tuple[Rows, str]] = {
    "reward calls": (changed(rollout__reward_timeouts=30), "6% of reward calls fail .* reward.timeout_s"),
    "trajectories": (changed(rollout__failures=64), "11% of trajectories are not made.* rollout.timeout_s"),
    "aborted": (changed(rollout__aborted_fraction=0.06), "6% of responses are aborted.* model.deadline_s"),
    "restarts": (changed(engine__restarts=1), r"engines were started again 5 times in 5 steps.* rollout.engine_restarts"),
    "skipped": (changed(train__skipped_steps=lambda step, _: float(step == 11)), "1 optimizer steps were left out.* training.optimizer.lr"),
    "parity": (changed(weights__scored_mean=lambda step, _: 1e-6 * step), "drift apart, 3.[0-9] times.* weights.parity_threshold"),
    "too easy": (
        changed(**{"rollout__zero_variance_fraction": 0.6, "rollout__zero_variance_fraction/1.0": 0.5}),
        "60% of groups have one reward.* harder prompts, or objective.zero_variance",
    ),
    "all alike": (
        changed(**{"rollout__reward": 0.5, "rollout__zero_variance_fraction": 1.0, "rollout__zero_variance_fraction/0.5": 1.0}),
        "100% of groups have one reward.* other prompts, or objective.zero_variance",
    ),
    "one answer": (
        changed(
            **{
                "rollout__zero_variance_fraction": 0.94,
                "rollout__zero_variance_fraction/0.0": 0.54,
                "rollout__zero_variance_fraction/1.0": 0.4,
                "train__entropy": lambda step, _: 0.001 * step,
            }
        ),
        "94% of groups have one reward.*the same, at 0.0065 nats a token; raise rollout.sampling.temperature",
    ),
    "wrong labels": (
        {step: row | {"eval/a/reward": 0.6, "eval/b/reward": 0.4} for step, row in BARREN.items()},
        "held-out answers earn 0.60; mend the labels of data.train",
    ),
    "labels after a collapse": (
        {step: row | {"eval/a/reward": 0.6 if step < 6 else -1.0} for step, row in BARREN.items()},
        "or take easier prompts",
    ),
    "held-out no better": ({step: row | {"eval/a/reward": -0.95} for step, row in BARREN.items()}, "or take easier prompts"),
    "budget": (
        {step: row | {"rollout/truncated_fraction": 0.99, "eval/a/truncated": 1.0} for step, row in BARREN.items()},
        "99% of responses do not end, nor do held-out ones; raise rollout.sampling.max_response_tokens, or mend data.prompt_key",
    ),
    "prompts": (
        {step: row | {"rollout/truncated_fraction": 0.99, "eval/a/truncated": 0.0} for step, row in BARREN.items()},
        "99% of responses do not end; mend data.prompt_key",
    ),
    "slow rewards from the first row on": (
        {1: RUNS["synchronous"][1] | {"rollout/reward_wait_fraction": 0.85, "time/rollout_wait": 177.0}},
        "85% of their time with rewards",
    ),
    "no reward": (BARREN, "look at `megatron-rl samples`; mend data.prompt_key, the chat template or data.label_key, or take easier"),
    "too hard": (
        changed(**{"rollout__zero_variance_fraction": 0.6, "rollout__zero_variance_fraction/0.0": 0.5}),
        "60% of groups have one reward.* easier prompts",
    ),
    "truncated": (changed(rollout__truncated_fraction=0.26), "26% of responses are cut.* rollout.sampling.max_response_tokens"),
    "entropy": (changed(train__entropy=lambda step, _: 0.5**step), "entropy has collapsed to 1% .* objective.policy_loss.high"),
    "length": (
        changed(rollout__response_length=lambda step, _: 9.0 * step, rollout__reward=0.5),
        "responses are 3.3 times as long as at first without more reward.* objective.aggregation",
    ),
    "stale": (changed(rollout__stale_context_fraction=0.2), "20% of tokens are too old.* rollout.max_staleness"),
    "memory": (changed(engine__kv_use_max=0.95), "95% of their key-value memory.* rollout.max_concurrent_requests"),
    "engine": (
        changed(engine__token_s_of_fastest=0.02, engine__token_s_of_slowest=0.05),
        "one engine takes 2.5 times as long for a token.* rollout.num_engines",
    ),
    "rewards": (
        changed(rollout__reward_wait_fraction=0.7, time__rollout_wait=9, time__train=2),
        "70% of their time with rewards.* reward.function",
    ),
    "samples": (
        changed(rollout__staleness=1, time__rollout_wait=9, time__train=2),
        "training waits 9.0 s a step for samples.* rollout.num_engines",
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gets_no_advice(name: str) -> None:
    assert len(RUNS[name]) > 10 and advise(RUNS[name]) == ()


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_broken_on_purpose_has_its_cause_named(name: str) -> None:
    (sentence,) = advise(RUNS[name])
    assert re.match(BROKEN[name], sentence)


@pytest.mark.parametrize("name", BROKEN)
def test_no_broken_run_is_told_to_change_its_prompts_meanwhile(name: str) -> None:
    said = [advise({step: row for step, row in RUNS[name].items() if step <= last}) for last in RUNS[name]]
    assert not [sentence for sentences in said for sentence in sentences if re.search("(harder|easier|other) prompts", sentence)]
    assert min(number for number, sentences in enumerate(said) if sentences) <= 10


def test_a_run_with_a_slowed_engine() -> None:
    """Rows of a run in which one of two engines had a quarter of its time."""
    (sentence,) = advise(RUNS["slow_engine"])
    assert re.fullmatch(r"one engine takes 2\.\d times as long for a token as the fastest .since step 6.: .*", sentence)


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_has_one_sentence_with_a_setting(name: str) -> None:
    rows, words = WRONG[name]
    (sentence,) = advise(rows)
    assert re.search(words, sentence)
    settings = [word for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", sentence) if not word.endswith(".log")]
    known = {field.path for field in setting_fields()}
    assert settings and all(word in known or word.startswith(("training.optimizer.", "objective.aggregation")) for word in settings)


def test_what_is_read_is_in_the_table_of_metrics() -> None:
    text = (Path(__file__).parents[3] / "megatron_rl" / "observe" / "advice.py").read_text()
    names = set(re.findall(r'"((?:rollout|engine|train|weights|time)/\w+)"', text))
    assert len(names) > 20 and all(find_info(name) for name in names)


def test_a_late_wait_comes_first_and_hushes_tuning() -> None:
    rows = changed(engine__kv_use_max=0.95, rollout__truncated_fraction=0.5)
    first, second = advise(rows, waits=(LATE,))
    assert "training of step 9 has taken 60 s, usually 5.0 s; waiting for Megatron rank 1" in first
    assert "are cut by the token budget" in second
    assert advise(changed(), waits=(LATE,)) == (first,)


def test_a_single_step_says_nothing() -> None:
    for name in ("rollout__truncated_fraction", "engine__kv_use_max", "rollout__aborted_fraction"):
        assert advise(changed(**{name: lambda step, value: 0.99 if step == 12 else 0.0})) == ()


def test_few_rows_and_missing_numbers_say_nothing() -> None:
    rows = changed(rollout__truncated_fraction=0.9)
    assert advise({step: row for step, row in rows.items() if step < FEWEST_ROWS}) == () and advise({}) == ()
    assert advise(changed(rollout__truncated_fraction=math.nan, engine__restarts=math.nan)) == ()
    assert advise(changed(rollout__reward_wait_fraction=0.9, time__rollout_wait=math.nan)) == ()
    assert NEWEST > FEWEST_ROWS - 1


def test_the_row_before_the_first_step_is_none_of_them() -> None:
    assert advise({0: {"engine/restarts": 3.0, "rollout/num_samples": 1.0}}) == ()


def test_no_reward_for_answers_that_are_cut_is_one_sentence() -> None:
    cut = {step: {**row, "rollout/truncated_fraction": 0.8, "rollout/label_found_fraction": 0.9} for step, row in BARREN.items()}
    (sentence,) = advise(cut)
    assert "95% of groups have the reward -1.0 alone" in sentence and "80% of responses do not end" in sentence
    found = {step: {**row, "rollout/label_found_fraction": 0.11} for step, row in BARREN.items()}
    assert "11% of answers have their label in them" in advise(found)[0]


def test_two_roles_with_a_reward_each_are_not_without_reward() -> None:
    roles = {step: {**row, "rollout/zero_variance_fraction/1.0": 0.95, "rollout/reward": 0.0} for step, row in BARREN.items()}
    (sentence,) = advise(roles)
    assert "95% of groups have one reward and teach nothing (from the start): " in sentence


def rewarded(rewards: list[float], **others: float) -> Rows:
    """Rows with these rewards, and other metrics whose names have - for /."""
    extra = {name.replace("__", "/", 1): value for name, value in others.items()}
    return {step: {"rollout/reward": reward, **extra} for step, reward in enumerate(rewards, start=1)}


def test_a_reward_has_fallen_by_more_than_its_noise() -> None:
    """By medians of five: from 0.8 to 0.5 a quarter of 0.8 is lost, and three times the median change of 0.1 are not."""
    assert advise(rewarded([0.8] * 5 + [0.5] * 5))[0].startswith("the reward has fallen from 0.8 to 0.5 (since step 8): lower training")
    assert advise(rewarded([0.8] * 5 + [0.61] * 5)) == (), "less than a quarter"
    assert advise(rewarded([0.3, 0.2, 0.3, 0.2, 0.3, 0.1, 0.0, 0.1, 0.0, 0.1])) == (), "0.2 with a noise of 0.1"
    assert advise(rewarded([-1.0] * 5 + [-1.5] * 5)) and advise(rewarded([-1.0] * 5 + [-1.2] * 5)) == ()
    assert advise(rewarded([0.1] * 5 + [0.9] * 5 + [0.2] * 3))[0].startswith("the reward has fallen from 0.9 to 0.2")
    assert advise(rewarded([0.8] * 5 + [0.1] * 2)) == () == advise(rewarded([0.1] * 5 + [0.9] * 5))


def test_a_run_without_signal_has_lost_no_reward() -> None:
    """A little luck at first hides the cause from nobody."""
    barren = {"rollout/zero_variance_fraction": 0.97, "rollout/zero_variance_fraction/0.0": 0.97}
    (said,) = advise(rewarded([0.01] * 5 + [0.0] * 12, **barren))
    assert said.startswith("97% of groups have the reward 0.0 alone")


def test_old_tokens_have_the_share_that_the_ratios_leave() -> None:
    """1 / mean square is the effective share of samples: 1 / 2.5 = 40 %."""
    old = rewarded([0.8] * 5 + [0.1] * 5, rollout__staleness=3.0, train__off_policy_ratio_square=2.5, train__lr=3e-4)
    (sentence,) = advise(old)
    assert "tokens made 3.0 versions ago are worth 40% of" in sentence and "(0.0003 now)" in sentence
    assert "fallen" in advise({step: {**row, "rollout/staleness": 0.0} for step, row in old.items()})[0]
    assert "fallen" in advise({step: {**row, "train/off_policy_ratio_square": 1.9} for step, row in old.items()})[0]


def test_an_entropy_may_fall_with_a_reward_that_rises() -> None:
    """To 20 % of the first: nothing on most groups, a collapse where groups have one reward, and none where the run solved them."""
    falling = changed(train__entropy=lambda step, _: 0.2 if step > 5 else 1.0)
    assert advise(falling) == ()

    def alike(reward: str) -> Rows:
        shares = {"rollout/zero_variance_fraction": 0.6, f"rollout/zero_variance_fraction/{reward}": 0.6}
        return {step: {**row, **(shares if step > 5 else {})} for step, row in falling.items()}

    assert advise(alike("1.0")) == ()
    (sentence,) = advise(alike("0.0"))
    assert "entropy has collapsed to 20%" in sentence and "objective.entropy.coef" in sentence


def test_equal_rewards_are_blamed_where_groups_are_compared() -> None:
    rows = changed(**{"rollout__zero_variance_fraction": 0.6, "rollout__zero_variance_fraction/1.0": 0.5})
    said = {name: advise(rows, one_reward=one_reward(Objective.of(preset=name))) for name in ("grpo", "dapo", "ppo", "reinforce_plus_plus")}
    assert said["ppo"] == said["reinforce_plus_plus"] == ()
    assert "harder prompts, or objective.zero_variance: resample" in said["grpo"][0]
    assert said["dapo"][0].endswith("harder prompts"), "a run that resamples is not told to"
    (barren,) = advise(BARREN, one_reward="teaches")
    assert "-1.0 alone" in barren, "one reward everywhere teaches no estimator"


def test_a_sentence_has_the_step_at_which_it_began() -> None:
    """The median of five shares is beyond its bound with the third of them; an earlier time does not count."""
    shares = {step: 0.9 if step in (2, 3, 4) or step >= 21 else 0.0 for step in range(1, 41)}
    rows = {step: {"rollout/truncated_fraction": share, "engine/restarts": float(step == 39)} for step, share in shares.items()}
    restarts, cut = advise(rows)
    assert "5 steps (since step 39): see" in restarts and cut.startswith(
        "90% of responses are cut by the token budget (since step 23): raise"
    )
    assert advise({step: {"engine/kv_use_max": 0.99} for step in range(5, 12)})[0].startswith(
        "engines fill 99% of their key-value memory (from"
    )


def test_failures_are_shares_of_trajectories() -> None:
    """Of 512 samples in trajectories of 8 each, 64 were scored."""
    rows = changed(rollout__samples_per_trajectory=8.0, rollout__num_samples=512.0, rollout__reward_errors=16.0, rollout__failures=64.0)
    said = advise(rows)
    assert any(sentence.startswith("25% of reward calls") for sentence in said), said
    assert any(sentence.startswith("50% of trajectories are not made") for sentence in said), said
