"""Somebody's own RL loop (their generation, reward, advantages and schedule of mini-batches) with our Trainer as its backend.

python examples/library/backend.py MODEL_DIRECTORY
"""

import dataclasses
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_rl import ModelSettings, Objective, Trainer, TrainingSettings, batch_from_sequences

PROMPTS, SAMPLES, RESPONSE_TOKENS, EPOCHS, MINI_BATCHES = 4, 4, 8, 2, 2
TEMPERATURE = 0.9


def generate(model: PreTrainedModel, prompts: torch.Tensor) -> list[list[int]]:
    """Their generator: SAMPLES responses to each of `prompts` [PROMPTS, P], up to the end-of-sequence token or the budget."""
    options = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": RESPONSE_TOKENS, "pad_token_id": 0}
    end = model.config.eos_token_id
    with torch.no_grad():
        made = model.generate(prompts, attention_mask=torch.ones_like(prompts), num_return_sequences=SAMPLES, eos_token_id=end, **options)
    rows = made[:, prompts.shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def leave_one_out(rewards: list[float]) -> list[float]:
    """Their advantages: each reward above the mean of the other samples of its prompt."""
    groups = np.reshape(rewards, (PROMPTS, SAMPLES))
    return list(((groups - groups.mean(1, keepdims=True)) * SAMPLES / (SAMPLES - 1)).flatten())


def iterate(model: PreTrainedModel, trainer: Trainer, seed: int) -> list[dict[str, float]]:
    """One iteration of their loop; the metrics of its optimizer steps. Afterwards `model` has the trainer's weights."""
    torch.manual_seed(seed)
    prompts = torch.randint(2, model.config.vocab_size, (PROMPTS, 5))
    responses = generate(model, prompts)
    rewards = [float(np.mean([token % 2 for token in response])) for response in responses]
    batch = batch_from_sequences(
        prompts=[prompts[row // SAMPLES].numpy() for row in range(len(responses))], responses=responses, advantages=leave_one_out(rewards)
    )
    # Before the first step: what the ratio of all later ones is to, and what the KL is to.
    old, reference = trainer.log_probs(batch), trainer.log_probs(batch, reference=True)
    batch = dataclasses.replace(batch, old_log_probs=old, ref_log_probs=reference)
    metrics = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(batch.num_sequences).chunk(MINI_BATCHES):
            metrics.append(trainer.forward_backward(batch.select(rows.numpy())) | trainer.optimizer_step())
    model.load_state_dict(dict(trainer.weights()), strict=False)
    return metrics


def main() -> None:
    """Three iterations, one line for each of their optimizer steps."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    settings = {"model": ModelSettings(path=sys.argv[1]), "training": TrainingSettings(optimizer={"lr": 1e-3})}
    with Trainer(**settings, objective=Objective.of(kl={"coef": 0.01}), temperature=TEMPERATURE) as trainer:
        for seed in range(3):
            for metrics in iterate(model, trainer, seed):
                print(" ".join(f"{name} {metrics[f'train/{name}']:.4f}" for name in ("loss", "ratio", "kl_reference", "grad_norm")))


if __name__ == "__main__":
    main()
