"""Check the objective module against a framework-neutral vector file.

    python tools/check_vectors.py tests/data/objective.json [--layouts]

Prints a table (case, quantity, got, expected, difference) and exits 1 on a miss, 2 on a malformed file. `--layouts` also runs
every policy case under random splits into micro-batches, data- and context-parallel ranks and reports the worst spread.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_emulation import Step, StepResult, random_layouts, run_step, trivial_layout
from vector_format import (
    FORMAT,
    AdvantageCase,
    Case,
    EntropyCase,
    EntropyControllerCase,
    GAECase,
    KLControllerCase,
    MalformedError,
    PolicyCase,
    SequenceRow,
    read_file,
)

from megatron_rl.algorithms.advantage import group_advantages
from megatron_rl.algorithms.entropy import EntropyState
from megatron_rl.algorithms.head_statistics import token_statistics
from megatron_rl.algorithms.kl import updated_kl_coef
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.return_advantage import ValueLoss
from megatron_rl.algorithms.returns import gae, whiten

# Differences in the order of float64 additions, relative to the size of the value.
LAYOUT_TOLERANCE = 1e-12
NUM_LAYOUTS = 9


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    case: str
    quantity: str
    got: float | None
    expected: float | None
    tolerance: float

    @property
    def difference(self) -> float:
        """0 for equal values, also not finite ones; inf when a value is missing."""
        if self.got is None or self.expected is None:
            return math.inf
        if self.got == self.expected or (math.isnan(self.got) and math.isnan(self.expected)):
            return 0.0
        difference = abs(self.got - self.expected)
        return math.inf if math.isnan(difference) else difference

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance


def policy_step(sequences: list[SequenceRow]) -> Step:
    """The sequences of a policy case laid end to end, in float64."""
    lengths = tuple(len(row.log_probs) for row in sequences)
    mask = torch.tensor([bool(flag) for row in sequences for flag in row.mask()], dtype=torch.bool)
    columns: dict[str, Tensor] = {"token_keys": torch.arange(len(mask))}
    for name in sequences[0].columns() if sequences else ():
        flat = [number for row in sequences for number in row.columns()[name]]
        columns[name] = torch.tensor(flat, dtype=torch.float64)
    return Step(lengths=lengths, loss_mask=mask, tokens=columns)


def grad_norm(result: StepResult, objective: Objective | ValueLoss) -> float:
    """Norm of the loss's gradient by the log-probs of all tokens, or by the values of a critic."""
    return float(result.gradients["values" if isinstance(objective, ValueLoss) else "log_probs"].norm())


def check_policy(case: PolicyCase, layouts: bool) -> Iterator[Line]:
    """Loss, gradient norm and metrics; with `layouts` also the worst relative spread over random splits."""
    step = policy_step(case.sequences)
    base = run_step(case.objective, step, trivial_layout(len(step.lengths)))
    got = {"loss": base.loss, "grad_norm": grad_norm(base, case.objective)}
    for name, expected in case.expect.items():
        if name == "metrics":
            for metric, number in expected.items():
                yield Line(case.name, metric, base.metrics.get(metric), number, case.tolerance)
        else:
            yield Line(case.name, name, got.get(name), expected, case.tolerance)
    if layouts:
        yield Line(case.name, f"spread of {NUM_LAYOUTS} layouts", layout_spread(case.objective, step, base), 0.0, LAYOUT_TOLERANCE)


def layout_spread(objective: Objective | ValueLoss, step: Step, base: StepResult) -> float:
    """The largest relative difference of loss, gradients or metrics between `base` and random layouts."""
    worst = 0.0
    for layout in random_layouts(len(step.lengths), count=NUM_LAYOUTS, seed=len(step.loss_mask)):
        result = run_step(objective, step, layout)
        worst = max(worst, relative(result.loss, base.loss))
        worst = max(worst, *(relative(float(result.metrics.get(name, math.nan)), value) for name, value in base.metrics.items()), 0.0)
        for name, gradient in base.gradients.items():
            scale = max(1.0, float(gradient.abs().max())) if len(gradient) else 1.0
            difference = float((result.gradients[name] - gradient).abs().max()) if len(gradient) else 0.0
            worst = max(worst, difference / scale if math.isfinite(difference) else math.inf)
    return worst


def relative(got: float, expected: float) -> float:
    """|got - expected| over max(1, |expected|); inf when only one of them is finite."""
    if got == expected or (math.isnan(got) and math.isnan(expected)):
        return 0.0
    difference = abs(got - expected) / max(1.0, abs(expected))
    return math.inf if math.isnan(difference) else difference


def check_advantage(case: AdvantageCase, layouts: bool) -> Iterator[Line]:
    """One number per sample, in the nesting of the rewards."""
    sizes = [len(group) for group in case.rewards]
    rewards = torch.tensor([reward for group in case.rewards for reward in group], dtype=torch.float64)
    advantages = group_advantages(
        case.estimator,
        rewards=rewards,
        group_ids=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        lengths=torch.tensor(case.flat_lengths(), dtype=torch.int64),
        baselines=None if case.baselines is None else torch.tensor(case.flat_baselines(), dtype=torch.float64),
    )
    nested = [part.tolist() for part in advantages.split(sizes)]
    yield from nested_lines(case, "advantages", nested)


