"""Scripts of our own with the arguments that slime's and verl's have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.cli import main
from megatron_rl.config.load import load_settings, validate_settings
from megatron_rl.config.settings_reference import setting_fields
from megatron_rl.errors import UserError
from megatron_rl.importers import slime, verl
from megatron_rl.importers.translation import Rule, Translation, _nested

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
SLIME = """
NUM_GPUS=${NUM_GPUS:-8}
source "$(dirname "$0")/model.sh"
ARGS=(
   --hf-checkpoint /models/Qwen3-4B
   --ref-load /models/Qwen3-4B_dist
   --save runs/mine
   --prompt-data rows.jsonl
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rm-type math
   --num-rollout 300
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --rollout-temperature 1
   --global-batch-size 128
   --eval-interval 20
   --eval-prompt-data aime aime.jsonl math math.jsonl
   --n-samples-per-eval-prompt 16
   --eval-top-p 0.7
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.01
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
   --lr 1e-6
   --weight-decay 0.1
   --lr-warmup-fraction 0.1
   --tensor-model-parallel-size 2
   --sequence-parallel
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --max-tokens-per-gpu 9216
   --sglang-mem-fraction-static 0.7
   --optimizer-cpu-offload
   --balance-data
   --no-such-thing 7
)
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node ${NUM_GPUS} --colocate \\
   --rollout-num-gpus-per-engine 2 ${MODEL_ARGS[@]} ${ARGS[@]} ${EXTRA}
"""
MODEL = """
MODEL_ARGS=(
   --swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
   --num-query-groups 8 --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm
)
"""
VERL = """
max_prompt_length=$((1024 * 2))
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['a.parquet', 'b.parquet']" \\
    data.val_files=held/test.parquet \\
    data.train_batch_size=512 \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=4096 \\
    data.truncation='left' \\
    actor_rollout_ref.model.path=/models/Qwen3-4B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.rollout.top_k=-1 \\
    actor_rollout_ref.rollout.val_kwargs.n=4 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.rollout.val_kwargs.temperature=0.8 \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name=mine \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
