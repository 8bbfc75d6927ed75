"""The order in which finished groups are trained on: how many are in the making, and which ones a step waits for."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator

from megatron_rl.algorithms.choices import Choice, doc

Quota = tuple[int, Collection[str]]
"""A number of groups, and the ids of the groups that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder(Choice):
    """The order of prompts: exact, and resumable to the bit."""

    kind: Literal["in_order"] = "in_order"
    partial: ClassVar[bool] = False

    def ahead(self, per_step: int, *, max_staleness: int, steps_left: int) -> int:
        """Return the number of groups to have in the making besides those of the next step."""
        return min(max_staleness, steps_left) * per_step

    def quotas(self, begun: Mapping[str, float], *, count: int, per_step: int, max_staleness: int, step: int) -> list[Quota]:
        """Return what the next `count` trained groups have to contain: so many of these, each set within the next.

        `begun` has the waiting groups in the order of prompts, each with the oldest version that a
        token may have. The next step is the one after `step` steps; each trains `per_step` groups.
        """
        return [(count, list(begun)[:count])]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstComplete(Choice):
    """The order of completion: a step leaves the slowest groups to later steps; none is lost."""

    kind: Literal["first_complete"] = "first_complete"
    oversampling: float = doc(
        "Groups in the making per group of a step; at most 1 + rollout.max_staleness unless partial.", 1.5, gt=1, le=64
    )
    partial: bool = doc(
        "Leave groups to any later step: tokens older than rollout.max_staleness become context, which is not trained on. With "
        "max_staleness 0 or on shared devices a step's end aborts the requests, and the next step continues them.",
        False,
    )

    def ahead(self, per_step: int, *, max_staleness: int, steps_left: int) -> int:
        """Do as `InOrder.ahead`."""
        # 10 times 1.1 is above 11 by rounding.
        return min(math.ceil(self.oversampling * per_step - 1e-6) - per_step, steps_left * per_step)

    def quotas(self, begun: Mapping[str, float], *, count: int, per_step: int, max_staleness: int, step: int) -> list[Quota]:
        """Do as `InOrder.quotas`: so many groups that later steps can take the rest in time.

        A group begun at version v is trained on by the step after v + max_staleness steps. The next
        j steps after this one take j * per_step groups. So of N groups due by then, this step takes
        N - j * per_step.
        """
        found: list[Quota] = []
        for later in range(0 if self.partial else max_staleness + 1):
            due = [group_id for group_id, version in begun.items() if version + max_staleness <= step + later]
            if len(due) > later * per_step:
                found.append((min(len(due) - later * per_step, count), due))
        return found


Order = Annotated[InOrder | FirstComplete, Discriminator("kind")]
