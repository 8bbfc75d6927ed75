"""When copies are told from chance: by drawing, and by the probability of each group computed apart."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout.group_choice import LIMIT, IdenticalGroups
from megatron_rl.types import Group, Ints, Prompt, Sample, StopReason

ROLLOUT = "rollout.function a:b"


def make_group(responses: list[Ints], log_probs: list[float], *, made: list[bool] | None = None) -> Group:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="")
    made = made or [True] * len(log_probs)
    samples = tuple(
        Sample(
            group_id="p",
            index=index,
            prompt=prompt,
            response_ids=ids,
            loss_mask=made,
            rollout_log_probs=log_probs,
            weight_versions=[0 if each else -1 for each in made],
            stop_reason=StopReason.STOP,
        )
        for index, ids in enumerate(responses)
    )
    return Group(id="p", prompt=prompt, samples=samples)


def draw(random: np.random.Generator, *, probability: float, length: int, num_samples: int) -> Group:
    """Samples of a policy that chooses token 0 with `probability` and token 1 else, drawn independently."""
    ids = [(random.random(length) >= probability).astype(np.int64) for _ in range(num_samples)]
    log_probs = np.log(np.where(ids[0] == 0, probability, 1 - probability))
    return make_group(ids, log_probs.tolist())


@pytest.mark.parametrize(
    ("probability", "length", "num_samples"), [(0.5, 1, 2), (0.9, 4, 8), (0.999, 4, 8), (0.99, 2, 2), (1 - 1e-9, 4, 8)]
)
def test_independent_samples_are_never_taken_for_copies(probability: float, length: int, num_samples: int) -> None:
    random, identical = np.random.default_rng(0), IdenticalGroups()
    for _ in range(1000):
        identical.add(draw(random, probability=probability, length=length, num_samples=num_samples))
        identical.check(step=0, rollout=ROLLOUT)


def test_copies_are_found_after_as_many_groups_as_predicted() -> None:
    ids, log_probs = np.array([3, 4, 5]), [-0.7, -0.2, -0.4]
    identical, expected, num_groups = IdenticalGroups(), 0.0, 0
    while expected < LIMIT:
        identical.check(step=0, rollout=ROLLOUT)
        identical.add(make_group([ids] * 4, log_probs))
        num_groups += 1
        expected += math.log(0.5 * (1 + math.exp(3 * 1.3)))
    with pytest.raises(UserError, match=f"step 1: in {num_groups} of the last {num_groups} groups .* one seed in {ROLLOUT}"):
        identical.check(step=0, rollout=ROLLOUT)
    assert num_groups == 11


def test_late_copies_are_found_and_single_samples_say_nothing() -> None:
    random, identical = np.random.default_rng(1), IdenticalGroups()
    for _ in range(500):
        identical.add(draw(random, probability=0.5, length=6, num_samples=4))
    for _ in range(500):
        identical.add(make_group([np.zeros(50, np.int64)], [-1.0] * 50))
    identical.check(step=0, rollout=ROLLOUT)
    for _ in range(3):
        identical.add(make_group([np.arange(12)] * 4, [-1.0] * 12))
    with pytest.raises(UserError, match="all samples are the same"):
        identical.check(step=0, rollout=ROLLOUT)


def test_tokens_that_no_engine_drew_are_no_evidence() -> None:
    identical = IdenticalGroups()
    for _ in range(50):
        identical.add(make_group([np.arange(3)] * 8, [0.0, -50.0, -50.0], made=[True, False, False]))
    identical.check(step=0, rollout=ROLLOUT)


def test_evidence_is_that_of_whole_trajectories() -> None:
    """Four copies of a trajectory of two samples; each is half as likely as the other three are by chance."""
    samples = make_group([np.array([3, 4])] * 8, [math.log(0.5)] * 2).samples
    copies = tuple(replace(sample, trajectory=sample.index // 2) for sample in samples)
    identical = IdenticalGroups()
    identical.add(replace(make_group([], []), samples=copies))
    assert identical._evidence == pytest.approx(np.logaddexp(0.0, 3 * 4 * math.log(2)) - math.log(2))
    # Samples of one trajectory may be the same: only trajectories are drawn independently.
    one = tuple(replace(sample, trajectory=0) for sample in samples)
    alone = IdenticalGroups()
    alone.add(replace(make_group([], []), samples=one))
    assert alone._evidence == 0.0
    different = tuple(replace(sample, response_ids=[3, 5]) if sample.index == 7 else sample for sample in copies)
    alone.add(replace(make_group([], []), samples=different))
    assert alone._evidence == 0.0


def test_a_prefix_shared_by_construction_is_no_evidence() -> None:
    """Branches keep the 40 tokens of their trunk, of 1 nat each, and draw one of 0.1 nats themselves."""
    trunk, *branches = make_group([np.arange(41)] * 4, [-1.0] * 40 + [-0.1]).samples
    branches = [replace(branch, loss_mask=np.arange(41) >= 40) for branch in branches]
    identical = IdenticalGroups()
    identical.add(Group(id="p", prompt=trunk.prompt, samples=(trunk, *branches)))
    assert identical._evidence == pytest.approx(np.logaddexp(0.0, 3 * 0.1) - math.log(2), rel=1e-5)


def test_roles_are_compared_each_with_itself() -> None:
    samples = [make_group([ids] * 4, [-0.7, -0.2]).samples for ids in (np.array([3, 4]), np.array([5, 6]))]
    both = [replace(sample, role=role) for role, of_role in zip("ab", samples, strict=True) for sample in of_role]
    identical = IdenticalGroups()
    identical.add(Group(id="p", prompt=both[0].prompt, samples=tuple(replace(one, index=index) for index, one in enumerate(both))))
    assert identical._evidence == pytest.approx(2 * (np.logaddexp(0.0, 3 * 0.9) - math.log(2)), rel=1e-5)
