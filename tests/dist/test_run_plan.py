"""Plans of public models on layouts that no machine here could hold, measured in a process that joins a pretended group."""

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.config.gpus import GIB, GPUS, Gpu
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.planning import check_run, measurement, run_plan
from megatron_rl.planning.records import RunPlan
from megatron_rl.planning.run_plan import plan_layouts
from megatron_rl.planning.search import best_layouts
from megatron_rl.training.topology import Topology

pytestmark = pytest.mark.usefixtures("shared_process")

GPU = GPUS["H100-80"]
CONFIGS = Path(__file__).parents[1] / "data" / "configs"


@pytest.fixture(scope="module")
def measuring_process() -> Iterator[Executor]:
    """One process that measures for all tests, as most of the time of one is spent on imports."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=measurement.prepare) as process:
        yield process


@pytest.fixture
def shared_process(measuring_process: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of this test are measured in the process that all tests share."""

    def measure(jobs: Sequence[measurement.Job]) -> list[measurement.Answer]:
        return list(measuring_process.map(measurement.answer, jobs))

    monkeypatch.setattr(run_plan, "measure", measure)


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def uneven(first: int, last: int) -> dict[str, int]:
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


def planned(spec: Any, *variants: Settings, gpu: str = "H100-80") -> list[RunPlan]:
    """The plans of several settings, all measured by one process."""
    # Vocabularies here need no padding, so the stages of whole layers hold the model and nothing else. A tied head is a copy; the routers'
    # biases are in the checkpoint, but no parameters, as they are not trained by gradients.
    biases = spec.moe.num_experts * (spec.num_layers - spec.moe.num_dense_layers) if spec.moe is not None and spec.moe.expert_bias else 0
    whole = sum(prod(shape) for _, shape in tensor_shapes(spec))
    plans = []
    for settings, plan in zip(variants, plan_layouts(variants, spec, gpu=GPUS[gpu], num_nodes=None), strict=True):
        assert isinstance(plan, RunPlan), plan
        tied = spec.vocab_size * spec.hidden_size if spec.tie_embeddings and len(plan.stages) > 1 else 0
        if settings.training.topology.tp * settings.training.topology.ep == 1:
            assert sum(stage.num_parameters for stage in plan.stages) == whole + tied - biases
        plans.append(plan)
    return plans


