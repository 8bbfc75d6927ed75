"""The public names: light to import, all there, the same for a type checker as at run time; and the worked examples that use them."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import megatron_rl

EXAMPLES = Path(__file__).parents[2] / "examples" / "library"
HEAVY = ("torch", "numpy", "pydantic", "megatron", "ray", "sglang", "transformers")
VOCAB_SIZE = 16
"""That of the model which examples/arithmetic/make_task.py makes, and which the examples' README recommends."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hf_model(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("statement", ["import megatron_rl", "import megatron_rl; dir(megatron_rl)", "from megatron_rl import UserError"])
def test_the_import_stays_light(statement: str) -> None:
    code = f"import sys; {statement}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_is_documented() -> None:
    for name in megatron_rl.__all__:
        assert getattr(megatron_rl, name).__doc__, name
        assert name in dir(megatron_rl)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        megatron_rl.Trainr  # noqa: B018


def test_a_type_checker_sees_the_names_of_run_time() -> None:
    tree = ast.parse(Path(megatron_rl.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == megatron_rl._MODULES
    assert list(megatron_rl.__all__) == sorted(typed)


def test_somebody_else_s_loop_trains_with_us_as_its_backend(tiny_model: Callable[..., Path]) -> None:
    backend, path = load("backend"), tiny_model(vocab=VOCAB_SIZE)
    model = hf_model(path)
    settings = {"model": megatron_rl.ModelSettings(path=path), "training": megatron_rl.TrainingSettings(optimizer={"lr": 1e-3})}
    objective = megatron_rl.Objective.of(kl={"coef": 0.01})
    with megatron_rl.Trainer(**settings, objective=objective, temperature=backend.TEMPERATURE) as trainer:
        metrics = backend.iterate(model, trainer, seed=0)
        assert len(metrics) == backend.EPOCHS * backend.MINI_BATCHES
        assert metrics[0]["train/ratio"] == pytest.approx(1, abs=1e-6) and metrics[0]["train/kl_reference"] == pytest.approx(0, abs=1e-6)
        assert all(abs(step["train/ratio"] - 1) > 1e-4 and step["train/kl_reference"] > 1e-4 for step in metrics[1:])
        row = torch.tensor([[3, 9, 4, 4, 14, 7]])
        with torch.no_grad():
            logits = model(row).logits[0, :-1].double() / backend.TEMPERATURE
        theirs = logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        batch = megatron_rl.batch_from_sequences(prompts=row[:, :2].numpy(), responses=row[:, 2:].numpy())
        np.testing.assert_allclose(trainer.log_probs(batch)[1:], theirs.numpy(), rtol=0, atol=1e-5)


def test_the_torchrun_example_draws_tokens_that_the_model_has() -> None:
    tokens = load("grpo_torchrun").make_batch(0, VOCAB_SIZE).tokens
    assert tokens.max() == VOCAB_SIZE - 1 and tokens.min() >= 0


def test_the_objective_alone_lowers_its_loss_as_in_float64(tiny_model: Callable[..., Path]) -> None:
    example = load("objective_alone")
    model = hf_model(tiny_model(vocab=VOCAB_SIZE))
    losses = example.train(model)
    assert losses[-1] < losses[0] - 0.05
    torch.manual_seed(3)
    ids, lengths, rewards = torch.randint(2, VOCAB_SIZE, (16, 9)), torch.randint(6, 10, (16,)), torch.rand(16)
    old = torch.log_softmax(torch.randn(16, 8, VOCAB_SIZE), -1)[..., 0]
    with torch.no_grad():
        got = float(example.loss_of(model, ids, lengths, rewards, old))
        logits = model(ids).logits[:, :-1].double()
    total = count = entropy = 0.0
    for row in range(16):
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4].double()
        advantage = float((rewards[row] - group.mean()) / (group.std() + 1e-6))
        for place in range(example.PROMPT - 1, int(lengths[row]) - 1):
            logs = logits[row, place].log_softmax(-1)
            ratio = float((logs[ids[row, place + 1]] - old[row, place]).exp())
            total -= min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            entropy -= float((logs.exp() * logs).sum())
            count += 1
    assert got == pytest.approx(total / count - 0.001 * entropy / count, rel=1e-5)
