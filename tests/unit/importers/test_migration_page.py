"""The numbers and the settings of examples/migration/README.md."""

import math
import re
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms.aggregation import Sequences, token_weights
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.cli import cli
from megatron_rl.config.settings_reference import sections, setting_fields
from megatron_rl.importers import slime, verl

EXAMPLES = Path(__file__).parents[3] / "examples"
PAGE = (EXAMPLES / "migration" / "README.md").read_text()
AGGREGATIONS = ("sequence_mean_token_mean", "token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm")
LOSSES = [[1.0], [2.0, 2.0, 2.0], [4.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


def value_of(aggregation: str) -> float:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| ") and f"| `{aggregation}` |" in line]
    return float(row.split("|")[3])


def test_the_losses_of_the_page_are_those_of_its_example() -> None:
    printed = re.findall(r"answer \d: ([\d. ]+?)(?:  |\n)", PAGE)
    assert [[float(each) for each in words.split()] for words in printed] == LOSSES
    tokens = sum(map(len, LOSSES))
    assert value_of("sequence_mean_token_mean") == sum(sum(row) / len(row) for row in LOSSES) / 4
    assert value_of("token_mean") == sum(map(sum, LOSSES)) / tokens
    assert value_of("sequence_mean_token_sum") == sum(map(sum, LOSSES)) / 4
    assert value_of("sequence_mean_token_sum_norm") == sum(map(sum, LOSSES)) / 4 / 8
    means = [sum(map(sum, half)) / sum(map(len, half)) for half in (LOSSES[:2], LOSSES[2:])]
    assert f"= {sum(means) / 2:.4f} instead of" in PAGE


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_losses_of_the_page_are_what_is_trained(aggregation: str) -> None:
    lengths = torch.tensor([len(row) for row in LOSSES])
    sequences = Sequences(torch.arange(4).repeat_interleave(lengths), torch.ones(int(lengths.sum()), dtype=torch.bool), lengths)
    counts = {"num_tokens": int(lengths.sum()), "num_trajectories": 4, "max_response_length": 8}
    weights = token_weights(sequences, aggregation=aggregation, **counts, dtype=torch.float64)  # type: ignore[arg-type]
    losses = torch.tensor([value for row in LOSSES for value in row], dtype=torch.float64)
    assert float((weights * losses).sum()) == pytest.approx(value_of(aggregation), abs=1e-12)


def test_the_kl_of_the_page() -> None:
    policy, reference = torch.tensor([-1.0]), torch.tensor([-2.0])
    found = {kind: float(kl_estimate(policy, reference=reference, estimator=kind)) for kind in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    words = "k1 is {k1:g}, k2 {k2:g}, k3 {k3:.4f}".format(**found)
    assert words in " ".join(PAGE.split()) and found["k3"] == pytest.approx(math.exp(-1))


def test_steps_of_the_page() -> None:
    assert f"are {7473 * 15 // 1024} steps" in PAGE and f"samples a step are {32 * 8 // 128}." in PAGE


def test_every_setting_and_word_of_the_table_exists() -> None:
    known = {field.path for field in setting_fields()} | set(sections())
    rows = [row.split("|")[1:5] for row in PAGE.split("|---|---|---|---|\n")[1].split("\n\n")[0].splitlines()]
    assert len(rows) > 15
    ours = [word for row in rows for word in re.findall(r"`([a-z_]+\.[a-z_.]+)", row[3])]
    assert [word for word in ours if word not in known and not word.startswith("rollout.sglang.")] == []
    taken = Path(slime.__file__).read_text() + Path(verl.__file__).read_text()
    words = [word for row in rows for word in re.findall(r"`--([a-z-]+)`", row[0])]
    assert len(words) > 15 and [word for word in words if f'"{word}"' not in taken] == []


def test_every_command_of_the_page_exists() -> None:
    used = {line.split()[1] for line in PAGE.splitlines() if line.startswith("megatron-rl ")}
    assert used == {"import", "train"} and used <= set(cli.commands)


def test_the_index_names_everything_that_runs() -> None:
    index = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.is_dir() and not path.name.startswith(("_", ".")):
            assert f"({path.name}/README.md)" in index
    assert "(quickstart.sh)" in index
