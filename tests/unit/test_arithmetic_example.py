"""What the quickstart runs besides `megatron-rl`, which the tests of whole runs do not reach."""

import json
import os
import re
import runpy
import shlex
import subprocess
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


def test_a_checkpoint_s_score_is_its_share_of_right_answers(task: Path, tmp_path: Path) -> None:
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
    block, *_ = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    make, *trained, score = (shlex.split(line, comments=True) for line in block.splitlines())
    assert all((ROOT / word).exists() for words in (make, *trained, score) for word in words if word.startswith("examples/"))
    sft, grpo = (load_settings(ROOT / words[-1]) for words in trained)
    task = Path(make[-1])
    assert (sft.model.path, sft.data.train) == (task / "model", task / "supervised.jsonl")
    assert (grpo.model.path, grpo.data.train) == (sft.run.directory / "huggingface", task / "train.jsonl")
    assert score[-2:] == [str(grpo.run.directory / "huggingface"), str(grpo.eval.sets["greedy"].data)]


@pytest.mark.parametrize(
    ("num_gpus", "visible", "layouts"),
    [
        (0, None, [[], []]),
        (1, None, [["training.topology.num_ranks=1"], ["training.topology.num_ranks=1", "runtime.colocate=true"]]),
        (2, None, [["training.topology.num_ranks=1"], ["training.topology.num_ranks=1"]]),
        (3, None, [[], []]),
        (8, "0,3", [["training.topology.num_ranks=1"], ["training.topology.num_ranks=1"]]),
        (8, "", [[], []]),
    ],
)
def test_the_quickstart_takes_no_more_gpus_than_there_are(
    tmp_path: Path, num_gpus: int, visible: str | None, layouts: list[list[str]]
) -> None:
    lines = "".join(f"GPU {number}: NVIDIA H100 (UUID: GPU-{number})\n" for number in range(num_gpus))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}"
    }
    done = subprocess.run(
        ["bash", "examples/quickstart.sh", "--dry-run"],
        cwd=ROOT,
        env=environment if visible is None else environment | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    commands = [shlex.split(line) for line in done.stdout.splitlines() if " train " in line]
    chosen = ("training.topology.num_ranks", "runtime.colocate")
    assert [[word for word in command if word.startswith(chosen)] for command in commands] == layouts
