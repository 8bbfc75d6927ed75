from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.algorithms.policy_loss import Cispo, Clip
from megatron_rl.config.load import dump_settings, load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError

SMALLEST = "run: {directory: runs/x}\nmodel: {path: model}\ndata: {train: train.jsonl}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def message(path: Path | None, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_settings(path, overrides)
    return str(caught.value)


def test_file_and_overrides_make_settings(tmp_path: Path) -> None:
    settings = load_settings(
        write(tmp_path, SMALLEST + "training: {optimizer: {lr: 1e-6}}\n"), ["run.seed=7", "training.optimizer.min_lr=1e-7"]
    )
    assert settings.run.seed == 7
    assert settings.run.directory == Path("runs/x")
    assert settings.training.optimizer == {"lr": 1e-6, "min_lr": 1e-7}


def test_overrides_alone_are_enough() -> None:
    settings = load_settings(None, ["run.directory=r", "model.path=m", "data.train=t", "rollout.sampling.stop=['\\n', x]"])
    assert settings.rollout.sampling.stop == ("\\n", "x")


def test_saved_settings_are_read_back_equal(settings_with: Callable[..., Settings], tmp_path: Path) -> None:
    settings = settings_with(
        "objective.preset=dapo",
        "objective.policy_loss.high=null",
        "objective.off_policy={mode: truncate, high: 2.0}",
        "rollout.sglang.mem_fraction_static=0.5",
        "rollout.sampling.stop=['1e-6', 'null', '~']",
        "eval.sets={a: '3', b: {data: d, samples: 8, interval: 0, sampling: {temperature: 0, stop: ['1']}, reward: {function: 'm:f'}}}",
        "eval.interval=5",
    )
    text = dump_settings(settings)
    assert load_settings(write(tmp_path, text)) == settings
    assert dump_settings(load_settings(write(tmp_path, text))) == text


def test_saved_supervised_settings_are_read_back_equal(settings_with: Callable[..., Settings], tmp_path: Path) -> None:
    settings = settings_with("objective.policy_loss=sft")
    assert load_settings(write(tmp_path, dump_settings(settings))) == settings


def test_preset_fills_and_explicit_fields_win(settings_with: Callable[..., Settings]) -> None:
    objective = settings_with("objective.preset=dapo", "objective.policy_loss.low=0.1").objective
    assert (objective.aggregation, objective.policy_loss) == ("token_mean", Clip(low=0.1, high=0.28))
    assert settings_with("objective.preset=null").objective == settings_with().objective


