"""Checks of a run for machines that are elsewhere: by its settings and the model's config.json alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.planning.launch_plan import launch_plan
from megatron_rl.runtime.preflight import preflight
from megatron_rl.runtime.target import Target, find_target

preflight_config = partial(preflight, config_only=True)

CLUSTER = ("runtime.cluster={gpu: H100-80, num_nodes: 2}", "rollout.sglang.tp_size=4")


@pytest.fixture
def elsewhere(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Settings of a run on GPUs, whose model is a config.json alone and whose data is not here."""
    path = tiny_model()
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    (tmp_path / "reward_elsewhere.py").write_text("def score(*, sample):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = (f"run.directory={tmp_path}/run", f"model.path={path}", "rollout.sampling.max_response_tokens=8", "training.optimizer.lr=1e-4")
    sizes = ("data={train: /shared/train.jsonl, max_prompt_tokens: 16}", "training.topology.num_ranks=8", "rollout.num_engines=2")

    def settings(*overrides: str) -> Settings:
        return load_settings(None, [*words, *sizes, "reward.function=reward_elsewhere:score", *CLUSTER, *overrides])

    return settings


def target_of(settings: Settings) -> Target:
    return find_target(settings.training.topology, settings.rollout, settings.runtime, config_only=True)


def test_config_only_needs_neither_gpus_nor_weights_nor_data(elsewhere: Callable[..., Settings]) -> None:
    settings = elsewhere()
    assert preflight_config(settings) == []
    target = target_of(settings)
    attention = target.attention(settings.model, read_model_spec(settings.model.path), cp=1)
    assert (target.device.kind, attention, target.nodes) == ("cuda", "transformer_engine", (8, 8))
    tables = launch_plan(settings, target)
    assert tables["Where it would be placed"] == {
        "node 0": "ranks 0-7 on GPUs 0-7",
        "node 1": "engines 0-1 on GPUs 0-7, 4 each",
    }
    assert tables["What it would run on"]["device"] == "cuda, bfloat16"
    assert tables["What it would run on"]["statistics of logits"] == "triton"
    assert "tp_size=4" in tables["What would be launched"]["SGLang's arguments"]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("runtime.cluster.gpu=H100-8", "did you mean H100-80?"),
        ("runtime.cluster.num_nodes=1", "8 ranks + 2 engines × 4 GPUs = 16 GPUs, 1 node × 8 = 8 GPUs"),
        ("rollout.sglang.tp_size=16", "16 / 8 = 2 nodes of 8"),
        ("model.megatron.num_layers=3", "model.megatron.num_layers is 3"),
        ("reward.function=reward_elsewhere:scoer", "scoer"),
        ("training.optimizer.learning_rate=1", "training.optimizer.learning_rate"),
        ("rollout.sglang.mem_fraction_statc=0.5", "mem_fraction_static"),
    ],
)
def test_config_only_still_finds_problems(elsewhere: Callable[..., Settings], override: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        preflight_config(elsewhere(override))
    assert part in str(caught.value)


@pytest.mark.parametrize("name", ["apply_rope_fusion", "moe_permute_fusion", "moe_grouped_gemm", "gradient_accumulation_fusion"])
def test_kernels_are_not_looked_for_where_a_run_is_planned(elsewhere: Callable[..., Settings], name: str) -> None:
    assert preflight_config(elsewhere(f"model.megatron.{name}=true")) == []
    with pytest.raises(
        UserError, match=rf"model\.megatron\.{name} is True, (which needs a GPU with Transformer Engine|but .* needs False)"
    ):
        preflight_config(elsewhere(f"model.megatron.{name}=true", "runtime.cluster.gpu=A100-80"))


@pytest.mark.parametrize(("gpu", "attention"), [("A100-80", "torch"), ("H100-80", "transformer_engine, fused")])
def test_the_attention_of_the_gpus_is_printed(elsewhere: Callable[..., Settings], gpu: str, attention: str) -> None:
    settings = elsewhere(f"runtime.cluster.gpu={gpu}")
    assert preflight_config(settings) == []
    assert launch_plan(settings, target_of(settings))["What it would run on"]["attention"] == attention
    asked = elsewhere(f"runtime.cluster.gpu={gpu}", "model.attention=transformer_engine")
    if attention == "torch":
        with pytest.raises(UserError, match=r"heads of 16 .* 8\.0; set model\.attention=torch, or .*attention_backend=flash"):
            preflight_config(asked)
    else:
        assert preflight_config(asked) == []


def test_crossing_groups_are_noted(elsewhere: Callable[..., Settings]) -> None:
    (note,) = preflight_config(elsewhere("runtime.cluster.gpus_per_node=3", "rollout.sglang.tp_size=1", "runtime.cluster.num_nodes=4",
                                         "training.topology={num_ranks: 8, tp: 2}"))  # fmt: skip
    assert "1 of 4 tensor parallel groups of tp 2 ranks lie on 2 nodes of 3 GPUs" in note


def test_idle_nodes_are_refused_with_the_numbers_that_fill_them(elsewhere: Callable[..., Settings]) -> None:
    with pytest.raises(UserError, match=r"is 3, but the run fills 2: 1 would stay idle; set runtime.cluster.num_nodes to 2$"):
        preflight_config(elsewhere("runtime.cluster.num_nodes=3"))
    filling = "or fill 4 with training.topology.num_ranks=16 rollout.num_engines=4"
    with pytest.raises(UserError, match=rf"fills 2: 3 would stay idle; .* {filling} runtime.cluster.num_nodes=4, as multiples of 2"):
        preflight_config(elsewhere("runtime.cluster.num_nodes=5"))
    with pytest.raises(UserError, match=rf"{filling}$"):
        preflight_config(elsewhere("runtime.cluster.num_nodes=4"))
    assert preflight_config(elsewhere("runtime.cluster.num_nodes=4", "training.topology.num_ranks=16", "rollout.num_engines=4")) == []


def test_nodes_are_counted_when_they_are_not_set(elsewhere: Callable[..., Settings]) -> None:
    assert target_of(elsewhere("runtime.cluster.num_nodes=null", "training.topology.num_ranks=16")).nodes == (8, 8, 8)


def test_a_run_for_gpus_is_refused_where_there_are_none(elsewhere: Callable[..., Settings]) -> None:
    with pytest.raises(UserError, match=r"runtime.cluster.gpu is H100-80, but this machine has no GPU.*--check --config-only"):
        preflight(elsewhere())


def test_config_only_belongs_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config-only", "run.directory=x"]) == 2
    assert "--config-only was given without --check" in capsys.readouterr().err