MINIMAL = {"run.directory": "r", "model.path": "m", "data.train": "t"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the config.json of Qwen3-4B."""
    directory = tmp_path / "Qwen3-4B"
    directory.mkdir()
    (directory / "config.json").write_text((CONFIGS / "Qwen3-4B.json").read_text())
    return directory


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, *, model: str = MODEL, name: str = "run.sh") -> Path:
        (tmp_path / "model.sh").write_text(model)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def translated(module: Any, path: Path, model: Path | None = None, **given: str) -> Translation:
    found: Translation = module.translate(path, given=given, model=model)
    return found


def test_a_script_of_slime(script: Callable[..., Path], model: Path) -> None:
    t = translated(slime, script(SLIME), model, EXTRA="")
    sampling = {"top_p": 0.7}
    assert t.settings == {
        "run.directory": "runs/mine", "run.save_interval": 0, "run.num_steps": 300, "model.path": str(model), "data.train": "rows.jsonl",
        "data.prompt_key": "prompt", "data.label_key": "label", "data.shuffle": True, "data.prompts_per_step": 32,
        "data.samples_per_prompt": 8, "rollout.sampling.max_response_tokens": 4096, "rollout.sampling.temperature": 1.0,
        "eval.interval": 20, "eval.sets.aime": {"data": "aime.jsonl", "samples": 16, "sampling": sampling},
        "eval.sets.math": {"data": "math.jsonl", "samples": 16, "sampling": sampling},
        "objective.aggregation": "sequence_mean_token_mean", "objective.policy_loss.low": 0.2, "objective.policy_loss.high": 0.28,
        "objective.kl.coef": 0.01, "objective.kl.estimator": "low_variance", "training.schedule.decay_style": "linear",
        "training.optimizer.lr": 1e-6, "training.optimizer.weight_decay": 0.1, "training.optimizer_steps_per_batch": 2,
        "training.schedule.warmup_steps": 60, "training.topology.tp": 2, "training.topology.sequence_parallel": True,
        "training.topology.num_ranks": 8, "training.max_tokens_per_micro_batch": 9216,
        "model.megatron.recompute_granularity": "full", "model.megatron.recompute_method": "uniform",
        "model.megatron.recompute_num_layers": 1, "rollout.num_engines": 4, "rollout.sglang.tp_size": 2,
        "rollout.sglang.mem_fraction_static": 0.7, "runtime.colocate": True, "runtime.cluster.num_nodes": 1,
        "runtime.cluster.gpus_per_node": 8,
    }  # fmt: skip
    text = t.text("run.sh")
    assert "ref-load /models/Qwen3-4B_dist: weights come from model.path" in text and "no-such-thing: not known here" in text
    assert "optimizer-cpu-offload true: the optimizer's state stays" in text and "rm-type math: reward.function is math-verify's" in text
    assert t.words == {} and "num-layers" not in text


def test_an_engine_larger_than_a_node_is_on_several(script: Callable[..., Path], model: Path) -> None:
    sizes = ("rollout.sglang.tp_size", "rollout.sglang.nnodes", "rollout.num_engines")
    t = translated(
        slime, script(SLIME.replace("engine 2", "engine 16").replace("--actor-num-nodes 1", "--actor-num-nodes 4")), model, EXTRA=""
    )
    assert [t.settings[name] for name in sizes] == [16, 2, 2]
    t = translated(verl, script(VERL.replace("rollout.tensor_model_parallel_size=4", "rollout.tensor_model_parallel_size=16")), model)
    assert [t.settings[name] for name in sizes] == [16, 2, 1]


def test_a_script_of_verl(script: Callable[..., Path], model: Path) -> None:
    t = translated(verl, script(VERL), model)
    sampling = {"temperature": 0.8, "top_p": 1.0, "top_k": 0}
    assert t.settings == {
        "run.directory": "runs/run", "model.path": str(model), "data.train": [{"path": "a.parquet"}, {"path": "b.parquet"}],
        "data.label_key": "reward_model.ground_truth", "data.prompts_per_step": 512, "data.samples_per_prompt": 16,
        "data.max_prompt_tokens": 2048, "data.overlong": "truncate", "rollout.sampling.max_response_tokens": 4096,
        "eval.interval": 5, "eval.sets.held-test": {"data": "held/test.parquet", "samples": 4, "sampling": sampling},
        "run.save_interval": 0,
        "objective.aggregation": "token_mean", "objective.policy_loss.low": 0.2, "objective.policy_loss.high": 0.28,
        "objective.policy_loss.dual_clip": 3.0, "training.optimizer.lr": 1e-6, "training.optimizer_steps_per_batch": 4,
        "training.optimizer.weight_decay": 0.01,
        "model.megatron.recompute_granularity": "full", "model.megatron.recompute_method": "uniform",
        "model.megatron.recompute_num_layers": 1, "training.topology.tp": 2, "training.topology.sequence_parallel": True,
        "training.topology.num_ranks": 16, "rollout.num_engines": 4, "rollout.sglang.tp_size": 4, "runtime.colocate": True,
        "runtime.cluster.num_nodes": 2, "runtime.cluster.gpus_per_node": 8, "observe.wandb_project": "mine",
    }  # fmt: skip
    text = t.text("run.sh")
    assert "trainer.total_epochs=15: set run.num_steps to rows x epochs / data.prompts_per_step" in text
    assert "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2: the reference has the policy's layout" in text


@pytest.mark.parametrize(("module", "text"), [(slime, SLIME), (verl, VERL)])
def test_what_comes_out_is_read_as_settings(script: Callable[..., Path], tmp_path: Path, module: Any, text: str) -> None:
    path = script(text)
    (tmp_path / "out.yaml").write_text(translated(module, path).text(str(path)))
    settings = load_settings(tmp_path / "out.yaml", on_gpus=True)
    assert settings.data.samples_per_prompt in (8, 16) and settings.objective.policy_loss.high == 0.28  # type: ignore[union-attr]


def test_a_yaml_file_of_verl_says_the_same(script: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_files: [a.parquet], train_batch_size: 64, max_response_length: 99}\n"
        "actor_rollout_ref: {rollout: {n: 4}, actor: {ppo_mini_batch_size: 32, policy_loss: {loss_mode: gspo}, clip_ratio_low: 3.0e-4}}\n"
        "algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}\n"
    )
    t = translated(verl, path)
    assert (t.settings["data.train"], t.settings["data.samples_per_prompt"]) == ("a.parquet", 4)
    assert t.settings["objective.policy_loss.ratio_level"] == "sequence" and t.settings["objective.policy_loss.low"] == 3e-4
    assert "objective.policy_loss.dual_clip" not in t.settings and t.settings["objective.advantage.scale"] == "none"


OBJECTIVES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "slime grpo": (slime, "--kl-coef 0", {"objective.policy_loss.high": 0.2}),
    "slime kl measured": (slime, "--use-kl-loss --kl-loss-coef 0.00", {"training.reference_interval": 1}),
    "slime tokens": (slime, "--calculate-per-token-loss", {"objective.aggregation": "token_mean"}),
    "slime tis": (slime, "--use-tis --tis-clip 3", {"objective.off_policy.mode": "truncate", "objective.off_policy.high": 3.0}),
    "slime gspo": (slime, "--advantage-estimator gspo --eps-clip 3e-4", {"objective.preset": "gspo", "objective.policy_loss.low": 3e-4}),
    "slime dapo": (slime, "--dynamic-sampling-filter-path a.b.check_reward_nonzero_std", {"objective.zero_variance": "resample"}),
    "slime sft": (slime, "--loss-type sft_loss --use-kl-loss", {"objective.policy_loss": "sft"}),
    "slime dual": (
        slime,
        "--eps-clip-c 4.0 --entropy-coef 0.01",
        {"objective.policy_loss.dual_clip": 4.0, "objective.entropy.mode": "matched"},
    ),
    "slime whitened": (
        slime,
        "--advantage-estimator reinforce_plus_plus_baseline",
        {"objective.advantage.kind": "reinforce_plus_plus_baseline"},
    ),
    "verl ppo": (verl, "", {"objective.advantage.kind": "gae"}),
    "verl kl": (verl, f"{verl._ACTOR}.use_kl_loss=True", {"objective.kl.coef": 0.001, "objective.kl.estimator": "low_variance"}),
    "verl kl +": (verl, f"{verl._ACTOR}.use_kl_loss=True {verl._ACTOR}.kl_loss_type=k1+", {"objective.kl.estimator": "k2"}),
    "verl mse": (verl, f"{verl._ACTOR}.use_kl_loss=True {verl._ACTOR}.kl_loss_type=mse", {"objective.kl.estimator": "k2"}),
    "verl rewards": (
        verl,
        "algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2",
        {
            "objective.kl_reward.coef": 0.001,
            "objective.kl_reward.estimator": "low_variance",
            "objective.kl_reward.control": {"target": 0.2, "horizon": 10000.0},
        },
    ),
    "verl values": (
        verl,
        "algorithm.lam=0.95 algorithm.gamma=0.99",
        {"objective.advantage.lam": 0.95, "objective.advantage.gamma": 0.99, "objective.advantage.value_clip": 0.5},
    ),
    "verl cispo": (
        verl,
        f"algorithm.adv_estimator=grpo {verl._ACTOR}.policy_loss.loss_mode=cispo {verl._ACTOR}.clip_ratio_low=10",
        {"objective.policy_loss.low": None, "objective.policy_loss.high": 0.2},
    ),
    "verl gspo": (
        verl,
        f"algorithm.adv_estimator=grpo {verl._ACTOR}.policy_loss.loss_mode=gspo",
        {"objective.aggregation": "sequence_mean_token_mean"},
    ),
    "slime ppo": (
        slime,
        "--advantage-estimator ppo --kl-coef 0.1 --kl-loss-type k2 --gamma 0.9",
        {
            "objective.advantage.lam": 1.0,
            "objective.advantage.gamma": 0.9,
            "objective.advantage.whiten": False,
            "objective.kl_reward.estimator": "k2",
        },
    ),
    "verl sums": (
        verl,
        f"algorithm.adv_estimator=rloo {verl._ACTOR}.loss_agg_mode=seq-mean-token-sum",
        {"objective.advantage.kind": "rloo", "objective.aggregation": "sequence_mean_token_sum"},
    ),
    "verl groups": (
        verl,
        "algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True",
        {"objective.zero_variance": "resample"},
    ),
    "verl gmpo": (
        verl,
        f"algorithm.adv_estimator=grpo {verl._ACTOR}.policy_loss.loss_mode=geo_mean",
        {"objective.policy_loss.kind": "gmpo", "objective.policy_loss.high": 0.2, "objective.aggregation": "sequence_mean_token_mean"},
    ),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_mean_the_same(script: Callable[..., Path], name: str) -> None:
    module, words, expected = OBJECTIVES[name]
    start = "python train.py --prompt-data t --n-samples-per-prompt 8 "
    if module is verl:
        start = f"python -m verl.trainer.main_ppo data.train_files=t {verl._ROLLOUT}.n=8 "
    t = translated(module, script(start + words))
    assert {path: t.settings.get(path) for path in expected} == expected
    objective = validate_settings(_nested({**MINIMAL, **t.settings}), origin="test").objective
    assert isinstance(objective, Objective)


def test_schedules_of_verl_count_rollouts(script: Callable[..., Path]) -> None:
    """Four optimizer steps a rollout; the actor learns from rollout number critic_warmup on."""
    optim = f"{verl._ACTOR}.optim"
    text = (
        f"python -m verl.trainer.main_ppo data.train_files=t data.train_batch_size=64 {verl._ACTOR}.ppo_mini_batch_size=16 "
        f"trainer.total_training_steps=100 trainer.critic_warmup=6 {optim}.lr_decay_steps=80 {optim}.lr_decay_style=inverse-square-root "
    )
    for given, warmup in (("lr_warmup_steps=10", 40), ("lr_warmup_steps_ratio=0.05", 20), ("lr_warmup_steps=-1", None)):
        found = translated(verl, script(f"{text} {optim}.{given}")).settings
        assert (found.get("training.schedule.warmup_steps"), found["training.schedule.decay_steps"]) == (warmup, 320)
        assert (found["run.num_steps"], found["training.critic.warmup_steps"]) == (100, 20)
        assert found["training.schedule.decay_style"] == "inverse_square_root"
    unknown = translated(verl, script("python -m verl.trainer.main_ppo data.train_files=t " + f"{optim}.lr_warmup_steps_ratio=0.1"))
    assert "set training.schedule.warmup_steps to this share" in unknown.text("")


@pytest.mark.parametrize("module", [slime, verl])
def test_an_estimator_of_no_such_name_is_refused(script: Callable[..., Path], module: Any) -> None:
    words = "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type abs"
    if module is verl:
        words = f"data.train_files=t {verl._ACTOR}.use_kl_loss=True {verl._ACTOR}.kl_loss_type=abs"
    start = "python train.py --prompt-data t " if module is slime else "python -m verl.trainer.main_ppo "
    with pytest.raises(UserError, match=r"objective\.kl\.estimator .*abs"):
        validate_settings(_nested({**MINIMAL, **translated(module, script(start + words)).settings}), origin="test")


def test_what_a_script_leaves_open_has_its_projects_default(script: Callable[..., Path]) -> None:
    assert translated(slime, script("python train.py --prompt-data t")).settings["data.samples_per_prompt"] == 1
    settings = translated(verl, script("python -m verl.trainer.main_ppo data.train_files=t")).settings
    assert {path: settings[path] for path in verl.DEFAULTS} == verl.DEFAULTS and settings["objective.policy_loss.dual_clip"] == 3.0


def test_a_model_of_another_shape_is_an_error(script: Callable[..., Path], model: Path) -> None:
    other = MODEL.replace("--num-layers 36", "--num-layers 28").replace("--qk-layernorm", "")
    with pytest.raises(UserError) as error:
        translated(slime, script(SLIME, model=other), model)
    assert "num-layers is 28, but config.json needs 36; qk-layernorm is false, but config.json needs true" in str(error.value)
    assert "give the model of the script by --model" in str(error.value)


def test_values_from_outside_are_asked_for(script: Callable[..., Path]) -> None:
    text = "python train_async.py --prompt-data $WHERE/rows.jsonl --num-rollout $STEPS"
    t = translated(slime, script(text))
    assert t.settings["rollout.max_staleness"] == 1 and "data.train" not in t.settings
    assert t.left["prompt-data"] == "its value ⟨WHERE⟩/rows.jsonl comes from outside of the script; give WHERE=VALUE after the script"
    assert translated(slime, script(text), WHERE="/d", STEPS="7").settings["run.num_steps"] == 7


@pytest.mark.parametrize(("module", "needed"), [(slime, "needs a run script of slime"), (verl, "needs a run script of verl")])
def test_other_scripts_are_one_sentence(script: Callable[..., Path], module: Any, needed: str) -> None:
    with pytest.raises(UserError, match=needed):
        translated(module, script("echo hello"))


@pytest.mark.parametrize("module", [slime, verl])
def test_every_rule_names_a_setting_or_a_reason(module: Any) -> None:
    known = {field.path for field in setting_fields()}
    upstream = ("training.optimizer.", "training.critic.optimizer.", "rollout.sglang.")
    rules: dict[str, Rule] = module.RULES
    wrong = [name for name, rule in rules.items() if rule.path and rule.path not in known and not rule.path.startswith(upstream)]
    assert not wrong and all(rule.path or rule.note for rule in rules.values())


def test_the_command_leaves_out_what_a_run_refuses(
    script: Callable[..., Path], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the check of the run finds it; what comes out passes `--check --config-only`."""
    text = SLIME.replace("--balance-data", "--deallocate-pipeline-outputs --sglang-no-such-argument 3")
    out = tmp_path / "out.yaml"
    assert main(["import", "slime", str(script(text)), "EXTRA=", "--model", str(model), "--out", str(out)]) == 0
    said, found = capsys.readouterr(), out.read_text()
    assert "without a place here" in said.err and "to be mended" not in found
    for name in ("model.megatron.deallocate_pipeline_outputs", "rollout.sglang.no_such_argument"):
        assert f"#   {name} " in found and f"\n    {name.rpartition('.')[2]}:" not in found
    assert main(["train", str(out), "--check", "--config-only"]) == 0
    assert "Check passed" in capsys.readouterr().out


def test_a_word_that_is_no_variable_is_refused(script: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "slime", str(script(SLIME)), "nothing"]) == 2
    assert "import was given 'nothing' after the script, needs NAME=VALUE" in capsys.readouterr().err
