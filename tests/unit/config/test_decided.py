"""What is decided where nobody set it, against arithmetic by hand; what somebody set stays."""

import json
from typing import Any

import pytest

from megatron_rl.config.decided import decide
from megatron_rl.config.load import apply_overrides, dump_settings, load_settings, parse_yaml, validate_settings
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import by_path

CLUSTER = ("runtime.cluster={num_nodes: 2, gpus_per_node: 8}",)


def settings_of(*overrides: str) -> Settings:
    words = ["run.directory=runs/x", "model.path=model", "data.train=train.jsonl", *overrides]
    return validate_settings(apply_overrides({}, words), origin="test")


@pytest.mark.parametrize(
    ("overrides", "decided"),
    [
        ((), {}),
        (("objective.policy_loss.kind=sft",), {}),
        (("rollout.environment=a:B",), {"reward.function": None}),
        (("rollout.environment=a:B", "reward.function=c:d"), {}),
        (
            ("rollout.sampling.max_response_tokens=40000", "training.topology={num_ranks: 2, cp: 2}"),
            # (1024 + 40000) / 2 tokens.
            {"training.max_tokens_per_micro_batch": 20512},
        ),
        (("rollout.sampling.top_p=0.9",), {"rollout.sampling.top_k": 2048}),
        (("rollout.sampling.min_p=0.1", "rollout.sglang={sampling_mask_max_tokens: 100}"), {"rollout.sampling.top_k": 50}),
        (("rollout.sampling.top_p=0.9", "rollout.sampling.top_k=7", "eval.sets.a={data: x, sampling: {top_p: 1.0}}"), {}),
        (
            (
                "rollout.sampling.top_p=0.9",
                "eval.sets={a: {data: x, sampling: {top_p: 1.0}}, b: {data: x, sampling: {min_p: 0.1}}, "
                "c: {data: x, sampling: {top_p: 1.0, top_k: 5}}}",
            ),
            {"rollout.sampling.top_k": 2048, "eval.sets.a.sampling.top_k": 0},
        ),
        (("rollout.sampling.top_p=0.9", "objective.policy_loss.kind=sft"), {}),
        (CLUSTER, {"training.topology.num_ranks": 8, "rollout.num_engines": 8}),
        (
            (*CLUSTER, "training.topology={tp: 3, pp: 2}", "rollout.sglang.tp_size=4"),
            {"training.topology.num_ranks": 6, "rollout.num_engines": 2},
        ),
        (
            (*CLUSTER, "runtime.colocate=true", "rollout.sglang.tp_size=2"),
            {"training.topology.num_ranks": 16, "rollout.num_engines": 8},
        ),
        ((*CLUSTER, "rollout.num_engines=4"), {"training.topology.num_ranks": 12}),
        ((*CLUSTER, "training.topology.num_ranks=4"), {"rollout.num_engines": 12}),
        ((*CLUSTER, "training.topology.tp=32"), {}),
        ((*CLUSTER, "objective.policy_loss.kind=sft"), {"training.topology.num_ranks": 16}),
    ],
)
def test_open_settings_are_decided_from_the_others(overrides: tuple[str, ...], decided: dict[str, Any]) -> None:
    given = apply_overrides({}, ["run.directory=runs/x", "model.path=model", "data.train=train.jsonl", *overrides])
    # Before its contradictions are looked for.
    before = Settings.model_validate_json(json.dumps(given), strict=True)
    after, made = decide(before, has_gpus=False)
    assert {one.path: one.value for one in made} == decided and all(one.reason for one in made)
    then, now = by_path(before.model_dump(mode="json")), by_path(after.model_dump(mode="json"))
    changed = {path: now[path] for path in now if now[path] != then[path]}
    assert changed == {path: value for path, value in decided.items() if then[path] != value}


def test_what_was_decided_is_given_the_next_time() -> None:
    first = load_settings(None, ["run.directory=runs/x", "model.path=model", "data.train=train.jsonl", *CLUSTER])
    again, made = decide(validate_settings(parse_yaml(dump_settings(first), origin="dump"), origin="dump"), has_gpus=False)
    assert (again, made) == (first, ())


@pytest.mark.parametrize(
    ("overrides", "has_gpus", "decided"),
    [
        ((), False, {}),
        (
            (),
            True,
            {"use_distributed_optimizer": True, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        (("training.ddp.use_distributed_optimizer=false", "model.megatron.recompute_granularity=null"), True, {}),
        (("model.megatron.recompute_modules=[mlp]",), True, {"use_distributed_optimizer": True}),
    ],
)
def test_memory_is_saved_where_gpus_are_used(overrides: tuple[str, ...], has_gpus: bool, decided: dict[str, Any]) -> None:
    before = settings_of("training.optimizer.lr=1e-5", *overrides)
    after, made = decide(before, has_gpus=has_gpus)
    assert {one.path.rpartition(".")[2]: one.value for one in made} == decided
    optimizer = {key: value for key, value in decided.items() if key.startswith("use_")}
    assert after.training.optimizer == {"lr": 1e-5, **optimizer}
    assert after.model.megatron == before.model.megatron | {key: value for key, value in decided.items() if key not in optimizer}


def test_gpus_are_those_that_the_cluster_names() -> None:
    words = ["run.directory=runs/x", "model.path=model", "data.train=train.jsonl", "runtime.cluster.gpu=H100-80"]
    assert load_settings(None, words).model.megatron == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert load_settings(None, words, on_gpus=False).model.megatron == {}
