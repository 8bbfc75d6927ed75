import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.gpus import GPUS
from megatron_rl.config.load import Words, load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.planning.command import plans, read_spec, shares, split_model

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
GPU = GPUS["H100-80"]


def plans_of(model: Path, *overrides: str, num_gpus: int, **topology: object) -> list[tuple[str, Any, str | None]]:
    return list(plans(Words(model, overrides), gpu=GPU, num_gpus=num_gpus, topology=topology))


def test_a_model_and_a_settings_file_are_told_apart() -> None:
    model = Path("models/Qwen3-8B")
    assert split_model(Words(model, ("run.seed=1",))) == (model, Words(None, ("run.seed=1",)))
    run = Words(Path("run.yaml"), ())
    assert split_model(run) == (None, run)
    with pytest.raises(UserError, match="plan was given no model"):
        split_model(Words(None, ()))


def test_a_config_json_alone_is_a_model(tmp_path: Path) -> None:
    assert read_spec(CONFIGS / "Qwen3-4B.json").num_layers == 36
    broken = tmp_path / "config.json"
    with pytest.raises(UserError, match=r"cannot be read \(No such file.*give a Hugging Face directory or its config.json"):
        read_spec(broken)
    with pytest.raises(UserError, match=r"has no config.json"):
        read_spec(tmp_path)
    broken.write_text("{")
    with pytest.raises(UserError, match=r"is not valid JSON"):
        read_spec(broken)
    broken.write_text("[]")
    with pytest.raises(UserError, match=r"holds a list, needs a JSON object"):
        read_spec(broken)


def test_what_does_not_fit_is_told_to_scripts_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_rl.cli import main
    from megatron_rl.planning import command

    class Plan:
        fits = False
        peak = 2**60

        def lines(self) -> list[str]:
            return ["does not fit: 3 of 2"]

    monkeypatch.setattr(command, "plan_run", lambda *_, **__: Plan())
    monkeypatch.setattr(command, "remedy", lambda *_, **__: "the trainer fits with x=1")
    assert main(["plan", str(CONFIGS / "Qwen3-4B.json"), "--gpus", "4", "--tp", "2"]) == 2
    assert "does not fit: 3 of 2\nthe trainer fits with x=1\n" in capsys.readouterr().out


def test_the_commands_of_the_layout_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.cli import main
    from megatron_rl.planning import command

    examples, asked = Path(__file__).parents[3] / "examples", list[tuple[Any, ...]]()
    page = (examples / "layout" / "README.md").read_text()
    *planned, dry = [shlex.split(line) for line in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].splitlines()]
    assert dry[:2] == ["bash", "examples/launch/qwen3-4b.sh"] and dry[-1] == "--dry-run", "tests/e2e/test_launch.py runs all of these"

    def plan(settings: Settings, *_: object, **__: object) -> Any:
        topology = settings.training.topology
        asked.append((settings.model.path.stem, topology.num_ranks, topology.tp, topology.ep, settings.runtime.colocate))
        return SimpleNamespace(fits=True, peak=0, lines=lambda: ["fits"])

    monkeypatch.setattr(command, "plan_run", plan)
    monkeypatch.setattr(command, "_best", lambda shared, *_, **__: [(shared[0], plan(shared[0]))])
    for program, name, model, *words in planned:
        assert (program, name) == ("megatron-rl", "plan")
        assert main(["plan", str(CONFIGS / f"{Path(model).name}.json"), *words]) == 0
    assert asked == [("Qwen3-8B", 4, 1, 1, False), ("Qwen3-8B", 4, 2, 1, False), ("Qwen3-30B-A3B", 16, 1, 8, True)]
    launched = (examples / "launch" / "README.md").read_text()
    for model, layout, gib in (("Qwen3-4B", "dp 8", 39), ("Qwen3-8B", "tp 2 dp 2", 53), ("Qwen3-30B-A3B", "tp 2 dp 8 ep 8", 57)):
        (row,) = [line for line in launched.splitlines() if f"| {model} |" in line]
        assert f": {layout} |" in row and f"| {gib} GiB |" in row and f"{layout}, {gib} GiB" in " ".join(page.split())


