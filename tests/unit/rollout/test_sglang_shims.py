"""What takes the place of SGLang's kernels where there is no GPU."""

import math

import pytest
import torch

from megatron_rl.rollout.sglang_shims import add_gated


def test_the_shared_experts_are_weighed_token_by_token() -> None:
    hidden, shared, before = (torch.randn(3, 4) for _ in range(3))
    gate, output = torch.randn(4), before.clone()
    add_gated(hidden, gate, shared, output)
    for token in range(3):
        weight = 1 / (1 + math.exp(-sum(hidden[token, channel].item() * gate[channel].item() for channel in range(4))))
        for channel in range(4):
            want = before[token, channel].item() + weight * shared[token, channel].item()
            assert output[token, channel].item() == pytest.approx(want, abs=1e-6)
