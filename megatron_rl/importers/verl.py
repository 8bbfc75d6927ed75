"""verl's settings, from a script's command line or a YAML file, as settings of ours, in one table."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.yaml_text import by_path, format_value
from megatron_rl.errors import UserError
from megatron_rl.importers.shell import UNKNOWN, Script
from megatron_rl.importers.slime import DECAYS
from megatron_rl.importers.translation import Rule, Translation, none, plain, real

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
    "token-sum": "token_sum",
}
_KL_ESTIMATORS = {"kl": "k1", "mse": "k2", **dict.fromkeys(("k3", "low_var_kl"), "low_variance")}
"""Names of estimators where they are not ours. Unknown ones stay as they are, and are refused."""
_OWN_MEAN = ("gspo", "sapo", "geo_mean")
"""Losses whose mean is that of sequences, whatever loss_agg_mode is."""
_ESTIMATORS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo")
_LOSSES = {"gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "geo_mean": "gmpo", "sapo": "sapo", "cispo": "cispo"}
_REFERENCE = none("the reference has the policy's layout and passes")
_RATIO = "algorithm.rollout_correction"
_STARTS = re.compile(r"(.*[./])?main_ppo(\.py)?|verl\.(trainer|experimental)\.[\w.]+")
"""The word that starts a run."""
_ENTRIES = {
    "one_step_off_policy": {"rollout.nnodes": "1", f"{_RATIO}.bypass_mode": "True"},
    "fully_async": {"rollout.nnodes": "1", "async_training.use_rollout_log_probs": "True"},
}
"""Values of the configuration files of other entries, by a part of their name."""
_PACKED = none("sequences are packed by training.max_tokens_per_micro_batch")
_ASLEEP = none("runtime.colocate puts away whoever is not at work")


RULES: dict[str, Rule] = {
    "actor_rollout_ref.model.path": Rule("model.path", str),
    "data.prompt_key": Rule("data.prompt_key", str),
    "data.max_prompt_length": Rule("data.max_prompt_tokens"),
    "data.max_response_length": Rule("rollout.sampling.max_response_tokens"),
    "data.train_batch_size": Rule("data.prompts_per_step"),
    "data.shuffle": Rule("data.shuffle"),
    "data.seed": Rule("run.seed"),
    "data.return_raw_chat": none("messages always reach the reward function"),
    "data.gen_batch_size": none("nearest: rollout.order: {kind: first_complete, oversampling: 1.5}"),
    "data.reward_fn_key": none("one reward function, which sees the row as sample.prompt.metadata"),
    f"{_ROLLOUT}.n": Rule("data.samples_per_prompt"),
    f"{_ROLLOUT}.temperature": Rule("rollout.sampling.temperature", real),
    f"{_ROLLOUT}.top_p": Rule("rollout.sampling.top_p", real, note="tokens are trained by the truncated distribution"),
    f"{_ROLLOUT}.max_num_seqs": Rule("rollout.max_concurrent_requests"),
    f"{_ROLLOUT}.gpu_memory_utilization": Rule("rollout.sglang.mem_fraction_static", real),
    f"{_ROLLOUT}.max_num_batched_tokens": none("nearest: rollout.sglang.chunked_prefill_size"),
    f"{_ROLLOUT}.enforce_eager": Rule("rollout.sglang.disable_cuda_graph"),
    f"{_ROLLOUT}.name": none("SGLang generates"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": Rule("training.routing_replay"),
    f"{_ACTOR}.router_replay.mode": none("R3 is training.routing_replay; the trainer's own routing is not replayed"),
    f"{_ROLLOUT}.multi_turn.enable": none("write an environment (examples/plugins) and set rollout.environment"),
    f"{_ROLLOUT}.multi_turn.tool_config_path": none("write an environment (examples/plugins) and set rollout.environment"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Rule("training.max_tokens_per_micro_batch"),
    f"{_ACTOR}.grad_clip": Rule("training.optimizer.clip_grad", real),
    f"{_ACTOR}.optim.lr": Rule("training.optimizer.lr", real),
    f"{_ACTOR}.optim.min_lr": Rule("training.optimizer.min_lr", real),
    f"{_ACTOR}.optim.weight_decay": Rule("training.optimizer.weight_decay", real),
    f"{_ACTOR}.optim.clip_grad": Rule("training.optimizer.clip_grad", real),
    **dict.fromkeys(
        (f"{_ACTOR}.optim.{name}" for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style")),
        Rule("training.schedule.decay_style", lambda text: DECAYS.get(text, text)),
    ),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": Rule("training.topology.tp"),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": Rule("training.topology.pp"),
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": Rule("training.topology.vpp", lambda text: plain(text) or 1),
    f"{_ACTOR}.megatron.context_parallel_size": Rule("training.topology.cp"),
    f"{_ACTOR}.megatron.expert_model_parallel_size": Rule("training.topology.ep"),
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": Rule("training.topology.etp"),
    f"{_ACTOR}.megatron.seed": none("run.seed is of all random choices"),
    f"{_ACTOR}.optim.betas": none("Megatron's optimizer has its own there; here training.optimizer.adam_beta1 and adam_beta2"),
    f"{_RATIO}.rollout_rs": none("nearest: objective.off_policy of mode mask, or its veto"),
    f"{_RATIO}.rollout_rs_threshold": none("nearest: objective.off_policy of mode mask, or its veto"),
    f"{_RATIO}.rollout_is_batch_normalize": none("weights keep their mean"),
    f"{_ACTOR}.policy_loss.clip_cov_ratio": none("nearest: objective.policy_loss of kind clip_cov"),
    "critic.optim.lr": Rule("training.critic.optimizer.lr", real),
    "trainer.save_freq": Rule("run.save_interval", lambda text: max(0, plain(text))),
    "trainer.test_freq": Rule("eval.interval", lambda text: max(0, plain(text))),
    "trainer.default_local_dir": Rule("run.directory", str),
    "trainer.total_training_steps": Rule("run.num_steps"),
    "trainer.max_actor_ckpt_to_keep": Rule("run.keep_checkpoints"),
    "trainer.val_before_train": none("sets are evaluated before the first step"),
    "trainer.resume_mode": none("--resume of the command"),
    "trainer.experiment_name": none("a run is named after run.directory"),
    "trainer.log_val_generations": none("every answer is kept in run.directory/evaluation"),
    "trainer.balance_batch": none("always so here"),
    "algorithm.gamma": none("1 for groups"),
    "algorithm.lam": none("of gae alone"),
}
"""What stands here for each key that needs a word; keys of megatron-core's classes keep their names."""