def test_a_settings_file_is_planned_as_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With recompute and the distributed optimizer, which its GPUs decide; without them it does not fit."""
    from megatron_rl.cli import main

    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(CONFIGS / "Qwen3-4B.json", model / "config.json")
    words = [str(Path(__file__).parents[3] / "examples" / "launch" / "qwen3-4b.yaml"), f"model.path={model}"]
    assert main(["plan", *words]) == 0
    assert "\nfits: 38.9 of 79.6 GiB" in capsys.readouterr().out


def test_arguments_of_the_engine_are_checked() -> None:
    with pytest.raises(UserError, match=r"mem_fraction_static is 1.7, needs a share"):
        plans_of(CONFIGS / "Qwen3-4B.json", "rollout.sglang.mem_fraction_static=1.7", num_gpus=4, tp=2)
    with pytest.raises(UserError, match=r"mem_fraction_static is 'abc', needs another type"):
        plans_of(CONFIGS / "Qwen3-4B.json", "rollout.sglang.mem_fraction_static=abc", num_gpus=4, tp=2)


def test_mistakes_in_the_layout_are_the_settings_own() -> None:
    with pytest.raises(UserError, match=r"^8 GPUs, engines among them: .* 4 ranks cannot be divided by tp 5"):
        plans_of(CONFIGS / "Qwen3-4B.json", num_gpus=8, tp=5, cp=2)


def test_a_model_that_a_check_refuses_is_not_planned(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads((CONFIGS / "Qwen3-4B.json").read_text()), "max_position_embeddings": 100}))
    for topology in ({}, {"tp": 2}):
        with pytest.raises(UserError, match=r"more than the 100 that the model"):
            plans_of(path, num_gpus=4, **topology)
    with pytest.raises(UserError, match=r"model\.megatron\.test_mode is True"):
        plans_of(CONFIGS / "Qwen3-4B.json", "model.megatron.test_mode=true", num_gpus=4)


def test_gpus_are_divided_between_ranks_and_engines() -> None:
    def divided(num_gpus: int, *overrides: str) -> list[tuple[int, int]]:
        settings = load_settings(None, ["run.directory=x", "model.path=m", "data.train=t", *overrides])
        return shares(settings.rollout, num_gpus=num_gpus, supervised=settings.supervised, colocated=settings.runtime.colocate)

    assert divided(8) == [(4, 4), (6, 2), (2, 6), (7, 1)]
    assert divided(16, "rollout.sglang.tp_size=4") == [(8, 2), (12, 1), (4, 3)]
    assert divided(2) == [(1, 1)]
    assert divided(8, "runtime.colocate=true", "rollout.sglang.tp_size=2") == [(8, 4)]
    assert divided(8, "objective.policy_loss=sft") == [(8, 1)]
    with pytest.raises(UserError, match="cannot hold a Megatron rank beside an engine of 4 GPUs"):
        divided(4, "rollout.sglang.tp_size=4")
    with pytest.raises(UserError, match="cannot be divided by engines of 3"):
        divided(8, "runtime.colocate=true", "rollout.sglang.tp_size=3")


def test_a_share_that_holds_nothing_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.planning import command

    asked: list[int] = []

    def search(settings: Any, spec: Any, *, gpu: Any, num_gpus: int, **_: Any) -> list[tuple[Any, str]]:
        asked.append(num_gpus)
        if num_gpus < least:
            raise UserError(f"{num_gpus} are too few")
        return [(settings, "a plan")]

    monkeypatch.setattr(command, "best_layouts", search)
    least = 6
    assert len(plans_of(CONFIGS / "Qwen3-4B.json", num_gpus=8)) == 1 and asked == [4, 6]
    least = 9
    with pytest.raises(UserError, match="7 are too few"):
        plans_of(CONFIGS / "Qwen3-4B.json", num_gpus=8)


def test_layouts_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself has its own tests: here is what it is asked, and how its answer is printed."""
    from megatron_rl.planning import command

    asked: list[Any] = []

    def search(settings: Any, spec: Any, *, gpu: Any, num_gpus: int, **_: Any) -> list[tuple[Any, str]]:
        asked.append((settings, num_gpus))
        topology = settings.training.topology.model_copy(update={"num_ranks": num_gpus, "tp": 2, "sequence_parallel": True})
        return [(settings.model_copy(update={"training": settings.training.model_copy(update={"topology": topology})}), "a plan")]

    monkeypatch.setattr(command, "best_layouts", search)
    [(overrides, plan, advice)] = plans_of(CONFIGS / "Qwen3-8B.json", "data.prompts_per_step=32", num_gpus=8)
    assert plan == "a plan" and advice is None
    assert overrides == (
        "1. training.topology.num_ranks=4 training.topology.tp=2 training.topology.sequence_parallel=true "
        "model.megatron.recompute_granularity=null rollout.num_engines=4 training.optimizer.use_distributed_optimizer=true "
        "rollout.sglang.tp_size=1"
    )
    [(settings, num_gpus)] = asked
    assert num_gpus == 4 and settings.data.prompts_per_step == 32 and settings.training.optimizer["use_distributed_optimizer"]


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_rl.cli import main

    model = str(CONFIGS / "Qwen3-4B.json")
    assert main(["plan", model, "--gpu", "H100-8", "--gpus", "8"]) == 2
    assert "did you mean H100-80?" in capsys.readouterr().err
    assert main(["plan", model, "--gpus", "8", "--tp", "3"]) == 2
    assert main(["plan", str(CONFIGS)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert main(["plan", model, "--gpus", "2", "--sequence-paralel"]) == 2
