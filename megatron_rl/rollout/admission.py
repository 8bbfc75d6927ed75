"""Which groups may be generated already: the arithmetic by which no token is ever too old to train on.

Groups are trained on in the order of their prompts, so how many come before a group says by which step at the latest it is trained on.
Legend: step s trains the weights of version s into those of version s + 1; k is the staleness allowed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`groups_per_step` groups with a signal make a step; a token is at most `max_staleness` versions old; `num_steps` steps in all."""

    groups_per_step: int
    max_staleness: int
    num_steps: int

    def num_admitted(self, *, step: int, missing: int, version: int) -> int:
        """How many groups not trained on yet, counted in their order, may be generated while the engines serve `version` or later.

        `step` is the first that has not got all its groups; it takes the first `missing` of them, and every `groups_per_step` behind those
        are one step later, or earlier where some are filtered out before them. So the last group admitted is trained on at step
        `version` + k at the latest, while all its tokens have `version` or a later one. With k = 0 nothing is made ahead.
        """
        last_step = min(version + self.max_staleness, self.num_steps - 1)
        return missing + (last_step - step) * self.groups_per_step if last_step >= step else 0

    def oldest_version(self, step: int) -> int:
        """The oldest weights whose tokens `step` may train on."""
        return step - self.max_staleness
