"""What a plan says without measuring anything; tests/dist/test_run_plan.py measures."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import Settings, WeightSettings
from megatron_rl.errors import UserError
from megatron_rl.planning.gpus import GIB, GPUS
from megatron_rl.planning.run_plan import RANK_HOST_BYTES, _rank_host, _shared_buckets, plan_run
from megatron_rl.weights.bucket import BUCKET_BYTES


def test_impossible_layouts_are_refused_in_the_topologys_words(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]
) -> None:
    with pytest.raises(UserError, match=r"num_layers 36 is not divisible by pp·vpp 5"):
        plan_run(run_settings(num_ranks=5, pp=5), model_spec("Qwen3-4B"), gpu=GPUS["H100-80"], num_nodes=None)


def test_host_memory_holds_a_reference_only_where_one_is_read(run_settings: Callable[..., Settings]) -> None:
    policy = SimpleNamespace(reference=7 * GIB, away=2 * GIB)
    settings = run_settings()
    with_kl = settings.model_copy(update={"objective": Objective(kl_loss_coef=0.1)})
    without, kept = (_rank_host(variant, policy, [policy]) for variant in (settings, with_kl))  # type: ignore[arg-type, list-item]
    assert kept - without == 7 * GIB
    colocated = settings.model_copy(update={"runtime": settings.runtime.model_copy(update={"colocate": True})})
    # The policy and a critic, both away while engines generate.
    shared = _rank_host(colocated, policy, [policy, policy])  # type: ignore[arg-type, list-item]
    never_saved = colocated.model_copy(update={"run": colocated.run.model_copy(update={"save_interval": 0})})
    unsaved = _rank_host(never_saved, policy, [policy, policy])  # type: ignore[arg-type, list-item]
    assert (unsaved - RANK_HOST_BYTES, shared - unsaved) == (2 * 2 * GIB, 2 * 2 * GIB), "as much again while a checkpoint is written"


def test_memory_that_is_shared_with_an_engine_is_two_buckets(
    run_settings: Callable[..., Settings], model_spec: Callable[[str], Any]
) -> None:
    by_ipc = run_settings(runtime={"colocate": True})
    by_disk = by_ipc.model_copy(update={"weights": WeightSettings(transport="disk")})
    small = dataclasses.replace(model_spec("Qwen3-4B"), vocab_size=1000)
    assert (_shared_buckets(by_ipc, small), _shared_buckets(by_disk, small)) == (2 * BUCKET_BYTES, 0)
    # An embedding is sent whole.
    assert _shared_buckets(by_ipc, model_spec("Qwen3-4B")) == 2 * 151936 * 2560 * 2
    # 128 experts' gate and up, of 2 x 2880 rows and 2880 columns, are one tensor: two buckets, the stack and its parts.
    assert _shared_buckets(by_ipc, model_spec("gpt-oss-120b")) == 4 * 128 * 2 * 2880 * 2880 * 2
