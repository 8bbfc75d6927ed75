import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from written_run import group, write_buffer

from megatron_rl import runtime
from megatron_rl.cli import main
from megatron_rl.config.help import FIRST_RUN
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.config.settings_reference import setting_fields
from megatron_rl.errors import EngineError, ResumableError, UserError

SETTINGS = "run: {directory: runs/x}\nmodel: {path: model}\ndata: {train: train.jsonl}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS)
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the command line asks of the runtime, which is replaced: these tests are about the command line alone."""
    made: list[tuple[str, Any]] = []
    names = ("preflight", "ray_session", "session")
    preflight, ray_session, session = (ModuleType(f"megatron_rl.runtime.{name}") for name in names)

    def record(name: str) -> Callable[..., list[str]]:
        def call(settings: Any, **keywords: Any) -> list[str]:
            made.append((name, (settings, keywords)))
            return ["mind the gap"] if name == "preflight" else []

        return call

    vars(preflight).update(preflight=record("preflight"))
    vars(ray_session).update(prepare_environment=record("prepare_environment"))
    vars(session).update(train=record("train"), evaluate=record("evaluate"))
    for module in (preflight, ray_session, session):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(runtime, module.__name__.rpartition(".")[2], module, raising=False)
    return made


def fake_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `train --check` says of the launch."""
    plan, target = ModuleType("megatron_rl.planning.launch_plan"), ModuleType("megatron_rl.runtime.target")
    vars(plan).update(launch_plan=lambda settings, target, replay: {"layout": {"tp": 2}})
    vars(target).update(find_target=lambda topology, rollout, runtime, *, config_only: None)
    rows = ModuleType("megatron_rl.data.overview")
    vars(rows).update(overview=lambda prompts: {"data.train": "3 prompts"})
    monkeypatch.setattr("megatron_rl.data.source.RunPrompts.read", lambda *args, **kind: None)
    for module in (plan, target, rows):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_train_hands_over_resolved_settings(calls: list[tuple[str, Any]], config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        config,
        "run.seed=2",
        "--training.optimizer.lr",
        "2e-6",
        "--resume",
        "--weights-only",
        "--reward",
        "my.module:score",
        "--ray-address",
        "10.0.0.1:6379",
    ]
    assert main(words) == 0
    (first, _), (second, (runtime_settings, _)), (third, (settings, keywords)) = calls
    # Ray reads its environment when it is imported.
    assert (first, second, third, keywords) == (
        "preflight",
        "prepare_environment",
        "train",
        {"resume": True, "weights_only": True, "replay": None},
    )
    assert runtime_settings == settings.runtime
    overrides = ["run.seed=2", "training.optimizer.lr=2e-6", "reward.function=my.module:score", "runtime.ray_address=10.0.0.1:6379"]
    assert settings == load_settings(Path(config), overrides)
    assert "note: mind the gap" in capsys.readouterr().err