DEFAULTS: dict[str, Any] = {
    "data.prompts_per_step": 1024,
    "data.samples_per_prompt": 1,
    "data.max_prompt_tokens": 512,
    "rollout.sampling.max_response_tokens": 512,
    "training.optimizer.lr": 1e-6,
    "training.optimizer.weight_decay": 0.01,
    "eval.interval": 0,
    "run.save_interval": 0,
}
"""Their values, where the script has none and ours are others."""
PREFIXES = {
    "actor_rollout_ref.ref.": _REFERENCE,
    "reward_model.reward_kwargs.overlong_buffer_cfg.": none(
        "write it into a reward function (examples/plugins/reward.py has a length penalty)"
    ),
    "reward_model.": none("one reward function: reward.function; a model that judges is a remote call of it"),
    f"{_ROLLOUT}.engine_kwargs.": none("SGLang's arguments are rollout.sglang, by their own names"),
    "actor_rollout_ref.model.override_config.": _REFERENCE,
    "actor_rollout_ref.model.lora.": none("adapters are not trained; merge one by `megatron-rl convert --adapter`"),
    "actor_rollout_ref.model.mtp.": none("layers of multi-token prediction are not trained"),
    "actor_rollout_ref.model.": none("read from config.json, or chosen by model.attention"),
    f"{_ACTOR}.megatron.use_": none("Hugging Face weights are read as they are"),
    f"{_ACTOR}.megatron.vanilla_mbridge": none("Hugging Face weights are read as they are"),
    f"{_ACTOR}.megatron.dist_checkpointing_path": none("convert it: `megatron-rl convert`"),
    f"{_ACTOR}.megatron.param_offload": _ASLEEP,
    f"{_ACTOR}.megatron.grad_offload": _ASLEEP,
    f"{_ACTOR}.megatron.optimizer_offload": _ASLEEP,
    f"{_ROLLOUT}.free_cache_engine": _ASLEEP,
    f"{_ACTOR}.ppo_micro_batch_size": _PACKED,
    f"{_ACTOR}.use_dynamic_bsz": _PACKED,
    f"{_ROLLOUT}.log_prob_": _PACKED,
    "critic.ppo_micro_batch_size": _PACKED,
    "critic.": none("the critic has the policy's model, layout and passes; training.critic has its own settings"),
    "trainer.": none("has no counterpart"),
    "global_profiler.": none("time/* of every step is in metrics.jsonl"),
    f"{_ROLLOUT}.val_kwargs.": none("eval.sets.NAME.sampling"),
    f"{_ROLLOUT}.": none("SGLang's arguments are rollout.sglang, by their own names"),
}
"""Keys that begin so have no place; the first beginning counts."""


