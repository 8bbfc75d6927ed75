import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.load import load_settings
from megatron_rl.data.source import RunPrompts

TRAIN = [{"prompt": "1"}, {"prompt": "2", "label": "2"}, {"prompt": "3", "label": "3"}]
HELD_OUT = [{"prompt": "7", "label": "7"}, {"prompt": "8"}]


@pytest.fixture
def read(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., RunPrompts]:
    """The prompts 1, 2, 3 to train on, of which the first has no label, and 7 and 8 if they are to be held out."""

    def make(*, held_out: bool, prompts_per_step: int = 3) -> RunPrompts:
        for name, rows in (("train", TRAIN), ("held_out", HELD_OUT)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths = [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"]
        paths += [f"data.prompts_per_step={prompts_per_step}"]
        settings = load_settings(None, paths + [f"eval.sets.held_out={tmp_path}/held_out.jsonl"] * held_out)
        return RunPrompts.read(settings.model.path, settings.data, sets=settings.eval.sets, seed=settings.run.seed)

    return make


def test_held_out_prompts_are_tried_first_without_the_source(read: Callable[..., RunPrompts]) -> None:
    prompts = read(held_out=True)
    assert [(prompt.id, prompt.text) for prompt in prompts.held_out["held_out"]] == [("held_out-0", "7"), ("held_out-1", "8")]
    assert [prompt.text for prompt in prompts.for_parity(1)] == ["7"] and len(prompts.for_parity(9)) == 2
    assert [prompt.text for prompt in prompts.probes] == ["7", "8", "1", "2"]
    state = prompts.source.rows.state()
    assert state["taken"] == [0]
    assert [note.partition(" ")[0] for note in prompts.notes] == ["1", "1"], "a note about each file"


def test_without_held_out_prompts_those_to_train_on_are_tried(read: Callable[..., RunPrompts]) -> None:
    prompts = read(held_out=False)
    assert prompts.held_out == {}
    assert [prompt.text for prompt in prompts.for_parity(9)] == ["1", "2", "3"]
    assert [prompt.text for prompt in prompts.probes] == ["1", "2"]
    assert len(prompts.notes) == 1


def test_rows_that_are_too_few_for_a_step_are_noted(read: Callable[..., RunPrompts], tmp_path: Path) -> None:
    [first, _] = read(held_out=False, prompts_per_step=4).notes
    assert first.startswith(f"{tmp_path}/train.jsonl has 3 rows, and a step takes data.prompts_per_step 4: ")
