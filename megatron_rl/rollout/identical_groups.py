"""Whether the trajectories of a group are drawn independently: groups in which all are the same, more often than chance allows."""

import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.types import Group, Sample, trajectories

LIMIT = math.log(1e15)
"""Nats of evidence at which chance is ruled out: one wrong alarm in 10^15 groups at most."""


class IdenticalGroups:
    """Collects evidence over the groups of a run that samples of one prompt are copies of each other. Legend: n trajectories of a group.

    Let y be the first trajectory of a group and p(y) its probability, which its rollout log-probs state. Drawn independently, the other
    n - 1 are all equal to y with probability q = p(y)^(n - 1), whatever the lengths and the entropy. With X = 1 for such a group and
    X = 0 for others, the factor (1 + X / q) / 2 has the expectation 1 given y. So the product of the factors of the groups since
    any given one is a martingale, and by Ville's inequality it ever reaches 1 / a with probability a at most. The evidence is the
    logarithm of that product, begun anew whenever it falls below 0 (the sum of CUSUM), so that a long healthy start hides nothing;
    beginning at each of N groups makes the probability of a wrong alarm N a at most.

    A policy that has converged is no alarm: there q is close to 1, and an identical group is no evidence. A seed that all samples share
    is found in the first groups: 8 equal samples of 5 tokens with probability 1/2 each give 24 nats.
    """

    def __init__(self) -> None:
        self._evidence = 0.0
        self._num_identical = self._num_groups = 0

    def add(self, group: Group) -> None:
        """Take the evidence of a group whose samples were drawn at a temperature above 0. One trajectory says nothing."""
        attempts = trajectories(group.samples)
        if len(attempts) < 2:
            return
        gain = -math.log(2)
        if len({tuple(sample.response_ids.tobytes() for sample in attempt) for attempt in attempts}) == 1:
            self._num_identical += 1
            gain += float(np.logaddexp(0.0, (len(attempts) - 1) * _surprise(attempts[0])))
        self._num_groups += 1
        self._evidence += gain
        if self._evidence <= 0:
            self._evidence, self._num_identical, self._num_groups = 0.0, 0, 0

    def problem(self) -> str | None:
        """What was seen, as the start of a sentence, when chance does not explain it."""
        if self._evidence < LIMIT:
            return None
        return (
            f"in {self._num_identical} of the last {self._num_groups} groups all samples are the same tokens, which chance explains with "
            f"a probability of 1e-{int(self._evidence / math.log(10))} by their own log-probs, so they were not drawn independently"
        )


def _surprise(attempt: Sequence[Sample]) -> float:
    """-log p of a trajectory's tokens that an engine made, in nats; what else is in its responses only makes chance less likely."""
    return max(0.0, -sum(float(part.rollout_log_probs[part.weight_versions >= 0].sum(dtype=np.float64)) for part in attempt))
