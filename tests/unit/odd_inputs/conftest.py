"""Odd inputs through the command's own entry point: each ends in one sentence that says what was got, needed, and how to mend it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.config.settings import RewardSettings
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.runtime import preflight

Refuse = Callable[..., str]
"""`refuse(words, *parts)` runs the command, asserts one sentence with `parts`, and returns it."""

REWARD = "def score(*, sample):\n    return float(sample.response_text == sample.prompt.label)\n"


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    def run(words: list[str], *parts: str) -> str:
        status, printed = main(words), capsys.readouterr()
        assert status == 2, printed
        assert printed.err.startswith("megatron-rl: ") and "Traceback" not in printed.out + printed.err, printed
        # A list of several mistakes has a line for each.
        lines = printed.err.removeprefix("megatron-rl: ").splitlines()
        assert lines and all(line.startswith("  - ") for line in lines[1:]), printed.err
        missing = [part for part in parts if part not in printed.err]
        assert not missing, f"{missing} not in {printed.err}"
        return printed.err

    return run


@pytest.fixture(scope="session")
def _opened() -> Iterator[Callable[[RewardSettings], Any]]:
    """Stand for the class RewardRunner: checks of one reward share its worker."""
    with ExitStack() as stack:
        runners: dict[str, RewardRunner] = {}

        def open_runner(settings: RewardSettings, **_: Any) -> Any:
            key = settings.model_dump_json()
            if key not in runners:
                runners[key] = stack.enter_context(RewardRunner(settings))
            return nullcontext(runners[key])

        yield open_runner


@pytest.fixture
def model(tmp_path: Path, written_models: Callable[..., Path]) -> Path:
    """A sound model directory that the test may damage."""
    return shutil.copytree(written_models(), tmp_path / "model")


@pytest.fixture
def words(tmp_path: Path, model: Path, _opened: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a check that passes."""
    monkeypatch.setattr(preflight, "RewardRunner", _opened)
    (tmp_path / "odd_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "label": "2"}\n' * 4)
    return [
        *("train", "--check", f"run.directory={tmp_path / 'run'}", f"model.path={model}", "training.optimizer.lr=1e-4"),
        f"data={{train: {data}, max_prompt_tokens: 16, prompts_per_step: 2, samples_per_prompt: 2}}",
        *("rollout.sampling.max_response_tokens=8", "reward.function=odd_reward:score"),
    ]
