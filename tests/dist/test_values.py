"""Log-probs, a critic's values and its gradient under every layout of two ranks, against transformers in float64.

After two batches, so that the head is not zero any more; returns are the rewards themselves with gamma = lambda = 1.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import Outcome, make_batch, make_settings, make_trainer, shards_of, train_batches, weights_of
from layout_table import LAYOUTS

TOLERANCE = 1e-5
CHOSEN = ("dp2", "tp2", "tp2 sp", "cp2", "pp2", "pp2 vpp2")
OBJECTIVE = {"aggregation": "token_mean", "advantage": {"kind": "gae", "gamma": 1.0, "lam": 1.0}}
# Gradients are looked at as they are, so they must not be clipped.
TRAINING = {"optimizer": {"clip_grad": 1e9}, "critic": {"optimizer": {"lr": 2e-3}}}


def values_and_gradients(rank: int, world_size: int, init_method: str, model: str, directory: str) -> dict[str, Outcome]:
    """Under each layout: weights after two batches, log-probs and values of a third, and the critic's gradient on it."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for name in CHOSEN:
        settings = make_settings(model, Path(directory) / name, LAYOUTS[name], objective=OBJECTIVE, training=TRAINING)
        trainer = make_trainer(settings, rank, f"{init_method}-{name}")
        train_batches(trainer, settings, [1, 2])
        weights, batch = weights_of(trainer), make_batch(3)
        log_probs = trainer.log_probs(batch)
        micro_batches = trainer._micro_batches.of_parts(batch, [np.array([row]) for row in range(batch.num_sequences)])
        values = trainer.critic.state_values(micro_batches, num_tokens=len(batch.tokens))
        trainer.train_shard(shards_of(batch, settings)[trainer.dp_rank])
        for chunk in trainer.critic.model.chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.main_grad
        gradient = {key: array for key, array in weights_of(trainer).items() if key.startswith("critic")}
        outcomes[name] = {"weights": weights, "log_probs": log_probs, "values": values, "gradient": gradient}
        shutdown()
    return outcomes


def reference(path: Path, weights: dict[str, np.ndarray]) -> Outcome:
    """The same of transformers models with these weights, in float64, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    batch, policy = make_batch(3), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    critic = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).model
    # A padding token has no gradient there, and is a token like any other here.
    critic.embed_tokens.padding_idx = None
    load(policy, weights, "policy ")
    load(critic, weights, "critic model.")
    head = torch.from_numpy(weights["critic head"]).double().requires_grad_()
    log_probs, values, loss = np.zeros(len(batch.tokens)), [], torch.zeros((), dtype=torch.float64)
    for start, end, reward in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.rewards, strict=False):
        tokens = torch.from_numpy(batch.tokens[start:end].copy())
        predicted = policy(tokens[None]).logits[0, :-1].log_softmax(-1)
        log_probs[start + 1 : end] = predicted.gather(1, tokens[1:, None]).detach()[:, 0].numpy()
        values.append(critic(tokens[None]).last_hidden_state[0] @ head[0])
        trained = torch.from_numpy(batch.loss_mask[start + 1 : end].copy())
        loss = loss + 0.5 * (values[-1][:-1] - reward).square()[trained].sum()
    (loss / batch.loss_mask.sum()).backward()
    gradient = {f"critic model.{name}": parameter.grad.numpy() for name, parameter in critic.named_parameters()}
    return {
        "log_probs": log_probs,
        "values": torch.cat(values).detach().numpy(),
        "gradient": {**gradient, "critic head": head.grad.numpy()},
    }


def load(model: torch.nn.Module, weights: dict[str, np.ndarray], prefix: str) -> None:
    """Give `model` the weights whose names start with `prefix`; each of its parameters has one, tied ones apart."""
    parameters = dict(model.named_parameters())
    own = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
    assert parameters.keys() == own.keys()
    with torch.no_grad():
        for name, array in own.items():
            parameters[name].copy_(torch.from_numpy(array))


def test_every_layout_equals_transformers(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny_model(layers=4)
    ranks = run_ranks(values_and_gradients, 2, str(model), str(tmp_path), timeout_s=180)
    for name in CHOSEN:
        want = reference(model, {key: array for rank in ranks for key, array in rank[name]["weights"].items()})
        assert np.abs(want["values"]).max() > 0.01, "the head moved"
        gradients: dict[str, np.ndarray] = {}
        for outcome in (rank[name] for rank in ranks):
            np.testing.assert_allclose(outcome["log_probs"], want["log_probs"], rtol=0, atol=TOLERANCE, err_msg=name)
            np.testing.assert_allclose(outcome["values"], want["values"], rtol=0, atol=TOLERANCE, err_msg=name)
            gradients |= outcome["gradient"]
        assert gradients.keys() == want["gradient"].keys()
        for key, array in want["gradient"].items():
            error = np.abs(gradients[key] - array).max() / np.abs(array).max()
            assert error < TOLERANCE, f"{name}: gradient of {key} differs by {error:.1e}"
