"""Values that slime and verl have where a script leaves them open, and words that are not known."""

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.config.load import validate_settings
from megatron_rl.importers import slime, verl
from megatron_rl.importers.translation import Translation, _nested

ACTOR, ROLLOUT, RATIO = verl._ACTOR, verl._ROLLOUT, "algorithm.rollout_correction"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
ASYNC = "python train_async.py --prompt-data t --actor-num-gpus-per-node"
CLUSTER = "runtime.cluster"


def read(tmp_path: Path, module: Any, text: str, **given: str) -> Translation:
    (tmp_path / "run.sh").write_text(text)
    found: Translation = module.translate(tmp_path / "run.sh", given=given, model=None)
    return found


def run(words: str, entry: str = "verl.trainer.main_ppo") -> str:
    return f"python -m {entry} data.train_files=t algorithm.adv_estimator=grpo {words}"


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "verl leaves open": (
        verl,
        run("data.val_files=/v.parquet"),
        {
            "training.optimizer.lr": 1e-6,
            "eval.interval": 0,
            "run.save_interval": 0,
            "eval.sets.v": {"data": "/v.parquet", "samples": 1, "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}},
        },
    ),
    "verl samples held-out rows without do_sample": (
        verl,
        run(f"data.val_files=a/v.parquet {ROLLOUT}.val_kwargs.temperature=0.6 {ROLLOUT}.val_kwargs.top_k=20 {ROLLOUT}.val_kwargs.n=8"),
        {"eval.sets.a-v": {"data": "a/v.parquet", "samples": 8, "sampling": {"temperature": 0.6, "top_p": 1.0, "top_k": 20}}},
    ),
    "verl bounds": (verl, run(f"{ACTOR}.clip_ratio=0.1"), {"objective.policy_loss.low": 0.2, "objective.policy_loss.high": 0.2}),
    "verl null bounds": (
        verl,
        run(f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=0.3"),
        {"objective.policy_loss.low": 0.1, "objective.policy_loss.high": 0.3},
    ),
    "verl weights": (
        verl,
        run(f"{RATIO}.rollout_is=sequence {RATIO}.rollout_is_threshold=3"),
        {"objective.off_policy.mode": "truncate", "objective.off_policy.level": "sequence", "objective.off_policy.high": 3.0},
    ),
    "verl bypass": (
        verl,
        run(f"{RATIO}.rollout_is=token {RATIO}.bypass_mode=True {ACTOR}.policy_loss.loss_mode=gspo"),
        {"objective.proximal": "rollout", "objective.off_policy.mode": None, "objective.policy_loss.dual_clip": 3.0},
    ),
    "verl one step": (verl, run("", ONE_STEP), {"objective.proximal": "rollout", "rollout.max_staleness": 1, f"{CLUSTER}.num_nodes": 2}),
    "verl one step weighed": (
        verl,
        run(f"{RATIO}.bypass_mode=False {RATIO}.rollout_is=token", ONE_STEP),
        {"objective.proximal": None, "objective.off_policy.high": 2.0},
    ),
    "verl nodes shared": (
        verl,
        run("trainer.nnodes=2 trainer.n_gpus_per_node=6 rollout.nnodes=2 rollout.n_gpus_per_node=2", ONE_STEP),
        {f"{CLUSTER}.num_nodes": 2, f"{CLUSTER}.gpus_per_node": 8, "training.topology.num_ranks": 12, "rollout.num_engines": 2},
    ),
    "verl nodes apart": (
        verl,
        run("trainer.nnodes=2 rollout.nnodes=2", ONE_STEP),
        {f"{CLUSTER}.num_nodes": 4, f"{CLUSTER}.gpus_per_node": 8, "rollout.num_engines": 8},
    ),
    "verl experts shared by copies": (
        verl,
        run(f"{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.data_parallel_size=4 {ROLLOUT}.expert_parallel_size=8 trainer.nnodes=2"),
        {"rollout.num_engines": 2, "rollout.sglang.tp_size": 8, "rollout.sglang.dp_size": 4, "rollout.sglang.ep_size": 8},
    ),
    "verl copies": (
        verl,
        run(f"{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.data_parallel_size=2"),
        {"rollout.num_engines": 4, "rollout.sglang.tp_size": 2, "rollout.sglang.dp_size": None},
    ),
    "verl after another command": (
        verl,
        "python -m verl.model_merger merge --a x=1\n" + run("data.train_batch_size=64"),
        {"data.prompts_per_step": 64},
    ),
    "verl critic": (verl, "python -m verl.trainer.main_ppo data.train_files=t", {"training.critic.optimizer.lr": 1e-5}),
    "slime leaves open": (slime, "python train.py --prompt-data t", {"eval.interval": 0, "run.save_interval": 0}),
    "slime one file": (
        slime,
        "python train.py --prompt-data t --eval-prompt-data a.jsonl",
        {"eval.sets.aime": {"data": "a.jsonl", "samples": 1, "sampling": {}}},
    ),
    "slime one node": (
        slime,
        f"{ASYNC} 1 --rollout-num-gpus 3",
        {f"{CLUSTER}.num_nodes": 1, f"{CLUSTER}.gpus_per_node": 4, "rollout.num_engines": 3},
    ),
    "slime nodes": (slime, f"{ASYNC} 8 --rollout-num-gpus 12", {f"{CLUSTER}.num_nodes": 3, f"{CLUSTER}.gpus_per_node": 8}),
    "slime sft": (
        slime,
        f"{ASYNC} 8 --loss-type sft_loss --calculate-per-token-loss --use-rollout-logprobs",
        {"objective.aggregation": "token_mean", "objective.proximal": None, "rollout.max_staleness": None, f"{CLUSTER}.num_nodes": 1},
    ),
    "slime critic": (
        slime,
        "python train.py --advantage-estimator ppo --lr 3e-6 --min-lr 1e-7 --num-critic-only-steps 5 --num-steps-per-rollout 2",
        {"training.critic.optimizer.lr": 3e-6, "training.critic.optimizer.min_lr": 1e-7, "training.critic.warmup_steps": 10},
    ),
    "slime cispo": (
        slime,
        "python train.py --prompt-data t --n-samples-per-prompt 8 --advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0",
        {"objective.policy_loss.kind": "cispo", "objective.policy_loss.low": None, "objective.policy_loss.high": 4.0},
    ),
    "slime rollout log-probs": (
        slime,
        "python train.py --prompt-data t --n-samples-per-prompt 8 --use-rollout-logprobs --use-opsm --opsm-delta 0.01",
        {"objective.proximal": "rollout", "objective.off_policy.opsm": 0.01},
    ),
    "slime prompts": (slime, "python train.py --prompt-data t --rollout-max-prompt-len 99", {"data.overlong": "drop"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_means_the_same(tmp_path: Path, name: str) -> None:
    module, text, expected = CASES[name]
    t = read(tmp_path, module, text)
    assert {path: t.settings.get(path) for path in expected} == expected
    samples = {} if "objective.policy_loss" in t.settings else {"data.samples_per_prompt": 8}
    validate_settings(_nested({"run.directory": "r", "model.path": "m", "data.train": "t", **t.settings, **samples}), origin="test")


LEFT: dict[str, tuple[Any, str, str, str]] = {
    "words of a list": (verl, run("$EXTRA"), "⟨EXTRA⟩", "give EXTRA=VALUE after it, or an empty value"),
    "a value within a list": (verl, f'C="{ACTOR}.optim.lr=2e-6 actor_rollout_ref.model.path=$P"\n' + run("$C"),
                              "actor_rollout_ref.model.path", "give P=VALUE"),
    "ranks": (verl, run(f"{ACTOR}.megatron.tensor_model_parallel_size=$TP"), f"{ACTOR}.megatron.tensor_model_parallel_size", "TP=VALUE"),
    "bounds that do not count": (verl, run(f"{ACTOR}.clip_ratio=0.1"), f"{ACTOR}.clip_ratio=0.1", "clip_ratio_low"),
    "epochs beside steps": (verl, run("trainer.total_epochs=2 trainer.total_training_steps=9"), "trainer.total_epochs=2", "run.num_steps"),
    "a loss of bypass mode": (verl, run(f"{ACTOR}.policy_loss.loss_mode=gspo", ONE_STEP), f"{ACTOR}.policy_loss.loss_mode=gspo", "bypass"),
    "rejection": (verl, run(f"{RATIO}.rollout_rs=token_k1"), f"{RATIO}.rollout_rs token_k1", "mode mask"),
    "moments": (verl, run(f"'{ACTOR}.optim.betas=[0.9,0.98]'"), f"{ACTOR}.optim.betas [0.9,0.98]", "adam_beta2"),
    "an if": (slime, "A=1\nif x; then A=2; fi\npython train.py --prompt-data t --num-rollout $A", "A=2", "in an if or a loop"),
    "a batch": (slime, "python train.py --rollout-batch-size ${BS} --global-batch-size 8", "rollout-batch-size", "give BS=VALUE"),
    "a warmup": (slime, "python train.py --num-rollout ${N} --lr-warmup-fraction 0.1", "lr-warmup-fraction 0.1", "warmup_steps"),
    "a held-out file": (slime, "python train.py --eval-prompt-data aime $D/a.jsonl", "eval-prompt-data aime ⟨D⟩/a.jsonl", "give D=VALUE"),
    "a word without a place": (slime, "python train.py --moe-layer-freq $M", "moe-layer-freq ⟨M⟩", "read from config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_over_says_why(tmp_path: Path, name: str) -> None:
    module, text, word, reason = LEFT[name]
    t = read(tmp_path, module, text)
    assert reason in t.left[word] and "eval.sets.aime" not in t.settings
    if name == "a value within a list":
        assert t.settings["training.optimizer.lr"] == 2e-6


def test_what_differs_is_said_where_it_does(tmp_path: Path) -> None:
    assert "weight" in read(tmp_path, verl, run("data.train_files=[a,b]")).differs["data.train_files"]
    assert "asynchronous training" not in read(tmp_path, verl, run("", ONE_STEP)).differs
    assert "asynchronous training" in read(tmp_path, verl, run(f"{RATIO}.bypass_mode=False", ONE_STEP)).differs
    assert "no rollout-max-prompt-len" in read(tmp_path, slime, "python train.py").differs


def test_the_working_directory_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("D=${DATA:-$PWD}\n" + run("data.val_files=$D/v.parquet"))
    monkeypatch.chdir(tmp_path)
    assert main(["import", "verl", "run.sh"]) == 0
    assert f"data: {tmp_path}/v.parquet" in capsys.readouterr().out
