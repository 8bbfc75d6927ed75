"""The arithmetic that `train --check` prints, against sums by hand."""

import pytest

from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.planning.launch_plan import sizes


def settings_with(*overrides: str) -> Settings:
    return load_settings(None, ["run.directory=x", "model.path=m", "data.train=t", *overrides])


def test_sizes_add_up() -> None:
    settings = settings_with(
        "training.topology={num_ranks: 16, tp: 2, pp: 2, cp: 2, sequence_parallel: true, ep: 4, etp: 1}",
        "training.optimizer_steps_per_batch=4",
        "run={directory: x, num_steps: 25, save_interval: 10}",
        "data={train: t, prompts_per_step: 6, samples_per_prompt: 2, max_prompt_tokens: 10}",
        "eval.sets.e=e",
        "rollout.sampling.max_response_tokens=30",
        "training.max_tokens_per_micro_batch=100",
    )
    assert sizes(settings) == {
        "sequences per step": "6 prompts × 2 samples = 12",
        "sequences per optimizer step": "12 / 4 optimizer steps = 3",
        "optimizer steps": "25 × 4 = 100",
        "sequences in all": "25 × 12 = 300",
        "tokens per micro-batch": "at most 100 × cp 2 = 200",
        "evaluations, checkpoints": "4, 3",
        "tokens per sequence": "at most 10 + 30 = 40",
        "groups made ahead": "none: generation and training take turns (rollout.max_staleness 0)",
        "tokens per step": "at most 40 × 12 = 480",
    }


def test_a_staleness_of_two_makes_two_steps_ahead() -> None:
    ahead = sizes(settings_with("rollout.max_staleness=2", "objective.proximal=rollout", "data.prompts_per_step=6"))["groups made ahead"]
    assert ahead == "at most 2 steps × 6 groups = 12, while a step trains"
    partial = settings_with("rollout.order={kind: first_complete, partial: true, oversampling: 1.25}", "data.prompts_per_step=6")
    assert sizes(partial)["groups made ahead"] == "at most 2 besides 6 groups (rollout.order first_complete)"


@pytest.mark.parametrize(("steps", "warmup", "last"), [(100, 0, 10), (109, 0, 10), (9, 0, 1), (100, 95, 5)])
def test_wsd_falls_in_the_last_tenth(steps: int, warmup: int, last: int) -> None:
    rows = sizes(settings_with(f"training.schedule={{decay_style: wsd, warmup_steps: {warmup}}}", f"run.num_steps={steps}"))
    assert rows["learning rate"] == f"wsd, falls in the last {last} of {steps} optimizer steps"


def test_supervised_rows_are_single_sequences() -> None:
    rows = sizes(settings_with("objective.policy_loss=sft", "run.save_interval=0"))
    assert rows["sequences per step"] == "64 rows = 64" and rows["evaluations, checkpoints"] == "0, 1"
    assert not any("tokens per s" in name for name in rows)
