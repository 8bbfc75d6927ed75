from collections.abc import Callable

import numpy as np
import pytest

from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, StopReason

MakeGroup = Callable[..., Group]


def make_group(
    group_id: str, *, num_samples: int = 2, version: int = 0, length: int = 5, prompt: Prompt | None = None, scored: bool = False
) -> Group:
    """A group whose every array follows from its arguments, so that what comes back can be compared with a fresh one.

    The second sample has no score, unless all are `scored`.
    """
    generator = np.random.default_rng([*group_id.encode(), version])
    prompt = prompt or Prompt(
        id=group_id, token_ids=generator.integers(0, 99, 4), text=f"text of {group_id}", label="7", metadata={"k": [1]}
    )
    samples = []
    for index in range(num_samples):
        mask = np.arange(length) != 1
        log_probs = np.where(mask, -generator.random(length), np.nan)
        samples.append(
            Sample(
                group_id=group_id,
                index=index,
                prompt=prompt,
                response_ids=generator.integers(0, 150_000, length),
                loss_mask=mask,
                rollout_log_probs=log_probs,
                weight_versions=np.where(mask, version, -1),
                stop_reason=StopReason.LENGTH if index else StopReason.STOP,
                response_text=f"réponse {index}",
                reward=Reward(RewardOutcome.SCORED, 0.1 * index, components={"exact": 1.0})
                if scored or index != 1
                else Reward(RewardOutcome.ERROR, None, "Traceback"),
                metadata={"turns": index},
            )
        )
    return Group(id=group_id, prompt=prompt, samples=tuple(samples))


@pytest.fixture(name="make_group")
def make_group_fixture() -> MakeGroup:
    return make_group
