"""The settings with which `megatron-rl rollout` generates samples."""

from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text("run: {directory: runs/x}\nmodel: {path: model}\ndata: {train: train.jsonl}\n")
    return str(path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("training={max_tokens_per_micro_batch: 5000, topology: {num_ranks: 2, cp: 2}}",), {"training.max_tokens_per_micro_batch": 5000}),
        (("objective.advantage=remax",), {"objective.advantage.kind": "remax"}),
        (("rollout.sampling.entropy={thresholds: [0.1, 0.1]}", "objective.proximal=rollout"), {"objective.proximal": "rollout"}),
        (("model.teacher=t", "objective.distillation_coef=1.0"), {"model.teacher": Path("t"), "objective.distillation_coef": 1.0}),
        (
            ("runtime.colocate=true", "weights.transport=ipc", "runtime.cluster={num_nodes: 2, gpus_per_node: 8}"),
            {"rollout.num_engines": 16, "runtime.colocate": False, "weights.transport": None},
        ),
        (
            ("rollout.max_staleness=2", "rollout.order={kind: first_complete}"),
            {"rollout.max_staleness": 0, "rollout.order.kind": "in_order"},
        ),
    ],
    ids=["lengths", "remax", "entropy", "teacher", "colocated", "asynchronous"],
)
def test_samples_are_those_of_the_runs_first_step(
    words: tuple[str, ...], expected: dict[str, Any], config: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generated: list[Settings] = []

    def generate(settings: Settings, *, count: int) -> Path:
        generated.append(settings)
        raise UserError("far enough")

    monkeypatch.setattr("megatron_rl.cli._session", lambda _settings: SimpleNamespace(generate=generate))
    assert main(["rollout", config, "--out", str(tmp_path / "samples.jsonl"), *words]) == 2
    (settings,) = generated
    assert {path: attrgetter(path)(settings) for path in expected} == expected
    assert settings.run.directory == tmp_path / "samples.jsonl.partial"


def test_supervised_rows_need_no_samples(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", config, "--out", str(tmp_path / "samples.jsonl"), "objective.policy_loss=sft"]) == 2
    assert "objective.policy_loss is sft, which takes no samples of engines" in capsys.readouterr().err