def test_another_kind_starts_from_its_own_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST + "objective: {preset: dapo, policy_loss: {kind: clip, low: 0.1, dual_clip: 3.0}}\n")
    assert load_settings(path, ["objective.policy_loss.high=0.3"]).objective.policy_loss == Clip(low=0.1, high=0.3, dual_clip=3.0)
    assert load_settings(path, ["objective.policy_loss.kind=cispo"]).objective.policy_loss == Cispo()
    again = ["objective.policy_loss.kind=cispo", "objective.policy_loss.high=2.0"]
    assert load_settings(path, again).objective.policy_loss == Cispo(high=2.0)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.sed=1", ["unknown setting run.sed", "did you mean run.seed?"]),
        ("trainig.topology.tp=2", ["unknown setting trainig", "did you mean training?"]),
        ("run.temperature=1", ["unknown setting run.temperature", "did you mean rollout.sampling.temperature?"]),
        ("objective.policy_los=clip", ["did you mean objective.policy_loss?"]),
        ("objective.advantage.knid=group", ["did you mean objective.advantage.kind?"]),
        ("rollout.sampling.repetition_penalty=1.1", ["repetition_penalty; there is none because a penalty changes logits by the tokens"]),
        ("rollout.sampling.presence_penalti=1", ["presence_penalti, meant as presence_penalty; there is none because a penalty"]),
        ("rollout.sampling.logit_bias={'5': 1}", ["logit_bias; there is none because a bias changes logits", "eval.sets.NAME.sampling"]),
        ("rollout.sampling.topp=0.9", ["did you mean rollout.sampling.top_p?"]),
        ("rollout.sampling.top_p=0", ["rollout.sampling.top_p is 0", "> 0"]),
        ("rollout.sampling.top_k=1", ["rollout.sampling.top_k is 1", ">= 2"]),
        ("rollout.sampling.min_p=1", ["rollout.sampling.min_p is 1", "< 1"]),
        ("rollout.sampling.top_k=4097", ["rollout.sampling.top_k is 4097", "at most 4096", "to 4096 or less, or raise"]),
        ("rollout.sampling.stops=[x]", ["did you mean rollout.sampling.stop?"]),
        ("run.lr=1e-6", ["did you mean training.optimizer.lr?"]),
        ("rollout.tensor_parallel_size=2", ["did you mean rollout.sglang.tp_size?"]),
        ("rollout.sampling.max_tokens=9", ["did you mean rollout.sampling.max_response_tokens?"]),
        ("zzz=1", ["unknown setting zzz", "known in the settings: run, model"]),
        ("run.seed=true", ["run.seed is true (boolean), needs an integer >= 0"]),
        ("run.seed='3'", ["run.seed is '3' (string), needs an integer >= 0"]),
        ("run.seed=1.5", ["run.seed is 1.5 (number), needs an integer >= 0"]),
        ("run.seed=-1", ["run.seed is -1 (integer), needs an integer >= 0"]),
        ("run.seed=12345678901234567890", ["run.seed is 12345678901234567890, needs an integer of at most 2147483647"]),
        ("run.seed=null", ["run.seed is null, needs an integer >= 0"]),
        ("run=5", ["run is 5 (integer), needs a section"]),
        ("objective=5", ["objective is 5 (integer), needs a section"]),
        ("model.dtype=floatt32", ["needs one of auto, float32, bfloat16; did you mean model.dtype=float32?"]),
        (
            "objective.advantage=grp",
            ["overrides: objective.advantage.kind is grp (string), needs one of group, ", "did you mean objective.advantage.kind=group?"],
        ),
        ("objective.policy_loss=clp", ["overrides: objective.policy_loss.kind is clp (string), needs one of clip, ", "kind=clip?"]),
        ("objective.policy_loss.kind=7", ["objective.policy_loss.kind is '7' (string), needs one of clip, "]),
        ("objective.policy_loss=7", ["objective.policy_loss is 7 (integer), needs a"]),
        ("objective.policy_loss=value", ["objective.policy_loss.kind is value (string), needs one of clip, "]),
        ("objective.policy_loss.low=-1", ["objective.policy_loss.low is -1 (integer), needs a number >= 0, or null"]),
        (
            "objective.policy_loss.tau_positive=2",
            [
                "unknown setting objective.policy_loss.tau_positive of objective.policy_loss.kind clip",
                "argument of sapo: set objective.policy_loss.kind=sapo",
            ],
        ),
        (
            "objective.policy_loss={kind: cispo, dual_clip: 3}",
            ["of objective.policy_loss.kind cispo", "an argument of clip, clip_cov: set"],
        ),
        ("objective.policy_loss={kind: cispo, hgih: 3}", ["did you mean objective.policy_loss.high?"]),
        ("objective.dual_clip=3", ["did you mean objective.policy_loss.dual_clip of objective.policy_loss.kind clip, clip_cov?"]),
        ("objective.value_clip=3", ["did you mean objective.advantage.value_clip of objective.advantage.kind gae?"]),
        ("objective.advantage.gamma=1", ["of objective.advantage.kind group", "an argument of reinforce_plus_plus, gae: set"]),
        ("objective.lam=1", ["did you mean objective.advantage.lam of objective.advantage.kind gae?"]),
        ("objective.clip_high=0.3", ["did you mean objective.policy_loss.high"]),
        ("objective.kl_loss_coef=0.3", ["did you mean objective.kl.coef?"]),
        ("objective.loss_args.dual_clip=3", ["did you mean objective.policy_loss?"]),
        ("objective.kl.estimator=k2", ["objective.kl.coef is missing (Coefficient of the KL", "with objective.kl.coef=VALUE"]),
        (
            "objective.entropy.control.target=1",
            ["objective.entropy.control.kind is missing, needs one of trl, skywork, paper, clip_high; set"],
        ),
        ("objective.entropy.control={kind: trl, initial: 1}", ["of objective.entropy.control.kind trl", "an argument of clip_high: set"]),
        ("objective.entropy.mode=matched", ["objective.entropy.coef is 0 without a control", "null switches it off"]),
        ("objective.preset=drgpo", ["objective.preset", "did you mean 'dr_grpo'?"]),
        ("objective.policy_loss.dual_clip=0.5", ["objective.policy_loss.dual_clip is 0.5 (number), needs a number > 1"]),
        ("objective.off_policy.mode=mask", ["objective.off_policy: ", "has no bound"]),
        ("model.path=3", ["model.path is 3 (integer), needs a path", "model.path='\"3\"'"]),
        ("rollout.sampling.stop=x", ["rollout.sampling.stop is x (string), needs a list of string"]),
        ("rollout.sampling.stop=[1]", ["rollout.sampling.stop.0 is 1 (integer), needs a string"]),
        ("rollout.sglang=[1]", ["rollout.sglang is [1] (list), needs a mapping"]),
        ("training.topology.etp=x", ["training.topology.etp is x (string), needs an integer >= 1, or null"]),
        (
            "objective.advantage={kind: gdpo, reward_weights: 2}",
            ["objective.advantage.reward_weights is 2 (integer), needs a list of number"],
        ),
        (
            "objective.advantage={kind: group, scale: batc_std}",
            ["objective.advantage.scale is batc_std", "did you mean objective.advantage.scale=batch_std?"],
        ),
    ],
)
def test_mistakes_name_the_setting_and_the_fix(tmp_path: Path, override: str, parts: list[str]) -> None:
    text = message(write(tmp_path, SMALLEST), override)
    assert all(part in text for part in parts), text
    assert "\n" not in text


def test_missing_settings_and_other_mistakes_are_told_together(tmp_path: Path) -> None:
    lines = message(write(tmp_path, "run: {sed: 1}\nmodel: {path: m}\n")).split("\n")
    assert lines[0].endswith("3 things are wrong")
    assert "run.directory is missing" in lines[1]
    assert "with run.directory=VALUE" in lines[1]
    assert "unknown setting run.sed" in lines[2]
    assert "data.train is missing" in lines[3]


def test_contradictions_are_told_together(tmp_path: Path) -> None:
    text = message(write(tmp_path, SMALLEST), "training.optimizer_steps_per_batch=3", "training.topology.sequence_parallel=true")
    assert "2 things are wrong" in text
    assert "64 prompts × 8 samples = 512, not divisible by 3 optimizer steps" in text


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"- a\n", "holds list, needs a mapping"), (b"\xff\xfe", "not UTF-8"), (b"run:\n\tseed: 1\n", "line 2")],
)
def test_bad_files_are_told(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    assert part in message(path)


def test_missing_file_is_told(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in message(tmp_path / "nothing.yaml")
    assert "cannot be read (Is a directory)" in message(tmp_path)


def test_empty_file_asks_for_what_is_missing(tmp_path: Path) -> None:
    assert "run.directory is missing" in message(write(tmp_path, "# nothing yet\n"))
