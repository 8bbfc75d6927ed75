"""The Trainer as a library on several ranks: the same whole batch on each of them, the same numbers as on one."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "library" / "grpo_torchrun.py"
RunRanks = Callable[..., list[Any]]


def torchrun(num_ranks: int, *arguments: str) -> str:
    """What the example prints under torchrun; nothing of it is left behind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), str(EXAMPLE), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[2])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    return printed


@pytest.mark.slow
def test_the_torchrun_example_is_equal_on_one_and_two_ranks(tiny_model: Callable[..., Path]) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40
    path = tiny_model(vocab=16)
    alone, together = ([json.loads(line) for line in torchrun(number, str(path)).splitlines()] for number in (1, 2))
    assert len(alone) == len(together) == 2
    for want, got in zip(alone, together, strict=True):
        del want["train/num_micro_batches"], got["train/num_micro_batches"]
        assert got == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in want.items()}
        assert want["train/grad_norm"] > 0.1 and want["train/skipped_steps"] == 0
    assert alone[1]["train/kl_reference"] > 1e-3


def make_batch(seed: int) -> Any:
    from megatron_rl import batch_from_sequences

    random = np.random.default_rng(seed)
    prompts = [prompt for prompt in random.integers(2, 32, (3, 4)) for _ in range(3)]
    responses = [random.integers(2, 32, length) for length in random.integers(1, 14, 9)]
    return batch_from_sequences(prompts=prompts, responses=responses, rewards=random.random(9))


def run(rank: int, world_size: int, init_method: str, model: str, topologies: list[dict[str, int]]) -> list[dict[str, Any]]:
    """For each layout everything that the trainer says: of whole steps, of steps in halves, and of tokens."""
    from megatron_rl import Meeting, ModelSettings, Objective, TopologySettings, Trainer, TrainingSettings, UserError

    ppo = Objective.of(kl={"coef": 0.1}, advantage={"kind": "gae", "lam": 0.9})
    said = []
    for number, topology in enumerate(topologies):
        training = TrainingSettings(
            topology=TopologySettings(num_ranks=world_size, **topology),
            optimizer={"lr": 1e-3, "adam_eps": 1e-6},
            max_tokens_per_micro_batch=24,
            optimizer_steps_per_batch=2,
        )
        meeting = Meeting(rank=rank, init_method=f"{init_method}-{number}")
        with Trainer(model=ModelSettings(path=model, dtype="float32"), training=training, objective=ppo, meeting=meeting) as trainer:
            batch = make_batch(0)
            steps = trainer.train(batch)
            log_probs, values = trainer.log_probs(batch), trainer.values(batch)
            np.testing.assert_allclose(log_probs, trainer.own_log_probs(batch, temperature=1.0), rtol=0, atol=1e-5)
            kept = dataclasses.replace(batch, old_log_probs=log_probs, values=values)
            for rows in (np.arange(0, 5), np.arange(5, 9)):
                steps.append(trainer.forward_backward(kept.select(rows)) | trainer.optimizer_step())
            weights = {name: tensor.numpy().copy() for name, tensor in trainer.weights()}
            received = [name for name, _ in trainer.weights(receivers=(0,))]
            refusals = []
            for call in (trainer.train, trainer.forward_backward, trainer.log_probs, trainer.values):
                try:
                    call(make_batch(rank))
                except UserError as error:
                    refusals.append(str(error))
        said.append(
            {"steps": steps, "log_probs": log_probs, "values": values, "weights": weights, "received": received, "refusals": refusals}
        )
    return said


def test_ranks_with_the_whole_batch_get_the_numbers_of_one_rank(run_ranks: RunRanks, tiny_model: Callable[..., Path]) -> None:
    path, topologies = str(tiny_model()), [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}]
    ((alone,),) = run_ranks(run, 1, path, [{}], timeout_s=120)
    assert alone["refusals"] == []
    ranks = run_ranks(run, 2, path, topologies, timeout_s=240)
    for number, topology in enumerate(topologies):
        first, second = (rank[number] for rank in ranks)
        assert first["steps"] == second["steps"], topology
        assert len(first["refusals"]) == len(second["refusals"]) == 4, topology
        assert all("ranks were given different batches" in sentence for sentence in first["refusals"] + second["refusals"])
        for want, got in zip(alone["steps"], first["steps"], strict=True):
            compared = want.keys() - {"train/num_micro_batches"}
            assert got.keys() == want.keys()
            assert {name: got[name] for name in compared} == {name: pytest.approx(want[name], rel=1e-5, abs=1e-5) for name in compared}, (
                topology
            )
        for name in ("log_probs", "values"):
            np.testing.assert_array_equal(first[name], second[name])
            responses = make_batch(0).loss_mask
            np.testing.assert_allclose(first[name][responses], alone[name][responses], rtol=0, atol=2e-5)
        assert first["received"] == list(first["weights"])
        # The other rank has a part of the model, or a copy of all of it.
        assert second["received"] == (first["received"] if topology in ({"tp": 2}, {"pp": 2}) else []), topology
        for name, tensor in first["weights"].items():
            assert np.linalg.norm(tensor - alone["weights"][name]) <= 1e-5 * np.linalg.norm(tensor), (topology, name)
