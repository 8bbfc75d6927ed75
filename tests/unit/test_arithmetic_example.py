"""What the quickstart runs besides `megatron-rl`, which the tests of whole runs do not reach."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("arithmetic") / "task"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_task.py", str(directory)])
        runpy.run_path(str(EXAMPLE / "make_task.py"), run_name="__main__")
    return directory


def test_a_checkpoint_is_scored_by_the_share_of_right_greedy_answers(task: Path, tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(task / "model")
    prompts = ["12+34=", "5+6=", "99+1="]
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        sequence = model.generate(**ids, do_sample=False, max_new_tokens=4, pad_token_id=tokenizer.pad_token_id)[0]
        answers.append(tokenizer.decode(sequence[ids["input_ids"].shape[1] :], skip_special_tokens=True))
    labels = [answers[0], answers[1] + "x", answers[2]]
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        "".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in zip(prompts, labels, strict=True))
    )
    greedy_accuracy = runpy.run_path(str(EXAMPLE / "score.py"))["greedy_accuracy"]
    assert greedy_accuracy(task / "model", problems) == pytest.approx(2 / 3)
