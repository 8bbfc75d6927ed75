"""Random optimizer steps for the objective's tests."""

from collections.abc import Callable, Sequence

import pytest
import torch
from emulation import Step

MakeStep = Callable[..., Step]


def random_step(
    lengths: Sequence[int], *, seed: int, hole_share: float = 0.3, masked_rows: Sequence[int] = (), spread: float = 0.4
) -> Step:
    """A float64 step of sequences of `lengths` with holes in the mask; rows in `masked_rows` have no trainable token."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal() -> torch.Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64)

    mask = torch.rand(total, generator=generator) >= hole_share
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for row in masked_rows:
        mask[starts[row] : starts[row + 1]] = False
    base = -normal().abs() - 0.1
    advantages = torch.cat([torch.randn(1, generator=generator, dtype=torch.float64).expand(n) for n in lengths]) if lengths else normal()
    tokens = {
        "log_probs": (base + spread * normal()).clamp(max=-0.01),
        "old_log_probs": (base + spread * normal()).clamp(max=-0.01),
        "rollout_log_probs": base + spread * normal(),
        "ref_log_probs": base + spread * normal(),
        "entropy": normal().abs(),
        "varentropy": normal().abs(),
        "advantages": advantages,
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "token_keys": torch.arange(total),
        "kl_mask": torch.rand(total, generator=generator) >= 0.2,
    }
    return Step(lengths=tuple(lengths), loss_mask=mask, tokens=tokens)


@pytest.fixture
def make_step() -> MakeStep:
    return random_step