def check_gae(case: GAECase, layouts: bool) -> Iterator[Line]:
    """Returns and advantages on trainable tokens."""
    lengths = [len(row) for row in case.token_rewards]
    mask = torch.tensor([bool(flag) for row in case.loss_mask for flag in row])

    def flat(rows: list[list[float]]) -> Tensor:
        return torch.tensor([number for row in rows for number in row], dtype=torch.float64)

    advantages, returns = gae(
        rewards=flat(case.token_rewards),
        values=flat(case.values),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        gamma=case.config.gamma,
        lam=case.config.lam,
        bootstrap=None if case.bootstrap is None else torch.tensor(case.bootstrap, dtype=torch.float64),
    )
    if case.config.whiten:
        advantages = whiten(advantages, mask=mask)
    got = {"advantages": advantages, "returns": returns}
    for name in case.expect:
        yield from nested_lines(case, name, [part.tolist() for part in got[name].split(lengths)] if name in got else None)


def check_entropy(case: EntropyCase, layouts: bool) -> Iterator[Line]:
    """Entropy and varentropy per row, and log-probs where the case has targets."""
    logits = torch.tensor(case.logits, dtype=torch.float64)
    targets = torch.tensor(case.targets if case.targets is not None else [0] * len(logits), dtype=torch.int64)
    vocab_size = case.config.vocab_size or logits.shape[1]
    statistics = token_statistics(logits, targets, temperature=case.config.temperature, vocab_size=vocab_size)
    assert statistics.entropy is not None and statistics.varentropy is not None
    got = {"entropy": statistics.entropy, "varentropy": statistics.varentropy, "log_probs": statistics.log_prob}
    for name in case.expect:
        yield from nested_lines(case, name, got[name].tolist() if name in got else None)


def check_entropy_controller(case: EntropyControllerCase, layouts: bool) -> Iterator[Line]:
    """The value applied in each step, and the one behind the gate after it."""
    state = EntropyState.first(case.settings)
    assert case.settings is not None and case.settings.control is not None and state is not None
    control = case.settings.control
    got: dict[str, list[float | None]] = {"applied": [], "after": []}
    offset = case.clip_high if control.kind == "clip_high" else 0.0
    for entropy in case.entropies:
        got["applied"].append(offset + state.applied(control, entropy))
        state = state.updated(control, entropy)
        got["after"].append(state.value)
    for name in case.expect:
        yield from nested_lines(case, name, got.get(name))


def check_kl_controller(case: KLControllerCase, layouts: bool) -> Iterator[Line]:
    """The coefficient after each step."""
    coef, after = case.config.initial, []
    for kl, num_trajectories in case.steps:
        coef = updated_kl_coef(coef, kl=kl, num_trajectories=num_trajectories, control=case.control)
        after.append(coef)
    for name in case.expect:
        yield from nested_lines(case, name, after if name == "after" else None)


def nested_lines(case: Case, name: str, got: Any) -> Iterator[Line]:
    """The entry of `got` that differs most from the expected list of the same nesting; entries expected as null are skipped."""
    lines = list(_paired(case, name, got, case.expect.get(name)))
    if lines:
        yield max(lines, key=lambda line: line.difference)


def _paired(case: Case, name: str, got: Any, expected: Any) -> Iterator[Line]:
    if expected is None:
        return
    if isinstance(expected, list):
        same = isinstance(got, list) and len(got) == len(expected)
        for number, entry in enumerate(expected):
            yield from _paired(case, f"{name}[{number}]", got[number] if same else None, entry)
    else:
        yield Line(case.name, name, got if isinstance(got, (int, float)) else None, expected, case.tolerance)


CHECKS: Mapping[type[Case], Callable[[Any, bool], Iterator[Line]]] = {
    PolicyCase: check_policy,
    AdvantageCase: check_advantage,
    GAECase: check_gae,
    EntropyCase: check_entropy,
    EntropyControllerCase: check_entropy_controller,
    KLControllerCase: check_kl_controller,
}


def print_table(lines: list[Line]) -> None:
    """All lines, and a summary of misses and of the worst layout spread."""
    table = Table(box=None, header_style="bold")
    for heading in ("case", "quantity", "got", "expected", "difference", ""):
        table.add_column(heading, justify="left" if heading in ("case", "quantity", "") else "right", no_wrap=True)
    for line in lines:
        show = ["missing" if number is None else f"{number:.10g}" for number in (line.got, line.expected)]
        table.add_row(
            line.case, line.quantity, *show, f"{line.difference:.2g}", "ok" if line.passed else "MISS", style=None if line.passed else "red"
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    misses = sum(not line.passed for line in lines)
    spreads = [line.difference for line in lines if line.quantity.startswith("spread")]
    if spreads:
        console.print(f"worst spread over layouts: {max(spreads):.2g}")
    console.print(f"{len({line.case for line in lines})} cases, {len(lines)} quantities, {misses} missed")


def main() -> int:
    """Run the check of the command line; the exit code."""
    parser = argparse.ArgumentParser(description=f"Check the objective module against a vector file ({FORMAT}).")
    parser.add_argument("file", type=Path, help="vector file, JSON")
    parser.add_argument("--layouts", action="store_true", help="also run policy cases under random layouts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        cases = read_file(arguments.file)
    except (MalformedError, OSError, json.JSONDecodeError) as error:
        print(f"{arguments.file}: {error}", file=sys.stderr)
        return 2
    lines: list[Line] = []
    for case in cases:
        try:
            lines += CHECKS[type(case)](case, arguments.layouts)
        except (ValueError, ValidationError) as error:
            print(f"{arguments.file}: {case.path}: {error}", file=sys.stderr)
            return 2
    print_table(lines)
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
