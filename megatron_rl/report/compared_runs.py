"""Tables and curves of `megatron-rl compare`."""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.evaluation.comparison import compare, curves_of, evaluations_in
from megatron_rl.report.curves import draw_comparison
from megatron_rl.system.files import write_atomic


def compare_runs(runs: Sequence[Path], *, step: int | None, out: Path) -> None:
    """Print the differences of each run to the first at `step`, or their last common one, and write the picture `out`."""
    if len(set(runs)) < max(len(runs), 2):
        raise UserError(f"got {', '.join(map(str, runs))}, needs at least two runs, each once")
    found = [evaluations_in(run) for run in runs]
    common = sorted(set.intersection(*map(set, found)))
    if not common or (step is not None and step not in common):
        of_runs = "; ".join(f"{run}: {', '.join(map(str, steps))}" for run, steps in zip(runs, found, strict=True))
        raise UserError(f"the runs were not all evaluated at {'one step' if step is None else f'step {step}'} ({of_runs}); give --step")
    at = common[-1] if step is None else step
    print(f"step {at}; the first run is {runs[0]}")
    for run, steps in zip(runs[1:], found[1:], strict=True):
        for each in compare(found[0][at], steps[at]):
            print(f"{run}: {each}")
    write_atomic(out, draw_comparison({str(run): curves_of(run) for run in runs}, title="Held-out sets"))
    print(out)
