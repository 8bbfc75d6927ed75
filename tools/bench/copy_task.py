"""Repeat the prompt's digit: a task whose policy is a table, for stub engines with long-tailed answers, and its trainer.

The policy draws every token of an answer from the softmax of the prompt's row, whatever came before. The reward is the share of tokens
that are the prompt's digit, so that an answer's length says nothing about its reward. Both are exact: no kernel, no rounding.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megatron_rl.types import Sample, TrainBatch

DIGITS = "01234567"
RATE, MOST_RATIO = 40.0, 2.0


def share(*, sample: "Sample") -> float:
    """Return the share of the answer's characters that are the label."""
    return sample.response_text.count(str(sample.prompt.label)) / max(1, len(sample.response_text))


def write_rows(path: Path, *, count: int) -> None:
    """Write prompts of one digit, each as often."""
    path.write_text("".join(json.dumps({"prompt": DIGITS[n % 8], "label": DIGITS[n % 8]}) + "\n" for n in range(count)))


class CopyPolicy:
    """Logits [8, 8] of the digits with token `ids`, by the prompt's digit; written to and read from a file in a directory."""

    def __init__(self, ids: list[int], logits: Any = 0.0) -> None:
        self.ids, self.logits = ids, np.zeros((8, 8)) + logits
        self._number = {token: number for number, token in enumerate(ids)}

    @classmethod
    def read(cls, directory: Path) -> "CopyPolicy":
        """Return what `write` has written."""
        return cls(**json.loads((directory / "policy.json").read_text()))

    def write(self, directory: Path) -> None:
        """Write the weights."""
        (directory / "policy.json").write_text(json.dumps({"ids": self.ids, "logits": self.logits.tolist()}))

    @property
    def log_probs(self) -> Any:
        """Return log-probs [8, 8], nats."""
        return self.logits - np.log(np.exp(self.logits).sum(1, keepdims=True))

    @property
    def reward(self) -> float:
        """Return the expected reward, over all prompts and answers."""
        return float(np.exp(np.diag(self.log_probs)).mean())

    def digit_of(self, prompt_ids: list[int]) -> int:
        """Return the number of the prompt's digit."""
        return next(self._number[token] for token in prompt_ids if token in self._number)

    def learn(self, batch: "TrainBatch") -> None:
        """Take a step up the policy gradient: GRPO's advantages, the mean over tokens, ratios to the rollout up to MOST_RATIO."""
        assert batch.rollout_log_probs is not None, "engines gave them"
        gradient, log_probs = np.zeros((8, 8)), self.log_probs
        for number, (begin, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
            same = batch.rewards[batch.group_ids == batch.group_ids[number]]
            advantage = (batch.rewards[number] - same.mean()) / (same.std() + 1e-6)
            digit = self.digit_of(batch.tokens[begin : begin + batch.prompt_lengths[number]].tolist())
            trained = begin + np.flatnonzero(batch.loss_mask[begin:end])
            drawn = np.array([self._number[token] for token in batch.tokens[trained].tolist()], np.int64)
            ratios = np.minimum(np.exp(log_probs[digit, drawn] - batch.rollout_log_probs[trained]), MOST_RATIO)
            by_digit = np.bincount(drawn, advantage * ratios, minlength=8)
            gradient[digit] += by_digit - by_digit.sum() * np.exp(log_probs[digit])
        self.logits = self.logits + RATE * gradient / max(1, int(batch.loss_mask.sum()))
