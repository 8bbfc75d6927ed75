"""The plan against reality: ranks that train here, and the same ranks as `plan` builds them without memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.not_under_nccl_rules(
    reason="it counts memory on the CPU, where logits go through the head in smaller chunks than on a GPU"
)

DISTRIBUTED_OPTIMIZER = {"optimizer": {"use_distributed_optimizer": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"topology": {"num_ranks": 1}},
    "tp2 sp": {"topology": {"num_ranks": 2, "tp": 2, "sequence_parallel": True}},
    "pp2": {"topology": {"num_ranks": 2, "pp": 2}},
    "pp2 vpp2": {"topology": {"num_ranks": 2, "pp": 2, "vpp": 2}},
    "cp2": {"topology": {"num_ranks": 2, "cp": 2}},
    "dp2 distributed optimizer": {"topology": {"num_ranks": 2}, **DISTRIBUTED_OPTIMIZER},
    "one, full recompute": {"topology": {"num_ranks": 1}},
    "one, teacher": {"topology": {"num_ranks": 1}},
    "tp2 sp, teacher": {"topology": {"num_ranks": 2, "tp": 2, "sequence_parallel": True}},
    "pp2, teacher": {"topology": {"num_ranks": 2, "pp": 2}},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"topology": {"num_ranks": 2, "ep": 2}},
    "ep2 distributed optimizer": {"topology": {"num_ranks": 2, "ep": 2}, **DISTRIBUTED_OPTIMIZER},
}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TOLERANCE = 0.1


def make_settings(model: str, name: str, training: dict[str, Any]) -> Any:
    """A layout with "teacher" in its name distils one that lies beside the model."""
    from megatron_rl.algorithms.objective import expand_preset
    from megatron_rl.config.settings import Settings

    distilled = "teacher" in name
    return Settings.model_validate(
        {
            "run": {"directory": "unused"},
            "model": {
                "path": model,
                "dtype": "float32",
                "megatron": FULL_RECOMPUTE if "recompute" in name else {},
                "teacher": Path(model).parent / "teacher" if distilled else None,
            },
            "data": {"train": "unused", "prompts_per_step": 8, "max_prompt_tokens": 56},
            "rollout": {"sampling": {"max_response_tokens": 200}},
            "objective": expand_preset({"distillation_coef": 0.5} if distilled else {"policy_loss": "sft"}),
            "training": {"max_tokens_per_micro_batch": 512, **training},
        }
    )


def make_batch() -> Any:
    """Eight sequences of the greatest length, which fill micro-batches."""
    import numpy as np

    from megatron_rl.types import TrainBatch

    mask = np.ones((8, 256), np.bool_)
    mask[:, 0] = False
    return TrainBatch(
        tokens=np.random.default_rng(0).integers(0, 4096, 8 * 256),
        cu_seqlens=np.arange(9) * 256,
        prompt_lengths=np.ones(8),
        loss_mask=mask.ravel(),
        rollout_log_probs=np.zeros(8 * 256),
        weight_versions=np.full(8 * 256, -1),
        rewards=np.zeros(8),
        group_ids=np.arange(8),
        truncated=np.zeros(8),
    )


def train(rank: int, world_size: int, init_method: str, model: str, layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Bytes of this rank's state, and the most that a step of each layout took besides, before and in the optimizer's step; of a teacher
    those that rest and those that asking it took.
    """
    from megatron_rl.data.packing import make_shards
    from megatron_rl.planning.tracking import MemoryTracker
    from megatron_rl.training import step
    from megatron_rl.training.topology import shutdown
    from megatron_rl.training.trainer import Trainer

    real_step, seen = step.optimizer_step, {}
    for name, training in layouts.items():
        settings = make_settings(model, name, training)
        topology = settings.training.topology
        if rank >= topology.num_ranks:
            continue
        trainer = Trainer.of(settings, rank=rank, init_method=f"{init_method}-{name}")
        dp = topology.num_ranks // (topology.tp * topology.pp * topology.cp)
        shards = make_shards(make_batch(), dp=dp, optimizer_steps=1, max_tokens_per_micro_batch=512, seed=0, cp=topology.cp)
        seen[name] = state_bytes(trainer.trained_models()["policy"])
        with MemoryTracker() as tracker:
            step.optimizer_step = partial(watched_step, step.optimizer_step, tracker, seen[name])
            if trainer._teacher is not None:
                seen[name]["resting"] = resting_bytes(trainer._teacher)
                trainer._teacher.log_probs = partial(watched_asking, trainer._teacher.log_probs, tracker, seen[name])
            trainer.train_shard(shards[trainer.dp_rank])
        step.optimizer_step = real_step
        shutdown()
    return seen


def watched_step(real_step: Callable[..., Any], tracker: Any, found: dict[str, int], *arguments: Any, **keywords: Any) -> Any:
    """The optimizer's step, with the peaks before and in it written to `found`."""
    found["passes"], before = tracker.peak, tracker.live
    tracker.reset_peak()
    result = real_step(*arguments, **keywords)
    found["update"] = tracker.peak - before
    return result


