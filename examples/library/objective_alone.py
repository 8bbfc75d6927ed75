"""The objective alone: a plain transformers and torch loop that takes its advantages and its loss from megatron_rl.

python examples/library/objective_alone.py MODEL_DIRECTORY
"""

import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_rl import LossInputs, Objective, compute_loss, group_advantages, token_statistics

GROUPS, SAMPLES, PROMPT, LENGTH = 4, 4, 5, 12
OBJECTIVE = Objective.of(aggregation="token_mean", policy_loss={"high": 0.28}, entropy={"coef": 0.001})


def loss_of(model: PreTrainedModel, ids: torch.Tensor, lengths: torch.Tensor, rewards: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The loss, a scalar, of padded sequences `ids` [B, L] of `lengths` [B] tokens; `old` [B, L - 1]: log-probs before the first step."""
    logits = model(ids).logits[:, :-1]
    vocab_size, targets = logits.shape[-1], ids[:, 1:]
    statistics = token_statistics(logits.flatten(0, 1), targets.flatten(), temperature=1.0, vocab_size=vocab_size)
    mask = (torch.arange(1, ids.shape[1]) >= PROMPT) & (torch.arange(1, ids.shape[1]) < lengths[:, None])
    tokens = mask.sum(1)
    groups = torch.arange(len(ids)) // SAMPLES
    advantages = group_advantages(OBJECTIVE.advantage, rewards=rewards, group_ids=groups, lengths=tokens)
    inputs = LossInputs(
        loss_mask=mask.flatten(),
        sequence_index=torch.arange(len(ids)).repeat_interleave(mask.shape[1]),
        sequence_tokens=tokens,
        log_probs=statistics.log_prob,
        entropy=statistics.entropy,
        old_log_probs=old.flatten(),
        advantages=advantages.float().repeat_interleave(mask.shape[1]),
    )
    counts = {"num_tokens": int(mask.sum()), "num_trajectories": int((tokens > 0).sum())}
    return compute_loss(OBJECTIVE, inputs, **counts).loss


def train(model: PreTrainedModel, *, steps: int = 4) -> list[float]:
    """Optimizer steps on one random batch; the loss of each."""
    torch.manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (GROUPS * SAMPLES, LENGTH))
    lengths = torch.randint(PROMPT + 1, LENGTH + 1, (len(ids),))
    rewards = (ids % 2).float().mean(1)
    with torch.no_grad():
        old = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        loss = loss_of(model, ids, lengths, rewards, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)))
