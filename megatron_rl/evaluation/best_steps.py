"""The best evaluated step of each set with `keep_best`, and the end of a run that gets no better."""

import math
from collections.abc import Iterable, Mapping

from megatron_rl.checkpoints.run_checkpoints import Best
from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.errors import counted
from megatron_rl.evaluation.evaluator import SetResult


def best_after(best: Mapping[str, Best], results: Iterable[SetResult], *, sets: Mapping[str, EvalSet], step: int) -> dict[str, Best]:
    """Return the best evaluation of each of `sets`, as `best` before the `results` after `step` steps.

    The first of equal values is the best. An evaluation without a value counts as none.
    """
    found = {name: one for name, one in best.items() if name in sets and sets[name].keep_best == one.metric}
    for result in results:
        metric, before = sets[result.name].keep_best, found.get(result.name)
        if metric is None or metric not in result.estimates or math.isnan(value := result.estimates[metric].value):
            continue
        if before is None or value > before.value:
            found[result.name] = Best(metric, step, value)
        else:
            found[result.name] = Best(metric, before.step, before.value, before.num_since + 1)
    return found


def reason_to_stop(best: Mapping[str, Best], *, sets: Mapping[str, EvalSet]) -> str | None:
    """Return why the run is to end, None where it goes on."""
    for name, one in sets.items():
        of_set = best.get(name)
        known = of_set is not None and of_set.metric == one.keep_best
        if one.stop_after is not None and of_set is not None and known and of_set.num_since >= one.stop_after:
            since = f"{counted(of_set.num_since, 'evaluation')} since step {of_set.step} ({of_set.metric} {of_set.value:.4g})"
            return f"the set {name} got no better in {since}; eval.sets.{name}.stop_after is {one.stop_after}"
    return None
