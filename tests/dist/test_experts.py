"""Mixtures of experts: every expert layout gives the log-probs and gradients of transformers, the training of one rank, and its weights.

All layouts of a test run one after the other in one set of processes, because importing megatron-core takes seconds.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import layout_table
import numpy as np
import pytest
import torch
from layout_runs import Outcome, check_ranks_agree, compare, make_batch, make_settings, make_trainer, outcome_of, shards_of, train_batches
from layout_table import EXPERTS, LAYOUTS, OBJECTIVES

TOLERANCE = 1e-5
HALF_DENSE = "glm4_moe, first half dense"
"""A model whose first pipeline stage of two has no experts at all."""
MODELS: dict[str, dict[str, Any]] = {
    **{name: layout_table.MODELS[name] for name in (*EXPERTS, "gpt_oss")},
    HALF_DENSE: {"family": "glm4_moe", "layers": 4, "first_k_dense_replace": 2},
}
Case = tuple[str, str]
"""Names of a model and of a layout."""
GATE: list[Case] = [
    ("qwen3_moe", "dp2"),
    ("qwen3_moe", "ep2"),
    ("qwen3_moe", "ep2 distopt"),
    ("glm4_moe", "pp2"),
    ("glm4_moe", "ep2 all-gather"),
    ("glm4_moe", "ep2 tp2 sp etp1"),
    ("deepseek_v3", "ep2"),
    ("gpt_oss", "ep2 tp2 sp etp1"),
]


def expert_cases(num_ranks: int) -> list[Case]:
    """Every model under every expert layout of so many ranks that leaves whole gradients on each rank."""
    layouts = [
        name for name, layout in LAYOUTS.items() if "ep" in layout.topology and layout.num_ranks == num_ranks and not layout.optimizer
    ]
    return list(itertools.product(EXPERTS, layouts))


TWO_RANKS = [*expert_cases(2), *itertools.product(EXPERTS, ("dp2", "pp2", "tp2 sp")), (HALF_DENSE, "pp2")]
TWO_RANKS += itertools.product(["gpt_oss"], ("dp2", "pp2", "cp2", "ep2"))
FOUR_RANKS = [*expert_cases(4), (HALF_DENSE, "ep2 pp2")]
SFT = OBJECTIVES["sft"].objective
Models = dict[str, str]

slow = pytest.mark.slow


@pytest.fixture
def models(tiny_model: Callable[..., Path]) -> Models:
    """The directory of each model."""
    # transformers gives the embedding of a padding token no gradient.
    return {name: str(tiny_model(name=name, pad_token_id=None, **config)) for name, config in MODELS.items()}


def gradients_of(trainer: Any, settings: Any) -> dict[str, torch.Tensor]:
    """Whole gradients of the step's loss on one batch, as they come out of the trainer's own passes and reductions."""
    from megatron_rl.models.hf_weights import export_hf_weights
    from megatron_rl.models.read_spec import read_model_spec

    trainer.train_shard(shards_of(make_batch(1), settings)[trainer.dp_rank])
    chunks = [chunk.module for chunk in trainer._model.chunks]
    for parameter in itertools.chain.from_iterable(chunk.parameters() for chunk in chunks):
        parameter.data = parameter.main_grad
    return {name: tensor.clone() for name, tensor in export_hf_weights(chunks, read_model_spec(settings.model.path))}


def look(rank: int, world_size: int, init_method: str, models: Models, directory: str, cases: Sequence[Case]) -> dict[Case, Any]:
    """For each case: weights as exported after loading, log-probs, and gradients of a step that changes nothing."""
    from megatron_rl.training.topology import shutdown

    still = {"optimizer": {"lr": 0.0, "clip_grad": 0.0, "weight_decay": 0.0}}
    found = {}
    for number, (model, layout) in enumerate(cases):
        print(f"case {model} {layout}", flush=True)
        settings = make_settings(models[model], Path(directory) / str(number), LAYOUTS[layout], objective=SFT, training=still)
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        weights = {name: tensor.clone() for name, tensor in trainer.weights()}
        log_probs = trainer.log_probs(make_batch(1))
        found[model, layout] = {"weights": weights, "log_probs": log_probs, "gradients": gradients_of(trainer, settings)}
        shutdown()
    return found


def reference(path: Path) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probs [T] of make_batch(1) and gradients of the mean of -log-prob over its masked tokens, by transformers in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    batch = make_batch(1)
    parts = []
    for start, stop in itertools.pairwise(batch.cu_seqlens):
        tokens = torch.from_numpy(batch.tokens[start:stop].copy())
        logits = model(tokens[None]).logits[0].log_softmax(-1)
        parts += [torch.zeros(1, dtype=torch.float64), logits[:-1].gather(1, tokens[1:, None]).squeeze(1)]
    log_probs = torch.cat(parts)
    mask = torch.from_numpy(batch.loss_mask.copy())
    (-log_probs[mask].sum() / mask.sum()).backward()
    return log_probs.detach().numpy(), dict(_original_gradients(model))


def _original_gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and gradients as in files: transformers holds the experts of a layer in one tensor, files those of gpt-oss alone."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        prefix, kind = name.rpartition(".")[::2]
        if not prefix.endswith(".experts") or f"{prefix}.down_proj_bias" in parameters:
            yield name, parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            yield from ((f"{prefix}.{expert}.{part}.weight", piece) for part, piece in zip(parts, gradient.chunk(len(parts)), strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        # Of the distributed optimizer each rank has a part of the gradients only; the training test below covers it.
        pytest.param(2, [case for case in GATE if not LAYOUTS[case[1]].optimizer], id="gate"),
        pytest.param(2, TWO_RANKS, id="2 ranks", marks=slow),
        pytest.param(4, FOUR_RANKS, id="4 ranks", marks=slow),
    ],
)
def test_log_probs_gradients_and_weights_equal_transformers(
    models: Models, run_ranks: Callable[..., list[Any]], tmp_path: Path, num_ranks: int, cases: list[Case]
) -> None:
    from safetensors.torch import load_file

    ranks = run_ranks(look, num_ranks, models, str(tmp_path), cases, timeout_s=60 + 25 * len(cases))
    for model in dict.fromkeys(model for model, _ in cases):
        log_probs, gradients = reference(Path(models[model]))
        original = load_file(Path(models[model]) / "model.safetensors")
        for case, rank in itertools.product([case for case in cases if case[0] == model], range(num_ranks)):
            found, where = ranks[rank][case], f"{case} rank {rank}"
            assert list(found["weights"]) == list(ranks[0][case]["weights"]), f"{where}: names in another order"
            assert found["weights"].keys() == original.keys()
            assert all(torch.equal(found["weights"][name], tensor) for name, tensor in original.items()), f"{where}: round trip"
            np.testing.assert_allclose(found["log_probs"], log_probs, rtol=0, atol=TOLERANCE, err_msg=where)
            assert {name for name in found["gradients"] if not name.endswith("e_score_correction_bias")} == gradients.keys()
            for name, expected in gradients.items():
                error = (found["gradients"][name].double() - expected).abs().max() / expected.abs().max()
                assert error < TOLERANCE, f"{where}: gradient of {name} differs by {error:.1e}"


def settings_of(models: Models, case: Case, directory: Path) -> Any:
    """Settings of a training by GRPO."""
    grpo = OBJECTIVES["grpo"]
    return make_settings(models[case[0]], directory, LAYOUTS[case[1]], objective=grpo.objective, training=grpo.training)


def train(rank: int, world_size: int, init_method: str, models: Models, directory: str, cases: Sequence[Case]) -> dict[Case, Outcome]:
    """Three batches in each case. A layout of fewer ranks than there are is run by the first ranks alone."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for number, case in enumerate(cases):
        if rank >= LAYOUTS[case[1]].num_ranks:
            continue
        print(f"case {case}", flush=True)
        settings = settings_of(models, case, Path(directory) / str(number))
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        before = trainer.log_probs(make_batch(7))
        metrics = train_batches(trainer, settings)
        outcomes[case] = outcome_of(trainer, metrics, log_probs=[before, trainer.log_probs(make_batch(7))])
        shutdown()
    return outcomes


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    # The layout matrix has the other layouts.
    [pytest.param(2, GATE, id="gate"), pytest.param(4, [(HALF_DENSE, "ep2 pp2")], id="no experts on a stage", marks=slow)],
)
def test_training_is_that_of_one_rank(
    models: Models, run_ranks: Callable[..., list[Any]], tmp_path: Path, num_ranks: int, cases: list[Case]
) -> None:
    bases = list(dict.fromkeys((model, "one") for model, _ in cases))
    ranks = run_ranks(train, num_ranks, models, str(tmp_path), [*bases, *cases], timeout_s=60 + 25 * len(cases))
    for case in cases:
        found, base = [rank[case] for rank in ranks], [ranks[0][case[0], "one"]]
        check_ranks_agree(found)
        differences = compare(found, base)
        assert differences.largest <= TOLERANCE, f"{case}: {differences}"
        before, after = base[0]["log_probs"]
        assert np.abs(after - before).max() > 0.01, f"{case} was not trained"