def translate(source: Path, *, given: Mapping[str, str], model: Path | None) -> Translation:
    """Return the settings of the run that the script or YAML file `source` describes. Raises UserError."""
    read = None if source.suffix in (".yaml", ".yml") else Script(source, given=given)
    t = Translation(_keys(source, read))
    _objective(t)
    _data(t)
    _processes(t)
    _rewards(t)
    t.apply(RULES)
    if model is not None:
        t.settings["model.path"] = str(model)
    t.settings = {"run.directory": f"runs/{source.stem}", **DEFAULTS} | t.settings
    t.finish(read)
    classes = (f"{_ACTOR}.megatron.override_transformer_config.", f"{_ACTOR}.optim.override_optimizer_config.",
               f"{_ACTOR}.megatron.override_ddp_config.")  # fmt: skip
    t.upstream({word: word.removeprefix(start) for word in t.words for start in classes if word.startswith(start)})
    for word in list(t.words):
        rule = next((rule for start, rule in PREFIXES.items() if word.startswith(start)), None)
        reason = "not known here; `megatron-rl train --help all` lists what is" if rule is None else rule.note
        value = t.words.pop(word)[0]
        if (found := UNKNOWN.search(word)) and "=" not in word and not value:
            t.left[word] = (
                f"may be several settings, from outside of the script; give {found[1] or 'NAME'}=VALUE after it, or an empty value"
            )
            continue
        t.left[f"{word}={value}"] = reason
    return t


def _keys(source: Path, script: Script | None) -> dict[str, list[str]]:
    """Return the values of a YAML file, or of the command in a script, by dotted keys."""
    if script is None:
        from megatron_rl.config.load import read_yaml

        return {key: [format_value(value)] for key, value in by_path(read_yaml(source)).items()}
    for words in script.commands:
        if (entry := next((word for word in words if _STARTS.fullmatch(word)), None)) is not None:
            pairs = [word.lstrip("+~").partition("=") for word in words if "=" in word and not word.startswith("-")]
            defaults = {key: value for name, found in _ENTRIES.items() if name in entry for key, value in found.items()}
            # Without "=" these may be several keys.
            whole = {word: "" for word in words if UNKNOWN.search(word) and "=" not in word}
            return {key: [value] for key, value in {**defaults, **{key: value for key, _, value in pairs if "." in key}, **whole}.items()}
    raise UserError(
        f"{source} starts no verl.trainer, needs a run script of verl; give the script that calls verl.trainer.main_ppo, or a YAML file"
    )


