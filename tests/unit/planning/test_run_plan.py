"""What a plan says without measuring anything; tests/dist/test_run_plan.py measures."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.decided import with_values
from megatron_rl.config.gpus import GIB, GPUS
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.planning import run_plan
from megatron_rl.planning.measurement import Answer, Job
from megatron_rl.planning.records import Collective
from megatron_rl.planning.run_plan import CONTEXT_BYTES, RANK_HOST_BYTES, make_job, most_held, plan_run, shared_buckets, stage_memories
from megatron_rl.weights.transport import BUCKET_BYTES

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def test_impossible_layouts_are_refused_in_the_topologys_words(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]
) -> None:
    with pytest.raises(UserError, match=r"num_layers 36 is not divisible by pp·vpp 5"):
        plan_run(run_settings(num_ranks=5, pp=5), model_spec("Qwen3-4B"), gpu=GPUS["H100-80"], num_nodes=None)


def rank_of(**bytes_by_name: int) -> Any:
    """A rank with 10 GiB of activations, whose other memory is 0 unless given."""
    names = ("num_layers", "num_parameters", "parameters", "gradients", "optimizer", "reference", "away", "update")
    sizes = dict.fromkeys((*names, "backward", "head"), 0) | bytes_by_name
    chunks = [SimpleNamespace(held=10 * GIB, output=0)]
    return SimpleNamespace(**sizes, chunks=chunks, largest_collective=Collective("none", 0))


@pytest.mark.parametrize(
    ("changes", "has_critic", "gib"),
    [
        # The policy's copy for a checkpoint, and the reference.
        ({}, False, 2),
        ({"objective": Objective.of(kl={"coef": 0.1})}, False, 7 + 2),
        # The policy and a critic, both away while engines generate, and as much again while a checkpoint is written.
        ({"runtime.colocate": True}, True, 2 * (2 + 2)),
        ({"runtime.colocate": True, "run.save_interval": 0}, True, 2 + 2),
    ],
)
def test_host_memory_holds_what_is_away_and_a_read_reference(
    run_settings: Callable[..., Settings],
    model_spec: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    has_critic: bool,
    gib: int,
) -> None:
    policy = rank_of(reference=7 * GIB, away=2 * GIB)
    monkeypatch.setattr(run_plan, "measure", lambda jobs: [Answer((policy,), (policy,) * has_critic)])
    plan = plan_run(with_values(run_settings(num_ranks=1), changes), model_spec("Qwen3-4B"), gpu=GPUS["H100-80"], num_nodes=None)
    assert plan.stages[0].host - RANK_HOST_BYTES == gib * GIB


def test_a_copy_for_deltas_is_in_host_memory(
    run_settings: Callable[..., Settings], model_spec: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plan, "measure", lambda jobs: [Answer((rank_of(away=200 * GIB),), ())])
    settings, spec = run_settings(num_ranks=1), model_spec("Qwen3-4B")
    plans = [
        plan_run(with_values(settings, {"weights.delta": delta}), spec, gpu=GPUS["H100-80"], num_nodes=None) for delta in (False, True)
    ]
    num_parameters = sum(math.prod(shape) for _, shape in tensor_shapes(spec))
    assert plans[1].host_per_node - plans[0].host_per_node == 2 * num_parameters > 8e9


def test_a_teacher_takes_activations_and_host_memory(run_settings: Callable[..., Settings], model_spec: Callable[[str], Any]) -> None:
    rank = rank_of(parameters=GIB, backward=GIB, head=2 * GIB)
    teacher: Any = SimpleNamespace(weights=30 * GIB, forward=2 * GIB, resting=31 * GIB)
    job = make_job(run_settings(num_ranks=1), model_spec("Qwen3-4B"), attention=None)
    ((alone,), (distilled,)) = (stage_memories(job, Answer((rank,), teacher=teachers), frees_outputs=True) for teachers in ((), (teacher,)))
    assert (alone.teacher, alone.total) == (0, 13 * GIB + CONTEXT_BYTES + 10 * GIB // 20)
    # Weights stay; a twentieth of what comes and goes is lost.
    assert (distilled.teacher, distilled.total) == (32 * GIB, 33 * GIB + CONTEXT_BYTES + int(0.05 * 32 * GIB))
    assert distilled.host - alone.host == 31 * GIB


def test_the_teacher_that_is_distilled_is_measured(
    run_settings: Callable[..., Settings], model_spec: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, asked = run_settings(num_ranks=1), list[Job]()
    model = settings.model.model_copy(update={"teacher": tmp_path})
    distilled = settings.model_copy(update={"model": model, "objective": Objective.of(distillation_coef=0.5)})
    unused = settings.model_copy(update={"model": model})

    def measure(jobs: list[Job]) -> list[Answer]:
        asked.extend(jobs)
        return [Answer(refused="measured")] * len(jobs)

    monkeypatch.setattr(run_plan, "measure", measure)
    (tmp_path / "config.json").write_bytes((CONFIGS / "Qwen3-8B.json").read_bytes())
    plans = run_plan.plan_layouts([unused, distilled], model_spec("Qwen3-4B"), gpu=GPUS["H100-80"], num_nodes=None)
    assert plans == ["measured"] * 2
    assert [job.teacher and job.teacher.hidden_size for job in asked] == [None, 4096]
    lost = distilled.model_copy(update={"model": model.model_copy(update={"teacher": tmp_path / "lost"})})
    with pytest.raises(UserError, match=r"model\.teacher is .*lost, which is not a directory"):
        plan_run(lost, model_spec("Qwen3-4B"), gpu=GPUS["H100-80"], num_nodes=None)


def test_memory_that_is_shared_with_an_engine_is_two_buckets(
    run_settings: Callable[..., Settings], model_spec: Callable[[str], Any]
) -> None:
    model = run_settings().model
    small = dataclasses.replace(model_spec("Qwen3-4B"), vocab_size=1000)
    assert shared_buckets(model, small) == 2 * BUCKET_BYTES
    # An embedding is sent whole.
    assert shared_buckets(model, model_spec("Qwen3-4B")) == 2 * 151936 * 2560 * 2
    # 128 experts' gate and up, of 2 x 2880 rows and 2880 columns, are one tensor: two buckets, the stack and its parts.
    assert shared_buckets(model, model_spec("gpt-oss-120b")) == 4 * 128 * 2 * 2880 * 2880 * 2


@pytest.mark.parametrize(("pp", "stage"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_1f1b_holds_one_micro_batch_for_each_later_stage(pp: int, stage: int) -> None:
    assert most_held([10], stage=stage, pp=pp, num_micro_batches=16) == (10 * (pp - stage), pp - stage)


def test_no_more_than_there_are() -> None:
    assert most_held([10], stage=0, pp=8, num_micro_batches=3) == (30, 3)
    assert most_held([5, 7], stage=0, pp=4, num_micro_batches=4) == (48, 4)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("vpp", [2, 3])
def test_interleaved_chunks_follow_megatrons_table(stage: int, vpp: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    pp, num_micro_batches = 4, 12
    held = [3, 5, 11][:vpp]
    table = get_schedule_table(num_micro_batches, vpp, pp)
    forwards = [chunk for _, chunk in table]
    ahead = 2 * (pp - stage - 1) + (vpp - 1) * pp
    events = [(chunk, +1) for chunk in forwards[:ahead]]
    for index, chunk in enumerate(forwards[ahead:]):
        events += [(chunk, +1), (vpp - 1 - forwards[index], -1)]
    now = most = 0
    for chunk, sign in events:
        now += sign * held[chunk]
        most = max(most, now)
    assert most_held(held, stage=stage, pp=pp, num_micro_batches=num_micro_batches)[0] == most


def test_interleaving_holds_more_than_1f1b_as_published() -> None:
    """Memory grows by 1 + (p - 1) / (p v) on the first stage (Korthikanti et al. 2022, section 4.2)."""
    plain, _ = most_held([12], stage=0, pp=4, num_micro_batches=16)
    interleaved, _ = most_held([6, 6], stage=0, pp=4, num_micro_batches=16)
    assert interleaved / plain == 1 + 3 / (4 * 2)