# Model, layout that saves, layout that loads.
RESUMES = [("glm4_moe", "ep2", "ep2")]
WIDE_RESUMES = [
    ("qwen3_moe", "ep2 distopt", "ep2 distopt"),
    ("glm4_moe", "ep2", "ep2 pp2"),
    ("glm4_moe", "ep2 pp2", "ep2 tp2 sp etp2"),
    ("glm4_moe", "ep2 tp2 dp2 sp etp1", "ep2 dp2"),
    (HALF_DENSE, "ep2 pp2", "ep2 pp2"),
    ("gpt_oss", "ep2 pp2", "ep2 tp2 sp etp1"),
]


def resume(
    rank: int, world_size: int, init_method: str, models: Models, directory: str, resumes: Sequence[tuple[str, str, str]]
) -> list[dict[str, Outcome]]:
    """For each case three batches at once, and the third again by a fresh trainer that loads what was saved before it.

    The experts' biases are moved before the save: a checkpoint that lacked them would go on with those of the model directory.
    """
    from megatron_rl.training.topology import shutdown

    outcomes: list[dict[str, Outcome]] = []
    for number, (model, saved_as, loaded_as) in enumerate(resumes):
        path = Path(directory) / str(number)
        outcomes.append({})
        for which, layout in (("straight", saved_as), ("resumed", loaded_as)):
            print(f"case {model} {saved_as} to {loaded_as}: {which}", flush=True)
            if rank < LAYOUTS[layout].num_ranks:
                settings = settings_of(models, (model, layout), path)
                trainer = make_trainer(settings, rank, f"{init_method}-{number}-{which}")
                if which == "straight":
                    move_biases(trainer)
                    train_batches(trainer, settings, [1, 2])
                    trainer.save(path / "checkpoint")
                else:
                    trainer.load(path / "checkpoint")
                metrics = train_batches(trainer, settings, [3])
                outcomes[number][which] = outcome_of(trainer, metrics, log_probs=[trainer.log_probs(make_batch(7))])
                shutdown()
            wait_for_all(world_size, f"{init_method}-{number}-{which}-done", rank)
    return outcomes


