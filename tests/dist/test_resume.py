"""Two batches, a checkpoint and two more are four batches: bit for bit under the same layout, the same numbers under another."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import Outcome, compare, make_batch, make_settings, make_trainer, outcome_of, train_batches
from layout_table import LAYOUTS, OBJECTIVES
from safetensors.torch import load_file

from megatron_rl.checkpoints.stored_weights import open_weights
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.convert.verification import check_padding

TOLERANCE = 1e-5
# Objective, layout that saves, layout that loads.
RESUMES = {
    "dp2": ("ppo", "dp2", "dp2"),
    "dp2 distopt": ("ppo", "dp2 distopt", "dp2 distopt"),
    "dp2 distopt overlap": ("grpo", "dp2 distopt overlap", "dp2 distopt overlap"),
    "pp2 vpp2": ("ppo", "pp2 vpp2", "pp2 vpp2"),
    "tp2 sp": ("ppo", "tp2 sp", "tp2 sp"),
    "dp2 distopt to tp2 distopt": ("grpo", "dp2 distopt", "tp2 distopt"),
    "tp2 to pp2": ("ppo", "tp2", "pp2"),
    "pp2 vpp2 dp2 distopt overlap": ("ppo", "pp2 vpp2 dp2 distopt overlap", "pp2 vpp2 dp2 distopt overlap"),
    "pp2 vpp2 dp2 distopt overlap to dp2 cp2 distopt": ("grpo", "pp2 vpp2 dp2 distopt overlap", "dp2 cp2 distopt"),
    "tp2 dp2 sp distopt to dp2 cp2 distopt": ("ppo", "tp2 dp2 sp distopt", "dp2 cp2 distopt"),
}


def resumes_of(num_ranks: int) -> list[str]:
    return [name for name, (_, saved_as, _) in RESUMES.items() if LAYOUTS[saved_as].num_ranks == num_ranks]


def resume(rank: int, world_size: int, init_method: str, model: str, directory: str) -> dict[str, dict[str, Outcome]]:
    """For each case four batches at once, and the last two again by a fresh trainer that loads what was saved between."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for name in resumes_of(world_size):
        objective, saved_as, loaded_as = RESUMES[name]
        print(f"case {name}", flush=True)
        path, training = Path(directory) / name, OBJECTIVES[objective]
        settings, later = (
            make_settings(model, path, LAYOUTS[layout], objective=training.objective, training=training.training)
            for layout in (saved_as, loaded_as)
        )
        straight = make_trainer(settings, rank, f"{init_method}-{name}-straight")
        train_batches(straight, settings, [1, 2])
        straight.save(path / "megatron")
        straight.save_hf(path / "hf")
        metrics = train_batches(straight, settings, [3, 4])
        want = outcome_of(straight, metrics, log_probs=[straight.log_probs(make_batch(7))])
        shutdown()
        resumed = make_trainer(later, rank, f"{init_method}-{name}-resumed")
        resumed.load(path / "megatron")
        metrics = train_batches(resumed, later, [3, 4])
        resumed.save(Path(directory) / f"{name} later")
        outcomes[name] = {"straight": want, "resumed": outcome_of(resumed, metrics, log_probs=[resumed.log_probs(make_batch(7))])}
        shutdown()
    return outcomes


def assert_converted_is_exported(step: Path, target: Path) -> None:
    """The parts that several ranks saved beside their optimizer's are, as a Hugging Face directory, what the ranks themselves exported."""
    convert(step, target, Options())
    converted, exported = (load_file(path / "model.safetensors") for path in (target, step / "hf"))
    assert converted.keys() == exported.keys(), step
    for tensor_name, tensor in exported.items():
        assert converted[tensor_name].dtype == tensor.dtype and torch.equal(converted[tensor_name], tensor), (step, tensor_name)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(
    num_ranks: int, run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    results = run_ranks(resume, num_ranks, str(tiny_model(layers=4, vocab=33)), str(tmp_path), timeout_s=360)
    for name in resumes_of(num_ranks):
        _, saved_as, loaded_as = RESUMES[name]
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["hf", "megatron"]
        assert_converted_is_exported(tmp_path / name, tmp_path / f"{name} converted")
        for state in (tmp_path / name / "megatron", tmp_path / f"{name} later"):
            with closing(open_weights(state, config=tmp_path / name / "hf")) as saved:
                check_padding(saved)
        straight, resumed = ([result[name][which] for result in results] for which in ("straight", "resumed"))
        differences = compare(resumed, straight)
        if saved_as != loaded_as:
            assert differences.largest <= TOLERANCE, f"{name}: {differences}"
            continue
        for got, want in zip(resumed, straight, strict=True):
            assert got["metrics"] == want["metrics"], name
            for key, array in want["weights"].items():
                np.testing.assert_array_equal(got["weights"][key], array, err_msg=f"{name} {key}")