def test_a_dense_model_by_hand(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    """Qwen3-4B, tied embeddings, 12 layers, on tp 2 x pp 2 x dp 2: 2 bytes of weights, 4 of gradients, 12 / dp of optimizer each."""
    spec = replace(model_spec("Qwen3-4B"), num_layers=12)
    [plan] = planned(spec, run_settings(num_ranks=8, tp=2, pp=2, sequence_parallel=True, megatron=FULL_RECOMPUTE))
    for stage in plan.stages:
        assert stage.num_layers == 6
        assert stage.parameters == pytest.approx(2 * stage.num_parameters, rel=1e-3)
        assert stage.gradients == pytest.approx(4 * stage.num_parameters, rel=1e-3)
        assert stage.optimizer == pytest.approx(6 * stage.num_parameters, rel=1e-3)
    first, last = plan.stages
    assert (first.in_flight, last.in_flight) == (2, 1)
    # Full recompute keeps each layer's input, half of it on each tensor-parallel rank; the embedding keeps its output before that.
    hidden = 16384 * spec.hidden_size * 2
    assert first.activations == pytest.approx(2 * (6 * hidden // 2 + hidden), rel=0.02)
    # A chunk of the logits and the three float32 planes of the torch path.
    assert first.logits == 0 and last.logits > 1.6 * GIB
    # Two micro-batches in flight weigh more than the logits in chunks.
    assert last.total < first.total < GPUS["H100-80"].memory_bytes and plan.fits
    assert plan.verdict.startswith(f"fits: {plan.peak / GIB:.1f} of 79.6 GiB on the fullest rank (stage 0)")
    assert plan.num_nodes == 2


def test_recompute_and_sequence_parallelism_save_memory(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    spec = replace(model_spec("Qwen3-8B"), num_layers=12)
    plans = planned(
        spec,
        run_settings(num_ranks=8, tp=4, sequence_parallel=True),
        run_settings(num_ranks=8, tp=4, sequence_parallel=True, megatron=FULL_RECOMPUTE),
        run_settings(num_ranks=8, tp=4, megatron=FULL_RECOMPUTE),
    )
    everything, full, unsharded = (plan.stages[0] for plan in plans)
    assert everything.activations > 5 * full.activations
    layer_input = 16384 * spec.hidden_size * 2
    assert unsharded.activations - full.activations == pytest.approx(12 * layer_input * 3 // 4, rel=0.1)
    assert everything.state == full.state == unsharded.state


def test_a_refused_layout_leaves_the_others_their_plans(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    misspelled = run_settings(num_ranks=2, megatron={"recompute_granularty": "full"})
    spec = replace(model_spec("Qwen3-4B"), num_layers=2)
    undivided, unknown, plan = plan_layouts(
        [run_settings(num_ranks=5, pp=5), misspelled, run_settings(num_ranks=2)], spec, gpu=GPUS["H100-80"], num_nodes=None
    )
    assert isinstance(undivided, str) and "num_layers 2 is not divisible by pp·vpp 5" in undivided
    assert isinstance(unknown, str) and "TransformerConfig; did you mean model.megatron.recompute_granularity" in unknown
    assert isinstance(plan, RunPlan) and plan.fits


# Model, GPU, layout, megatron's fields; GiB of the fullest rank and whether it fits. Reserved memory is in it.
LARGE = {
    "Qwen3-30B-A3B on 64": ("Qwen3-30B-A3B", "H100-80", {"num_ranks": 64, "tp": 2, "pp": 2, "ep": 8, "etp": 1}, {}, 25.7, True),
    "Qwen3-235B on 128": (
        "Qwen3-235B-A22B",
        "H100-80",
        {"num_ranks": 128, "tp": 4, "pp": 8, "ep": 16, "etp": 1},
        uneven(11, 11),
        41.8,
        True,
    ),
    "GLM-4.5-Air on 64": ("GLM-4.5-Air", "H100-80", {"num_ranks": 64, "tp": 4, "pp": 2, "ep": 8, "etp": 1}, {}, 67.1, True),
    "GLM-4.5 on 256": ("GLM-4.5", "H100-80", {"num_ranks": 256, "tp": 4, "pp": 4, "ep": 16, "etp": 1}, {}, 62.1, True),
    "DeepSeek-V3 on 512": ("DeepSeek-V3", "H100-80", {"num_ranks": 512, "tp": 8, "pp": 8, "ep": 32, "etp": 1}, uneven(7, 6), 42.9, True),
    "DeepSeek-V3 on 1024": (
        "DeepSeek-V3",
        "H200-141",
        {"num_ranks": 1024, "tp": 8, "pp": 16, "ep": 64, "etp": 1},
        uneven(3, 2),
        23.6,
        True,
    ),
    "Qwen3-235B on 64": ("Qwen3-235B-A22B", "H100-80", {"num_ranks": 64, "tp": 4, "pp": 2, "ep": 16, "etp": 1}, {}, 96.8, False),
}
SMALL = {
    "4B on L4, tp 2": ("Qwen3-4B", "L4-24", {"num_ranks": 8, "tp": 2, "pp": 1, "ep": 1}, {}, 22.7, False),
    "4B on L4": ("Qwen3-4B", "L4-24", {"num_ranks": 8, "tp": 4, "pp": 1, "ep": 1}, {}, 16.4, True),
    "4B on L40S": ("Qwen3-4B", "L40S-48", {"num_ranks": 8, "tp": 1, "pp": 1, "ep": 1}, {}, 36.8, True),
    "8B on L4": ("Qwen3-8B", "L4-24", {"num_ranks": 16, "tp": 8, "pp": 1, "ep": 1}, {}, 16.3, True),
    "8B on A100": ("Qwen3-8B", "A100-40", {"num_ranks": 8, "tp": 4, "pp": 1, "ep": 1}, {}, 28.7, True),
    "8B on L40S": ("Qwen3-8B", "L40S-48", {"num_ranks": 8, "tp": 2, "pp": 1, "ep": 1}, {}, 41.5, True),
    "30B-A3B on L40S": ("Qwen3-30B-A3B", "L40S-48", {"num_ranks": 16, "tp": 4, "pp": 1, "ep": 16, "etp": 1}, {}, 39.5, True),
}
PAGE = LARGE | SMALL


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGE)
def test_layouts_of_the_page(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings], name: str) -> None:
    model, gpu, topology, fields, peak, fits = PAGE[name]
    settings = run_settings(**topology, sequence_parallel=topology["tp"] > 1, megatron={**FULL_RECOMPUTE, **fields}, sglang={"tp_size": 8})
    [plan] = planned(model_spec(model), settings, gpu=gpu)
    print("\n".join(plan.lines()))
    assert plan.peak / GIB == pytest.approx(peak, abs=0.1)
    assert (plan.peak <= plan.gpu.memory_bytes) == fits


def test_the_layout_page_has_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "examples" / "layout" / "README.md").read_text()
    rows = {line for line in page.splitlines() if re.match(r"\| \S+ \| \d+ × ", line)}
    assert rows == {
        f"| {model} | {topology['num_ranks']} × {gpu} | {topology['tp']} | {topology['pp']} | {topology['ep']} | {peak} | "
        f"{'yes' if fits else 'no'} |"
        for model, gpu, topology, _, peak, fits in PAGE.values()
    }


def test_a_model_that_one_gpu_cannot_hold_has_no_layout(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    with pytest.raises(UserError, match=r"no layout of 1 GPU of type H100-80 fits; by estimate the smallest, 1 rank = tp 1") as caught:
        best_layouts(run_settings(), model_spec("Qwen3-8B"), gpu=GPU, num_gpus=1)
    assert "tried on top of each other without success: training.max_tokens_per_micro_batch=8192; or use more GPUs" in str(caught.value)


def test_the_best_layouts_fit_and_come_in_order(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    said: list[str] = []
    spec = replace(model_spec("Qwen3-8B"), num_layers=4)
    found = best_layouts(run_settings(), spec, gpu=GPU, num_gpus=8, keep=1, say=said.append)
    assert said[0].startswith("8 ranks: building layouts 1-4 of ")
    [(settings, plan)] = found
    assert plan.fits and plan.layout == str(Topology.of(settings.training.topology))


def test_a_layout_is_planned_and_what_was_assumed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a settings file the engine gets the GPUs that it needs, and half of all GPUs are for engines."""
    model = str(CONFIGS / "Qwen3-4B.json")
    assert main(["plan", model, "--gpus", "4", "--tp", "2", "--sequence-parallel"]) == 0
    assumed, layout, *lines = capsys.readouterr().out.strip().splitlines()
    assert assumed == (
        "training.topology.num_ranks=2 training.topology.tp=2 training.topology.sequence_parallel=true "
        "model.megatron.recompute_granularity=null rollout.num_engines=2 "
        "training.optimizer.use_distributed_optimizer=true rollout.sglang.tp_size=1"
    )
    ranks = "2 ranks = tp 2 × pp 1 × cp 1 × dp 1 (sequence parallel)"
    assert layout == f"{ranks}, attention transformer_engine, fused"
    assert lines[-1].startswith("fits: ")
    engine = lines[lines.index("SGLang engines, GiB per GPU") + 2].split()
    assert engine[:2] == ["2", "1"]


def test_the_plan_decides_how_a_config_only_check_ends(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model, measured = tmp_path / "elsewhere.yaml", tiny_model(), list[measurement.Answer]()
    (model / "model.safetensors").unlink()
    in_shared_process = run_plan.measure

    def measure_once(jobs: Sequence[measurement.Job]) -> list[measurement.Answer]:
        """What does not depend on the GPU's memory is measured once for both GPUs."""
        measured.extend([] if measured else in_shared_process(jobs))
        return measured

    monkeypatch.setattr(run_plan, "measure", measure_once)
    for tokens, gib, status, part in (
        (4096, 80, 0, "# fits: "),
        (4096, 1, 2, "megatron-rl: does not fit: "),
        (10**9, 80, 2, "1000000000 tokens × cp 1 = 1000000000 tokens is more than the 4194304 that a plan measures"),
    ):
        monkeypatch.setattr(check_run, "find_gpu", lambda name, gib=gib: Gpu(name, (9, 0), gib * GIB))
        config.write_text(
            f"run: {{directory: {tmp_path / 'run'}}}\n"
            f"model: {{path: {model}}}\n"
            "data: {train: /shared/train.jsonl, max_prompt_tokens: 16, prompts_per_step: 4, samples_per_prompt: 2}\n"
            "rollout: {num_engines: 2, sampling: {max_response_tokens: 8}}\n"
            f"training: {{max_tokens_per_micro_batch: {tokens}, topology: {{num_ranks: 8}}, optimizer: {{lr: 1.0e-4}}}}\n"
            "runtime: {cluster: {gpu: H100-80, num_nodes: 2}}\n"
        )
        assert main(["train", str(config), "--check", "--config-only"]) == status
        captured = capsys.readouterr()
        assert part in captured.out + captured.err
        assert captured.out.endswith("nothing was written.\n") == (status == 0)
    assert len(measured) == 1