def move_biases(trainer: Any) -> None:
    """Add a little to every expert's bias."""
    from megatron_rl.models.hf_weights import expert_biases

    for chunk in trainer._model.chunks:
        for _, bias in expert_biases(chunk):
            bias += torch.linspace(-0.2, 0.2, len(bias))


def wait_for_all(world_size: int, init_method: str, rank: int) -> None:
    """Return when all ranks have come here: the next ones read what others wrote."""
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_ranks", "resumes"), [pytest.param(2, RESUMES, id="gate"), pytest.param(4, WIDE_RESUMES, id="4 ranks", marks=slow)]
)
def test_a_resumed_training_goes_on(
    models: Models, run_ranks: Callable[..., list[Any]], tmp_path: Path, num_ranks: int, resumes: list[tuple[str, str, str]]
) -> None:
    results = run_ranks(resume, num_ranks, models, str(tmp_path), resumes, timeout_s=500)
    for number, case in enumerate(resumes):
        straight, resumed = ([found[number][which] for found in results if which in found[number]] for which in ("straight", "resumed"))
        differences = compare(resumed, straight)
        assert differences.largest <= (0.0 if case[1] == case[2] else TOLERANCE), f"{case}: {differences}"


def keep_in_float32(rank: int, world_size: int, init_method: str, models: Models, directory: str) -> dict[str, torch.dtype]:
    """Dtypes of a bfloat16 model's exported tensors after a step."""
    grpo = OBJECTIVES["grpo"]
    settings = make_settings(
        models["glm4_moe"], Path(directory), LAYOUTS["ep2"], objective=grpo.objective, training=grpo.training, dtype="bfloat16"
    )
    trainer = make_trainer(settings, rank, init_method)
    train_batches(trainer, settings, [1])
    exported = dict(trainer.weights())
    trainer.save_hf(Path(directory) / "saved")
    assert trainer.trained_models()["policy"].chunks[0].config.params_dtype is torch.bfloat16
    return {name: tensor.dtype for name, tensor in exported.items()}