def _objective(t: Translation) -> None:
    """Translate estimator, loss, clips, KL, entropy and denominators."""
    estimator = t.take("algorithm.adv_estimator", "gae")
    if estimator in _ESTIMATORS:
        t.settings["objective.advantage.kind"] = estimator
    elif estimator != "grpo":
        t.left[f"algorithm.adv_estimator={estimator}"] = "nearest: objective.advantage, or a plug-in"
    if not t.flag("algorithm.norm_adv_by_std_in_grpo", True) and estimator == "grpo":
        t.settings["objective.advantage.scale"] = "none"
    mode, clip = t.take(f"{_ACTOR}.policy_loss.loss_mode", "vanilla"), t.number(f"{_ACTOR}.clip_ratio", 0.2)
    # Both have a value of their own there, and null alone stands for clip_ratio.
    low, high = (t.number(name, clip if name in t.words else 0.2) for name in (f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"))
    if clip not in (0.2, low, high):
        t.left[f"{_ACTOR}.clip_ratio={clip}"] = "clip_ratio_low and clip_ratio_high count there, which are 0.2 where not set"
    dual = t.number(f"{_ACTOR}.clip_ratio_c", 3.0)
    if _correction(t) and mode != "vanilla":
        t.left[f"{_ACTOR}.policy_loss.loss_mode={mode}"], mode = "bypass_mode puts the clipped loss in its place there", "vanilla"
    if mode in _LOSSES:
        t.settings["objective.policy_loss.kind"] = _LOSSES[mode]
        if mode in ("clip_cov", "geo_mean", "cispo"):
            # A ratio is never below 0.
            t.settings |= {"objective.policy_loss.low": None if mode == "cispo" and low > 1 else low, "objective.policy_loss.high": high}
    elif mode in ("vanilla", "gspo"):
        t.settings |= {"objective.policy_loss.low": low, "objective.policy_loss.high": high}
        t.settings |= {"objective.policy_loss.ratio_level": "sequence"} if mode == "gspo" else {"objective.policy_loss.dual_clip": dual}
    else:
        t.left[f"{_ACTOR}.policy_loss.loss_mode={mode}"] = "nearest: objective.policy_loss, or a plug-in"
    aggregation = t.take(f"{_ACTOR}.loss_agg_mode") or "token-mean"
    aggregation = "seq-mean-token-mean" if mode in _OWN_MEAN else aggregation
    t.settings["objective.aggregation"] = _AGGREGATIONS.get(aggregation, aggregation)
    _kl(t, estimator or "gae")
    if coef := t.number(f"{_ACTOR}.entropy_coeff", 0.0):
        t.settings |= {"objective.entropy.coef": coef, "objective.entropy.mode": "matched"}
    if t.flag("algorithm.filter_groups.enable"):
        t.settings["objective.zero_variance"] = "resample"
    for name in ("metric", "max_num_gen_batches"):
        t.take(f"algorithm.filter_groups.{name}")
    if estimator == "gae":
        lam, clip = float(t.number("algorithm.lam", 1.0)), float(t.number("critic.cliprange_value", 0.5))
        t.settings |= {"objective.advantage.lam": lam, "objective.advantage.value_clip": clip, "training.critic.optimizer.lr": 1e-5}
    if estimator in ("gae", "reinforce_plus_plus"):
        t.settings["objective.advantage.gamma"] = float(t.number("algorithm.gamma", 1.0))


def _correction(t: Translation) -> bool:
    """Translate the correction of the rollout's mismatch; return True in bypass mode, where pi_old is the rollout's policy."""
    kind, high = t.take(f"{_RATIO}.rollout_is", "null"), float(t.number(f"{_RATIO}.rollout_is_threshold", 2.0))
    asynchronous = t.flag("async_training.use_rollout_log_probs") and not t.flag("async_training.compute_prox_log_prob")
    bypass, loss = t.flag(f"{_RATIO}.bypass_mode"), t.take(f"{_RATIO}.loss_type")
    if bypass and loss == "reinforce":
        t.left[f"{_RATIO}.loss_type=reinforce"] = "nearest: objective.policy_loss of kind cispo, with high = rollout_is_threshold - 1"
    if not (bypass or asynchronous) and kind in ("token", "sequence"):
        t.settings |= {"objective.off_policy.mode": "truncate", "objective.off_policy.level": kind, "objective.off_policy.high": high}
    if bypass or asynchronous:
        t.settings["objective.proximal"] = "rollout"
    return bypass


def _kl(t: Translation, estimator: str) -> None:
    """Translate the KL in the loss and in the rewards."""
    uses, coef = t.flag(f"{_ACTOR}.use_kl_loss"), t.number(f"{_ACTOR}.kl_loss_coef", 0.001)
    kind = t.take(f"{_ACTOR}.kl_loss_type") or "low_var_kl"
    if uses and coef:
        # The value of one estimator with the gradient of k2, and a loss acts by its gradient alone.
        ours = "k2" if kind.endswith("+") else _KL_ESTIMATORS.get(kind, kind)
        t.settings |= {"objective.kl.coef": coef, "objective.kl.estimator": ours}
    in_reward, coef = t.flag("algorithm.use_kl_in_reward"), t.number("algorithm.kl_ctrl.kl_coef", 0.001)
    kind = t.take("algorithm.kl_penalty") or "kl"
    adapts = t.take("algorithm.kl_ctrl.type") == "adaptive"
    control = {
        "target": float(t.number("algorithm.kl_ctrl.target_kl", 0.1)),
        "horizon": float(t.number("algorithm.kl_ctrl.horizon", 10000)),
    }
    if in_reward and coef and estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        t.settings |= {"objective.kl_reward.coef": coef, "objective.kl_reward.estimator": _KL_ESTIMATORS.get(kind, kind)}
        t.settings |= {"objective.kl_reward.control": control} if adapts else {}
    elif in_reward and coef:
        t.left["algorithm.use_kl_in_reward=True"] = f"advantages of {estimator} compare whole rewards; nearest: objective.kl"


def _data(t: Translation) -> None:
    """Translate files, sets, batch sizes and epochs."""
    train, held_out = (_paths(t.take(f"data.{name}_files")) for name in ("train", "val"))
    if train:
        t.settings["data.train"] = train[0] if len(train) == 1 else [{"path": path} for path in train]
    if len(train) > 1:
        t.differs["data.train_files"] = (
            "rows of all files are one table there; here each file has an equal share, so set weight to its rows"
        )
    t.settings["data.label_key"] = "reward_model.ground_truth"
    cut = t.take("data.truncation", "error")
    overlong = "drop" if t.flag("data.filter_overlong_prompts") else "truncate" if cut == "left" else "error"
    t.settings["data.overlong"] = overlong
    if cut not in ("left", "error"):
        t.left[f"data.truncation={cut}"] = "nearest: data.overlong: truncate keeps the last tokens"
    epochs = int(t.number(f"{_ACTOR}.ppo_epochs", 1))
    steps = max(1, t.peek("data.train_batch_size", 1024) // int(t.number(f"{_ACTOR}.ppo_mini_batch_size", 256)))
    if steps > 1:
        t.settings["training.optimizer_steps_per_batch"] = steps
    _schedule(t, steps)
    if epochs > 1:
        t.left[f"{_ACTOR}.ppo_epochs={epochs}"] = "each sample is trained on once; nearest: more optimizer steps on a batch"
    if (passes := t.take("trainer.total_epochs")) is not None:
        counted = t.peek("trainer.total_training_steps", 0)
        reason = "run.num_steps is trainer.total_training_steps; there a run ends with its epochs, too"
        t.left[f"trainer.total_epochs={passes}"] = reason if counted else "set run.num_steps to rows x epochs / data.prompts_per_step"
    start = f"{_ROLLOUT}.val_kwargs"
    t.take(f"{start}.do_sample")  # nothing reads it there
    sampling = {name: float(t.number(f"{start}.{name}", value)) for name, value in (("temperature", 0.0), ("top_p", 1.0))}
    sampling["top_k"] = max(0, int(t.number(f"{start}.top_k", -1)))
    samples = int(t.number(f"{start}.n", 1))
    for path in held_out:
        name = "-".join(Path(path).parts[-2:]).removesuffix(Path(path).suffix).replace(".", "-").removeprefix("/-")
        t.settings[f"eval.sets.{name}"] = {"data": path, "samples": samples, "sampling": sampling}
    if (top_k := t.take(f"{_ROLLOUT}.top_k")) is not None and plain(top_k) > 0:
        t.settings["rollout.sampling.top_k"] = plain(top_k)


def _schedule(t: Translation, steps: int) -> None:
    """Translate numbers of rollouts there into numbers of optimizer steps here, `steps` of a rollout."""
    total, start = t.peek("trainer.total_training_steps", 0), f"{_ACTOR}.optim.lr"
    warmup, share = int(t.number(f"{start}_warmup_steps", -1)), t.number(f"{start}_warmup_steps_ratio", 0.0)
    if share and warmup < 0 and not total:
        t.left[f"{start}_warmup_steps_ratio={share}"] = "set training.schedule.warmup_steps to this share of all optimizer steps"
    elif (warmup := int(share * total) if warmup < 0 and share else warmup) > 0:
        t.settings["training.schedule.warmup_steps"] = warmup * steps
    if (decay := plain(t.take(f"{start}_decay_steps") or "null")) is not None and decay > 0:
        t.settings["training.schedule.decay_steps"] = int(decay) * steps
    # The actor learns from rollout number critic_warmup on, counted from 1.
    if (frozen := int(t.number("trainer.critic_warmup", 0)) - 1) > 0:
        t.settings["training.critic.warmup_steps"] = frozen * steps


def _paths(text: str | None) -> list[str]:
    """Return the files of a text, one path or a list of them in Python's or Hydra's form."""
    if text is None or not text.startswith("["):
        return [text] if text else []
    try:
        return [str(each) for each in ast.literal_eval(text)]
    except (SyntaxError, ValueError):
        return [each.strip().strip("'\"") for each in text[1:-1].split(",")]


def _processes(t: Translation) -> None:
    """Translate nodes and GPUs into ranks and engines, which share them but in an asynchronous run."""
    nodes, each = int(t.number("trainer.nnodes", 1)), int(t.number("trainer.n_gpus_per_node", 8))
    per_engine = int(t.number(f"{_ROLLOUT}.tensor_model_parallel_size", 2))
    copies, experts = (int(t.number(f"{_ROLLOUT}.{name}_parallel_size", 1)) for name in ("data", "expert"))
    if copies > 1 and experts > 1:
        # One engine shares its experts, and its attention has several copies.
        per_engine *= copies
        t.settings |= {"rollout.sglang.dp_size": copies, "rollout.sglang.enable_dp_attention": True}
    if experts > 1:
        t.settings["rollout.sglang.ep_size"] = experts
    own_each = int(t.number("rollout.n_gpus_per_node", 8))
    own = int(t.number("rollout.nnodes", 0)) * own_each
    if per_engine > (per_node := own_each if own else each):
        t.settings["rollout.sglang.nnodes"] = -(-per_engine // per_node)
    shared = own == nodes * own_each and each + own_each <= 8
    t.settings |= {
        "training.topology.num_ranks": nodes * each,
        "rollout.num_engines": max(1, (own or nodes * each) // per_engine),
        "rollout.sglang.tp_size": per_engine,
        "runtime.cluster.num_nodes": nodes if shared else nodes + -(-own // each),
        "runtime.cluster.gpus_per_node": each + own_each if shared else each,
        "runtime.colocate": not own,
    }
    if own:
        t.settings["rollout.max_staleness"] = max(1, round(t.number("async_training.staleness_threshold", 1.0)))
    # Megatron's sequence parallelism follows tensor parallelism there.
    t.settings["training.topology.sequence_parallel"] = t.peek(f"{_ACTOR}.megatron.tensor_model_parallel_size", 1) > 1
    logger, project = t.take("trainer.logger", ""), t.take("trainer.project_name")
    if "wandb" in (logger or "") and project:
        t.settings["observe.wandb_project"] = project


def _rewards(t: Translation) -> None:
    """Translate the reward: a function of their own by an adapter, else ours for mathematics."""
    path, name = t.take("custom_reward_function.path"), t.take("custom_reward_function.name", "compute_score")
    if path is not None:
        module = Path(path).with_suffix("").as_posix().replace("/", ".").strip(".")
        t.settings |= {"reward.function": "megatron_rl.importers.rewards:verl", "reward.args": {"path": f"{module}:{name}"}}
    else:
        t.differs["default compute_score"] = "reward.function is math-verify's: 1 or 0, by the last answer in the response"