def watched_asking(ask: Callable[..., Any], tracker: Any, found: dict[str, int], *arguments: Any, **keywords: Any) -> Any:
    """The teacher's log-probs, with the peak of asking it written to `found`; the training's starts after it."""
    before = tracker.live
    tracker.reset_peak()
    result = ask(*arguments, **keywords)
    found["asked"] = tracker.peak - before
    tracker.reset_peak()
    return result


def resting_bytes(teacher: Any) -> int:
    """Bytes of a teacher's weights in host memory."""
    return sum(len(part) for parts in teacher._weights._host for part in parts)


def state_bytes(model: Any) -> dict[str, int]:
    """Bytes of weights, gradient buffers, and what the optimizer has besides, by walking over all tensors."""
    weights: dict[int, int] = {}
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            storage = parameter.untyped_storage()
            weights[storage._cdata] = storage.nbytes()
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    optimizers = [part.optimizer for part in vars(model.optimizer).get("chained_optimizers", [model.optimizer])]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    moments = [moment for state in states for name, moment in state.items() if name != "step"]
    return {
        "num_parameters": sum(parameter.numel() for chunk in model.chunks for parameter in chunk.parameters()),
        "parameters": sum(weights.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(moment.nbytes for moment in moments),
    }


def plan(model: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """For each layout the stages of its plan and the answer behind them, planned for the CPU."""
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.planning.measurement import measure
    from megatron_rl.planning.run_plan import make_job, stage_memories

    spec = read_model_spec(model)
    jobs = {name: make_job(make_settings(str(model), name, training), spec, attention=None) for name, training in layouts.items()}
    planned = {}
    for (name, job), answer in zip(jobs.items(), measure(list(jobs.values())), strict=True):
        assert answer.refused is None, answer.refused
        planned[name] = stage_memories(job, answer, frees_outputs=False), answer
    return planned


def compare(real: list[dict[str, dict[str, int]]], planned: dict[str, tuple[Any, Any]], *, same_tokens: bool) -> None:
    """State exactly, passes within the tolerance: on each rank, or on average where ranks have different numbers of tokens."""
    for name, (stages, answer) in planned.items():
        seen = [outcome[name] for outcome in real if name in outcome]
        wanted, got = [], []
        for rank, found in enumerate(seen):
            stage = stages[rank * len(stages) // len(seen)]
            for field in ("num_parameters", "parameters", "gradients", "optimizer"):
                assert found[field] == getattr(stage, field), f"{name}, rank {rank}: {field} {found[field]}, plan {getattr(stage, field)}"
            wanted.append(stage.activations + max(stage.logits, answer.policy[stage.stage].backward))
            got.append(found["passes"])
            update = answer.policy[stage.stage].update
            assert found["update"] == pytest.approx(update, rel=TOLERANCE), f"{name}, rank {rank}: optimizer step"
            compare_teacher(f"{name}, rank {rank}", found, stage, answer)
        print(f"{name}: passes {got}, plan {wanted}")
        if not same_tokens:
            wanted, got = [sum(wanted)], [sum(got)]
        assert got == pytest.approx(wanted, rel=TOLERANCE), f"{name}: activations of {got} bytes, plan {wanted}"


def compare_teacher(name: str, found: dict[str, int], stage: Any, answer: Any) -> None:
    """A teacher's weights exactly, asking it within the tolerance; and that the stage has room for both together."""
    if not answer.teacher:
        assert "asked" not in found and stage.teacher == 0, name
        return
    teacher = answer.teacher[stage.stage]
    print(f"{name}: teacher {teacher}, asked {found['asked']}, resting {found['resting']}")
    assert teacher.weights == found["resting"] <= teacher.resting < 2 * found["resting"], name
    assert teacher.forward == pytest.approx(found["asked"] - found["resting"], rel=TOLERANCE), name
    assert stage.teacher == teacher.weights + teacher.forward, name


@pytest.mark.slow
def test_plan_agrees_with_training(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(hidden=256, layers=4, vocab=4096, tied=False, num_key_value_heads=4)
    tiny_model(name="teacher", hidden=320, layers=6, vocab=4096, tied=False, num_key_value_heads=4)
    real = run_ranks(train, 2, str(model), LAYOUTS, timeout_s=300)
    compare(real, plan(model, LAYOUTS), same_tokens=True)


def test_plan_agrees_with_training_of_experts(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(
        family="qwen3_moe", hidden=256, layers=2, vocab=4096, tied=False, num_key_value_heads=4, num_experts=8, moe_intermediate_size=256
    )
    real = run_ranks(train, 2, str(model), EXPERT_LAYOUTS, timeout_s=300)
    compare(real, plan(model, EXPERT_LAYOUTS), same_tokens=False)
