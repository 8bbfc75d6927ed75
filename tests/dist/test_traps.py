"""What upstream trains silently wrong, shown to be wrong with its guard taken away, and shown to be refused or mended with it.

When a test says that a trap has no effect any more, the installed megatron-core mended it and its guard can go.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layout_runs import SEEDS, Outcome, compare, make_batch, make_settings, make_trainer, outcome_of, shards_of
from layout_table import BASE, LAYOUTS, OBJECTIVES

NOTICED = 1e-3
GRPO = OBJECTIVES["grpo"]
# Messages of one size: with others, two in one batch end in a hang, which nobody misses. And enough of them to be in flight at once.
ALIKE = {"lengths": (12,) * 8, "prompts": (3,) * 8}
# Layout, and fields of megatron-core's configuration that open the trap there.
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "two messages between one pair of stages in a batch": (
        "pp2 vpp2",
        {"overlap_p2p_comm": False, "batch_p2p_comm": True, "variable_seq_lengths": False},
    ),
    "no tensor-parallel marks": ("tp2", {"perform_initialization": False}),
    "gradients divided by micro-batches and ranks": ("dp2", {"calculate_per_token_loss": False}),
}

# Others that are refused, because they fail or hang in the middle of a run or by chance: layout, value, value that is needed.
REFUSED: dict[str, tuple[str, Any, Any]] = {
    "deallocate_pipeline_outputs": ("pp2 vpp2", True, False),
    "variable_seq_lengths": ("pp2", False, True),
    "overlap_p2p_comm_warmup_flush": ("pp2 vpp2", True, False),
    "microbatch_group_size_per_vp_stage": ("pp2 vpp2", 4, 2),
    "num_microbatches_with_partial_activation_checkpoints": ("pp2", 1, None),
}


def settings_of(model: str, directory: Path, layout: str) -> Any:
    return make_settings(
        model, directory, dataclasses.replace(LAYOUTS[layout], budget=12), objective=GRPO.objective, training=GRPO.training
    )


def train_trapped(
    rank: int, world_size: int, init_method: str, model: str, directory: str, traps: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Outcome]:
    """Train with each trap open, past the settings, which would refuse it."""
    from megatron_rl.training import trained_model
    from megatron_rl.training.topology import shutdown

    # It gives the parameters the marks that one of these fields leaves off.
    trained_model.mark_parameters = lambda *_: None
    guarded, outcomes = trained_model.transformer_config, {}
    for number, (name, (layout, opened)) in enumerate(traps.items()):
        if rank >= LAYOUTS[layout].num_ranks:
            continue

        def unguarded(*arguments: Any, _opened: dict[str, Any] = opened, **keywords: Any) -> Any:
            config = guarded(*arguments, **keywords)
            vars(config).update(_opened)
            return config

        print(f"trap {name}", flush=True)
        trained_model.transformer_config = unguarded
        settings = settings_of(model, Path(directory) / str(number), layout)
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        batches = [make_batch(seed, **ALIKE) for seed in SEEDS]
        steps = [step for batch in batches for step in trainer.train_shard(shards_of(batch, settings)[trainer.dp_rank])]
        outcomes[name] = outcome_of(trainer, steps)
        shutdown()
    return outcomes


@pytest.mark.slow
def test_open_traps_give_other_gradients(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    traps = {"none": (BASE, {}), **FIELDS}
    ranks = run_ranks(train_trapped, 2, str(tiny_model(layers=4)), str(tmp_path), traps, timeout_s=180)
    for name in FIELDS:
        differences = compare([rank[name] for rank in ranks], [ranks[0]["none"]])
        assert differences.grad_norm > NOTICED, f"{name} has no effect: {differences}"


def test_open_traps_are_refused_at_the_check(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from megatron_rl.errors import UserError
    from megatron_rl.runtime.preflight import preflight

    model = str(tiny_model(layers=4))
    needed = {name: value for name, (_, _, value) in REFUSED.items()}
    refused = [*FIELDS.values(), *((layout, {name: value}) for name, (layout, value, _) in REFUSED.items())]
    for layout, opened in refused:
        for name, value in opened.items():
            settings = make_settings(
                model, tmp_path, dataclasses.replace(LAYOUTS[layout], megatron={name: value}), objective=GRPO.objective
            )
            sentence = rf"model\.megatron\.{name} is {value}, but the .* needs {needed.get(name, not value)}; remove this override"
            with pytest.raises(UserError, match=sentence):
                preflight(settings, probe=False)


def send_freed(rank: int, world_size: int, init_method: str) -> list[float]:
    """What rank 1 receives of ones that rank 0 frees as megatron-core frees a stage's output, before the message has left."""
    import torch
    from torch import distributed

    from megatron_rl.system.device import local_device, prepare_megatron

    prepare_megatron(local_device())
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    tensor = torch.ones(6000)
    if rank == 0:
        sending = distributed.isend(tensor, 1)
        deallocate_output_tensor(tensor, True)
        # What the stage computes next takes the memory.
        next_output = [torch.full((6000,), 2.0) for _ in range(4)]
        distributed.barrier()
        sending.wait()
        return next_output[0].tolist()
    distributed.barrier()
    distributed.recv(tensor, 0)
    return tensor.tolist()


@pytest.mark.not_under_nccl_rules(
    reason="it shows what gloo does with memory that is freed while it is sent; NCCL sends in the GPU's order"
)
def test_freed_outputs_are_sent_after_their_memory_is_reused(run_ranks: Callable[..., list[Any]]) -> None:
    received = run_ranks(send_freed, 2, timeout_s=60)[1]
    assert received != [1.0] * 6000, "gloo keeps what is sent: deallocate_pipeline_outputs can be left alone"