@pytest.mark.timeout(150)
def test_biases_stay_float32_in_a_bfloat16_model(models: Models, run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    dtypes = run_ranks(keep_in_float32, 2, models, str(tmp_path), timeout_s=120)
    original, saved = load_file(Path(models["glm4_moe"]) / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert sum(name.endswith("e_score_correction_bias") for name in dtypes[0]) > 0
    for name, dtype in dtypes[0].items():
        bias = name.endswith("e_score_correction_bias")
        assert dtype is saved[name].dtype is (torch.float32 if bias else torch.bfloat16), name
        # Training leaves the choice among experts to the checkpoint's bias.
        assert not bias or torch.equal(saved[name], original[name])
    assert dtypes[0] == dtypes[1]


def count_messages(rank: int, world_size: int, init_method: str, model: str, directory: str) -> tuple[list[int], dict[str, np.ndarray]]:
    """Numbers in each broadcast of an export under expert parallelism, and what came out."""
    from torch import distributed

    from megatron_rl.models import hf_weights

    trainer = make_trainer(make_settings(model, Path(directory), LAYOUTS["ep2"], objective=SFT), rank, init_method)
    broadcast, sizes = distributed.broadcast, []

    def counted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> None:
        sizes.append(tensor.numel())
        broadcast(tensor, *arguments, **named)

    hf_weights.SENT_BYTES = 80_000
    distributed.broadcast = counted
    weights = {name: tensor.numpy().copy() for name, tensor in trainer.weights()}
    return sizes, weights


def test_the_experts_of_a_rank_are_exported_in_few_messages(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Two layers of eight experts of three tensors are 48 tensors of 3,072 numbers; 20,000 numbers hold two experts, a rank has four."""
    from safetensors.numpy import load_file

    path = tiny_model(family="qwen3_moe", num_experts=8)
    stored = load_file(path / "model.safetensors")
    for sizes, weights in run_ranks(count_messages, 2, str(path), str(tmp_path)):
        assert sizes == [2 * 3 * 3072] * 8
        assert weights.keys() == stored.keys()
        for name, array in stored.items():
            np.testing.assert_array_equal(weights[name], array, err_msg=name)
