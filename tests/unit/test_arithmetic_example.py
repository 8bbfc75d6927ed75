"""What the quickstart runs besides `megatron-rl`, which the tests of whole runs do not reach."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from megatron_rl.config.load import load_settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"


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


def test_the_commands_of_the_readme_fit_together() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    make, *trained, score = (shlex.split(line, comments=True) for line in block.splitlines())
    assert all((ROOT / word).exists() for words in (make, *trained, score) for word in words if word.startswith("examples/"))
    sft, grpo = (load_settings(ROOT / words[-1]) for words in trained)
    task = Path(make[-1])
    assert (sft.model.path, sft.data.train) == (task / "model", task / "supervised.jsonl")
    assert (grpo.model.path, grpo.data.train) == (sft.run.directory / "huggingface", task / "train.jsonl")
    assert score[-2:] == [str(grpo.run.directory / "huggingface"), str(grpo.data.eval)]
