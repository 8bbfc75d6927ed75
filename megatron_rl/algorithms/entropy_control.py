"""Controllers that hold the policy's entropy: of the bonus coefficient by three published rules, and of the upper clip distance.

Pure functions from one state to the next. They are called once per optimizer step with the global mean entropy per token of that
step, in nats, never by an evaluation; all micro-batches of a step use the same value.

The coefficient moves by +-delta within [min, max] and is applied only while the entropy is low (Skywork-OR1, arXiv 2505.22312, section
3.2.5). `trl`: applies when the last step's entropy <= target, rises at equality, closed before the first step. `skywork`: applies when
the last < target, falls at equality, open before the first step. `paper`: applies when the coming step's own entropy <= target, stays
at equality. `clip_high` integrates on the upper clip distance: k <- clip(k + delta sign(target - entropy), min, max), and ratios are
clipped at 1 + clip_high + k (MAI-Thinking-1, which has (1 - 0.6)^-1 + k as bound, delta 0.25, max 2.5 and target 0.3).
"""

import math
from dataclasses import dataclass

from megatron_rl.algorithms.objective import EntropyControl, EntropyRule


@dataclass(frozen=True, slots=True)
class EntropyState:
    """What the controller of a `rule` knows between two steps: the `value` that it moves, and the last step's entropy, None before it."""

    rule: EntropyRule
    value: float
    last_entropy: float | None = None


def first_entropy_state(control: EntropyControl) -> EntropyState:
    """The state before the first step."""
    return EntropyState(control.rule, control.arguments().initial)


def applied_value(control: EntropyControl, state: EntropyState, entropy: float | None = None) -> float:
    """What the coming step applies: the entropy coefficient, 0 while its gate is closed, or for clip_high what the distance grows by.

    `entropy`, nats per token, is that of the policy before the step. Raises ValueError when the paper's rule gets none.
    """
    return state.value if control.rule == "clip_high" or _gate_is_open(control, state.last_entropy, entropy) else 0.0


def _gate_is_open(control: EntropyControl, last: float | None, coming: float | None) -> bool:
    if control.rule == "trl":
        return last is not None and last <= control.target
    if control.rule == "skywork":
        return last is None or last < control.target
    if coming is None:
        raise ValueError("EntropyControl.rule paper got no entropy of the coming step, needs it from the pass before the step")
    return coming <= control.target


def updated_entropy_state(control: EntropyControl, state: EntropyState, entropy: float) -> EntropyState:
    """The state after a step of this global mean entropy, nats per token. Raises ValueError when it is not finite."""
    if not math.isfinite(entropy):
        raise ValueError(
            f"updated_entropy_state got entropy {entropy}, needs a finite number of nats per token; skip the update of such a step"
        )
    args = control.arguments()
    if entropy == control.target:
        sign = {"trl": 1.0, "skywork": -1.0, "paper": 0.0, "clip_high": 0.0}[control.rule]
    else:
        sign = math.copysign(1.0, control.target - entropy)
    return EntropyState(control.rule, min(max(state.value + sign * args.delta, args.min), args.max), entropy)
