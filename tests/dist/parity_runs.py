"""Models under layouts against two references: log-probs of transformers with the same weights, and training on one rank."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from layout_runs import Outcome, compare, make_batch, make_settings, make_trainer, merged_metrics, outcome_of, train_batches
from layout_table import BASE, Layout

TOLERANCE = 1e-5
OBJECTIVE = {"kl": {"coef": 0.05}, "entropy": {"coef": 0.01}}
PROBED = 7
"""Seed of the batch whose log-probs are compared."""
SECONDS_PER_CASE = 20
Case = tuple[str, str]
"""Names of a model and of a layout."""


def train(
    rank: int,
    world_size: int,
    init_method: str,
    paths: Mapping[str, str],
    layouts: Mapping[str, Layout],
    directory: str,
    cases: Sequence[Case],
) -> dict[Case, Outcome]:
    """Log-probs, three optimizer steps and the weights of each case; layouts of fewer ranks than there are take the first ones."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for number, (model, name) in enumerate(cases):
        if rank >= layouts[name].num_ranks:
            continue
        # The last line of a rank that dies says where.
        print(f"case {model} {name}", flush=True)
        settings = make_settings(paths[model], Path(directory) / f"{world_size}-{number}", layouts[name], objective=OBJECTIVE)
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        before = trainer.log_probs(make_batch(PROBED))
        metrics = train_batches(trainer, settings)
        outcomes[model, name] = outcome_of(trainer, metrics, log_probs=[before])
        shutdown()
    return outcomes


def expected_log_probs(path: str) -> np.ndarray:
    """Log-prob [tokens] of each token of the probed batch by transformers in float64, 0 for the first of a sequence."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    batch = make_batch(PROBED)
    found = []
    for part in np.split(batch.tokens, batch.cu_seqlens[1:-1]):
        tokens = torch.tensor(part)
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        found.append(np.concatenate([[0.0], log_probs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()]))
    return np.concatenate(found)


def run_and_compare(
    run_ranks: Callable[..., list[Any]],
    tiny_model: Callable[..., Path],
    directory: Path,
    *,
    models: Mapping[str, Mapping[str, Any]],
    layouts: Mapping[str, Layout],
    cases: Sequence[Case],
    num_ranks: int,
) -> None:
    """Run `cases` and their one-rank bases in `num_ranks` processes; fail where one is off by more than `TOLERANCE`."""
    names = list(dict.fromkeys(model for model, _ in cases))
    paths = {name: str(tiny_model(name=f"model{index}", **models[name])) for index, name in enumerate(names)}
    every = list(dict.fromkeys([*((name, BASE) for name in names), *cases]))
    timeout_s = 60 + SECONDS_PER_CASE * len(every) * max(1, num_ranks // 2)
    ranks = run_ranks(train, num_ranks, paths, dict(layouts), str(directory), every, timeout_s=timeout_s)
    outcomes = {case: [rank[case] for rank in ranks if case in rank] for case in every}
    mask = make_batch(PROBED).loss_mask
    for name, path in paths.items():
        expected = expected_log_probs(path)
        assert expected[mask].std() > 0.1, "the reference must depend on its input for this test to be able to fail"
        assert all(step["train/grad_norm"] > 0.01 for step in merged_metrics(outcomes[name, BASE]))
        for case in (case for case in every if case[0] == name):
            for outcome in outcomes[case]:
                error = np.abs(outcome["log_probs"][0] - expected)[mask].max()
                assert error <= TOLERANCE, f"{case}: a log-prob differs from that of transformers by {error}"
            differences = compare(outcomes[case], outcomes[name, BASE])
            assert differences.largest <= TOLERANCE, f"{case}: {differences}"
