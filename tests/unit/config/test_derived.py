from collections.abc import Callable

from megatron_rl.config.derived import derive, dtype_name
from megatron_rl.config.settings import Settings


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