def test_prints_of_a_probed_function_are_no_part_of_settings(
    calls: list[tuple[str, Any]], config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def preflight(settings: Any, *, resume: bool, replay: Path | None, config_only: bool) -> list[str]:
        print("printed: 3")
        return []

    vars(sys.modules["megatron_rl.runtime.preflight"]).update(preflight=preflight)
    fake_plan(monkeypatch)
    assert main(["train", config, "--check"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "printed: 3\n" and "printed" not in printed.out
    resolved = Path(config).with_name("resolved.yaml")
    resolved.write_text(printed.out)
    assert load_settings(resolved) == load_settings(Path(config))


@pytest.mark.parametrize("fits", [True, False])
def test_of_a_run_that_does_not_fit_the_plan_alone_is_printed(
    calls: list[tuple[str, Any]], config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    vars(sys.modules["megatron_rl.runtime.preflight"]).update(preflight=lambda settings, **_: [])
    found = SimpleNamespace(fits=fits, verdict="does not fit: 3 of 2", lines=lambda: ["stage 0  ", ""])
    plan, target = ModuleType("megatron_rl.planning.launch_plan"), ModuleType("megatron_rl.runtime.target")
    vars(plan).update(launch_plan=lambda settings, target, replay: {})
    memory, spec = ModuleType("megatron_rl.planning.run_plan"), ModuleType("megatron_rl.models.read_spec")
    vars(memory).update(plan_run=lambda settings, spec, *, gpu, num_nodes: found)
    vars(spec).update(read_model_spec=lambda path: None)
    vars(target).update(find_target=lambda topology, rollout, runtime, *, config_only: None)
    rows = ModuleType("megatron_rl.data.overview")
    vars(rows).update(overview=lambda prompts: {"data.train": "3 prompts"})
    monkeypatch.setattr("megatron_rl.data.source.RunPrompts.read", lambda *args, **kind: None)
    for module in (plan, target, rows, memory, spec):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main(["train", config, "--check", "--config-only", "runtime.cluster.gpu=H100-80"]) == (0 if fits else 2)
    printed = capsys.readouterr()
    assert printed.out.startswith("run:") == fits
    assert printed.out.endswith("# stage 0\n#\n# Check passed: nothing was started, nothing was written.\n" if fits else "# stage 0\n#\n")
    assert fits or printed.err == "megatron-rl: does not fit: 3 of 2; `megatron-rl plan` lists layouts that fit\n"


def test_eval_hands_over_resolved_settings(calls: list[tuple[str, Any]], config: str) -> None:
    assert main(["eval", config, "model.path=other", "eval.sets.a=rows.jsonl"]) == 0
    (first, _), (name, (settings, _)), *rest = calls
    assert (first, name, settings.model.path, rest) == ("prepare_environment", "evaluate", Path("other"), [])
    assert settings.run.directory == Path("other-evaluation")


def test_eval_without_data_is_refused(calls: list[tuple[str, Any]], config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", config]) == 2
    assert "nothing to evaluate on" in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize(
    ("error", "status", "part"),
    [
        (UserError("model.path is bad"), 2, "megatron-rl: model.path is bad\n"),
        (EngineError("the server died"), 1, "megatron-rl: EngineError: the server died\n"),
        (ResumableError("ended; --resume continues after step 3"), 75, "megatron-rl: ended; --resume continues after step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("boom"), 1, "Traceback"),
        # Of a worker, while the output is well.
        (BrokenPipeError(32, "Broken pipe"), 1, "Traceback"),
        # Of a user's own function.
        (SystemExit(1), 1, "Traceback"),
    ],
)
def test_every_end_has_its_status(
    calls: list[tuple[str, Any]],
    config: str,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    part: str,
) -> None:
    def fail(settings: Any, **kind: object) -> None:
        raise error

    vars(sys.modules["megatron_rl.runtime.session"])["train"] = fail
    assert main(["train", config]) == status
    text = capsys.readouterr().err
    assert part in text
    assert ("Traceback" in text) == (part == "Traceback")


@contextmanager
def unread() -> Iterator[None]:
    """Nobody reads the standard output."""
    kept, (read, write) = os.dup(1), os.pipe()
    os.close(read)
    os.dup2(write, 1)
    os.close(write)
    try:
        with open(1, "w", closefd=False) as output, redirect_stdout(output):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["train", "CONFIG", "--check"],
        ["report", "DIRECTORY"],
        ["check-plugin", "plugins_of_user:good"],
    ],
    ids=" ".join,
)
def test_output_that_nobody_reads_ends_a_command_quietly(
    words: list[str], calls: list[tuple[str, Any]], config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_plan(monkeypatch)
    directory = Path(config).parent
    (directory / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    (directory / "plugins_of_user.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(directory)
    with unread():
        assert main([{"CONFIG": config, "DIRECTORY": str(directory)}.get(word, word) for word in words]) == 141
    assert capsys.readouterr().err.replace("megatron-rl: note: mind the gap\n", "") == ""


def test_the_interpreter_does_not_complain_about_a_closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "megatron_rl", "train", "--help"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_sentence_that_nobody_reads_changes_no_status() -> None:
    """Such as the one that says to a scheduler that the run can go on."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "megatron_rl", "train", "nothing.yaml"]
    assert subprocess.run(words, stdout=write, stderr=write, timeout=60).returncode == 2
    os.close(write)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_status(closed: str) -> None:
    done = subprocess.run(f"{sys.executable} -m megatron_rl train nothing.yaml {closed}", shell=True, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2 and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "--chek"], "did you mean --check?"),
        (["eval", "--check"], "Command line: unknown setting check;"),
        (["eval", "--ray-adress"], "did you mean --ray-address?"),
        (["plan", "--sequence-paralel"], "did you mean --sequence-parallel?"),
        (["train", "run.sed=1"], "did you mean run.seed?"),
        (["train"], "run.directory is missing"),
        (["trian"], "No such command 'trian'"),
        (["convert", "a", "b", "--dtype", "int8"], "'float32'; `megatron-rl convert --help` lists what it takes\n"),
        (["train", "nothing.yaml"], "nothing.yaml cannot be read"),
        (["plan", "config.json", "--gpus", "99999999999"], "not in the range"),
        (["doctor", "--directry", "."], "--directory"),
    ],
)
def test_mistakes_end_with_status_2(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert part in captured.err and captured.err.startswith("megatron-rl: ")
    assert "Traceback" not in captured.err and "Usage" not in captured.err
    assert captured.out == ""


def test_no_words_at_all_are_answered_by_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "check-plugin" in capsys.readouterr().err


def test_the_first_page_of_help_is_for_a_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert [path for path in FIRST_RUN if f"  {path} " not in text and f"  {path}\n" not in text] == []
    assert "rollout.sampling.temperature" not in text and "training.schedule" in text and len(text.splitlines()) < 95
    assert main(["train", "--help", "rollout.sampling"]) == 0
    text = capsys.readouterr().out
    assert {line.split()[0] for line in text.splitlines() if line.startswith("  rollout")} == {
        field.path for field in setting_fields() if field.path.startswith("rollout.sampling.")
    }
    assert main(["train", "--help", "trainin"]) == 2
    assert "--help trainin names no section of settings; did you mean training?" in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "all"]) == 0
    text = capsys.readouterr().out
    assert [field.path for field in setting_fields() if f"  {field.path} " not in text and f"  {field.path}\n" not in text] == []
    assert "one of auto, float32, bfloat16" in " ".join(text.split())


@pytest.mark.parametrize("words", [["--help"], ["train", "-h"], ["eval", "--help"], ["doctor", "--help"], ["--version"]])
def test_other_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "megatron-rl" in capsys.readouterr().out


def test_help_starts_nothing_heavy() -> None:
    """The answer to a mistake must not wait for torch."""
    heavy = "[name for name in ('torch', 'ray', 'sglang', 'megatron') if name in sys.modules]"
    code = f"import sys; from megatron_rl.cli import main; main(['train', '--help']); print('heavy:', {heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("heavy: []\n")


SLEEPER = """
import sys, time, types
from megatron_rl.cli import main
def train(settings, **kind):
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
preflight, session = types.ModuleType("preflight"), types.ModuleType("session")
preflight.preflight, session.train = (lambda settings, **keywords: []), train
sys.modules |= {"megatron_rl.runtime.preflight": preflight, "megatron_rl.runtime.session": session}
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.fixture
def sleeper(config: str, hangup_heard: None) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", SLEEPER, config], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("number", "status", "sentence"),
    [
        (signal.SIGTERM, 143, "megatron-rl: ended by SIGTERM\n"),
        (signal.SIGINT, 130, "megatron-rl: interrupted\n"),
        (signal.SIGHUP, 129, "megatron-rl: ended by SIGHUP\n"),
    ],
)
def test_signals_run_the_clean_up(sleeper: "subprocess.Popen[str]", number: signal.Signals, status: int, sentence: str) -> None:
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline().startswith("checking settings")
    assert sleeper.stdout.readline() == "started\n"
    os.kill(sleeper.pid, number)
    out, err = sleeper.communicate(timeout=60)
    assert sleeper.returncode == status
    assert out == "cleaned up\n"
    # click ends the line in which a terminal shows ^C.
    assert err.lstrip("\n") == sentence


def test_report_draws_what_a_run_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl does not exist" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "report.html").exists()
    assert main(["report", str(tmp_path), "--steps", "1-", "--out", str(tmp_path / "some.html")]) == 2
    assert "--steps is '1-', needs one step or two, as in --steps 10-20" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--steps", "1", "--out", str(tmp_path / "some.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/some.html\n"


def test_samples_prints_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(tmp_path)]) == 2
    assert "buffer.sqlite does not exist" in capsys.readouterr().err
    write_buffer(tmp_path, [[group("0-1", ["first", "second", "third", "fourth"], [0.0, 1.0, 0.5, 0.25])]])
    shown = {}
    for words in ((), ("--worst", "1", "--step", "1"), ("--best", "2"), ("--best", "1", "--worst", "1"), ("--group", "0-1")):
        assert main(["samples", str(tmp_path), *words]) == 0
        shown[words] = re.findall(r"answer  (\w+)", capsys.readouterr().out)
    assert list(shown.values()) == [
        ["first", "fourth", "third"],
        ["first"],
        ["second", "third"],
        ["first", "second"],
        ["first", "second", "third", "fourth"],
    ]


PLUGINS = """
from dataclasses import replace
import numpy as np
from megatron_rl.rollout.groups import single_turn

def good(*, sample, weight: float = 1.0):
    return weight * len(sample.response_text)

def infinite(*, sample):
    return float("inf") if sample.response_text else 0.0

async def rollout(**arguments):
    return []

async def chat(*, prompt, generator, sampling, num_samples, tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True)
    return await single_turn(
        prompt=replace(prompt, token_ids=np.array(tokenizer.encode(text))),
        generator=generator,
        sampling=sampling,
        num_samples=num_samples,
        tokenizer=tokenizer,
    )
"""


@pytest.mark.parametrize(
    ("words", "status", "last"),
    [
        (["good", "--args", "weight=2"], 0, "ok      the same response gets the same reward again"),
        (["good", "--args", "weight=x"], 2, "BROKEN  .*called with its arguments: reward.args.weight is 'x', .* needs weight: float"),
        (["infinite"], 2, "BROKEN  any response gets a finite reward: .*plugins_of_user:infinite .* inf, needs a finite number"),
        (
            ["rollout", "--kind", "rollout"],
            2,
            "BROKEN  one prompt becomes .* returned 0 samples of 0 trajectories, needs 1 ",
        ),
    ],
)
def test_a_plugin_is_checked_with_a_line_for_each_promise(
    words: list[str], status: int, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugins_of_user.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-plugin", f"plugins_of_user:{words[0]}", *words[1:]]) == status
    *kept, found, _, verdict = capsys.readouterr().out.splitlines()
    assert re.match(last, found) and all(line.startswith("ok ") for line in kept)
    assert verdict.endswith("something broken" if status else "passed")


def test_a_chat_rollout_is_checked_with_a_models_template(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugins_of_user.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    words, model = ["check-plugin", "plugins_of_user:chat"], tiny_model()
    assert main(words) == 2
    assert "needs a model's; give its directory by --model DIR" in capsys.readouterr().out
    assert main([*words, "--model", str(model)]) == 2
    assert "chat_template is not set" in capsys.readouterr().out
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}=")
    assert main([*words, "--model", str(model)]) == 0, capsys.readouterr().out
    assert main(["check-plugin", "plugins_of_user:good", "--model", str(model)]) == 2
    assert "the kind reward gets no tokenizer" in capsys.readouterr().err


def test_a_plugin_of_no_kind_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugins_of_user.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-plugin", "plugins_of_user:rollout"]) == 2
    assert "takes arguments, needs the arguments of one kind: reward(sample); rollout(prompt, " in capsys.readouterr().err


def test_weights_only_needs_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--weights-only"]) == 2
    assert "--weights-only was given without --resume" in capsys.readouterr().err


def test_a_replay_is_checked_as_one_without_engines(
    calls: list[tuple[str, Any]], config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.cli.opened", lambda path: nullcontext())
    assert main(["train", config, "--replay", str(tmp_path)]) == 0 and main(["train", config]) == 0
    assert [asked["replay"] for name, (_, asked) in calls if name == "preflight"] == [tmp_path, None]


def test_a_replay_needs_a_record_of_samples(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--replay", "runs/x", "objective.policy_loss=sft"]) == 2
    assert "--replay is runs/x, but supervised training takes no samples" in capsys.readouterr().err
    assert main(["train", config, "--check", "--replay", "runs/x"]) == 2
    assert "runs/x does not exist, needs the buffer of a run" in capsys.readouterr().err


def test_output_without_a_character_for_a_letter_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["--help"]) == 0
    print("mean |\N{GREEK CAPITAL LETTER DELTA} log-prob| 1e-7", flush=True)
    assert b"mean |? log-prob| 1e-7" in stream.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [(), ("data.source=my:Source", "data.args={a: 1}"), ("data.train=gone.jsonl",)])
def test_an_evaluation_asks_for_no_training_rows(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated: list[Settings] = []
    monkeypatch.setattr("megatron_rl.cli._session", lambda _settings: SimpleNamespace(evaluate=lambda one: evaluated.append(one) or []))
    (tmp_path / "run" / "huggingface").mkdir(parents=True)
    models = [str(tmp_path / "run"), str(tmp_path / "other")]
    assert main(["eval", *models, "--data", "held-out.1.jsonl", "--samples", "4", "eval.sets.held-out_1.sampling.top_p=0.5", *given]) == 0
    assert [str(each.model.path) for each in evaluated] == [f"{models[0]}/huggingface", models[1]]
    assert [str(each.run.directory) for each in evaluated] == [f"{models[0]}/huggingface-evaluation", f"{models[1]}-evaluation"]
    for settings in evaluated:
        (held_out,) = settings.eval.sets.values()
        assert (held_out.data, held_out.samples, held_out.sampling.top_p) == (Path("held-out.1.jsonl"), 4, 0.5)
