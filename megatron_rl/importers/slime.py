"""slime's run scripts: their arguments as settings of ours, in one table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.importers.shell import UNKNOWN, Script
from megatron_rl.importers.translation import Rule, Translation, check_model, no_place, none, plain, positive, real

KL_ESTIMATORS = {"low_var_kl": "low_variance"}
"""Names of estimators where they are not ours. Unknown ones stay as they are, and are refused."""
DECAYS = {"WSD": "wsd", "inverse-square-root": "inverse_square_root"}


RULES: dict[str, Rule] = {
    "hf-checkpoint": Rule("model.path", str),
    "save": Rule("run.directory", str),
    "save-interval": Rule("run.save_interval"),
    "seed": Rule("run.seed"),
    "rollout-seed": none("run.seed is of all random choices"),
    "num-rollout": Rule("run.num_steps"),
    "prompt-data": Rule("data.train", str),
    "input-key": Rule("data.prompt_key", str),
    "label-key": Rule("data.label_key", str),
    "metadata-key": none("a reward function gets the whole row as sample.prompt.metadata"),
    "tool-key": none("tools are an environment's: rollout.environment"),
    "apply-chat-template": none("messages get the chat template, texts do not"),
    "apply-chat-template-kwargs": Rule("data.chat_template_kwargs"),
    "rollout-batch-size": Rule("data.prompts_per_step"),
    "n-samples-per-prompt": Rule("data.samples_per_prompt"),
    "rollout-max-prompt-len": Rule("data.max_prompt_tokens"),
    "rollout-max-response-len": Rule("rollout.sampling.max_response_tokens"),
    "rollout-max-context-len": none("data.max_prompt_tokens + rollout.sampling.max_response_tokens is the longest sequence"),
    "rollout-temperature": Rule("rollout.sampling.temperature", real),
    "rollout-top-p": Rule("rollout.sampling.top_p", real, note="tokens are trained by the truncated distribution"),
    "rollout-top-k": Rule("rollout.sampling.top_k", positive, note="tokens are trained by the truncated distribution"),
    "rollout-stop": Rule("rollout.sampling.stop", str.split),
    "rollout-stop-token-ids": Rule("rollout.sampling.stop_token_ids", lambda text: [int(each) for each in text.split()]),
    "rollout-skip-special-tokens": none("the text of a reward function has no special tokens"),
    "over-sampling-batch-size": none("nearest: rollout.order: {kind: first_complete, oversampling: 1.5}, or zero_variance resample alone"),
    "buffer-filter-path": none("nearest: rollout.filter"),
    "eval-interval": Rule("eval.interval"),
    "max-tokens-per-gpu": Rule("training.max_tokens_per_micro_batch"),
    "log-probs-max-tokens-per-gpu": none("one budget for all passes: training.max_tokens_per_micro_batch"),
    "log-probs-chunk-size": none("the head works in pieces of its own"),
    "micro-batch-size": none("sequences are packed by training.max_tokens_per_micro_batch"),
    "tensor-model-parallel-size": Rule("training.topology.tp"),
    "pipeline-model-parallel-size": Rule("training.topology.pp"),
    "context-parallel-size": Rule("training.topology.cp"),
    "expert-model-parallel-size": Rule("training.topology.ep"),
    "expert-tensor-parallel-size": Rule("training.topology.etp"),
    "colocate": Rule("runtime.colocate"),
    "offload": none("runtime.colocate puts away whoever is not at work"),
    "optimizer": Rule("training.optimizer.optimizer", str),
    "lr": Rule("training.optimizer.lr", real),
    "min-lr": Rule("training.optimizer.min_lr", real),
    "weight-decay": Rule("training.optimizer.weight_decay", real),
    "clip-grad": Rule("training.optimizer.clip_grad", real),
    "lr-decay-style": Rule("training.schedule.decay_style", lambda text: DECAYS.get(text, text)),
    "lr-warmup-iters": Rule("training.schedule.warmup_steps"),
    "lr-decay-iters": Rule("training.schedule.decay_steps"),
    "use-routing-replay": none("the trainer's own routing is not replayed; nearest: training.routing_replay (the engine's)"),
    "use-rollout-routing-replay": Rule("training.routing_replay"),
    "wandb-project": Rule("observe.wandb_project", str),
    "sglang-server-concurrency": Rule("rollout.max_concurrent_requests"),
    "update-weight-buffer-size": none("buckets have a size of their own"),
    **no_place("a run is named after run.directory; WANDB_* variables are honoured",
               "use-wandb wandb-group wandb-team wandb-key wandb-host wandb-mode wandb-run-id"),
    **no_place("TensorBoard is always written", "use-tensorboard tb-project-name tb-experiment-name"),
    **no_place("always so here", "balance-data use-dynamic-batch-size accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 "
               "use-distributed-optimizer no-gradient-accumulation-fusion deterministic-mode"),
    **no_place("policies are trained without dropout", "attention-dropout hidden-dropout"),
    **no_place("nearest: model.attention", "attention-backend transformer-impl spec no-rope-fusion allgather-cp "
               "data-pad-size-multiplier model-name"),
    **no_place("layers of multi-token prediction are not trained", "enable-mtp-training mtp-num-layers mtp-loss-scaling-factor"),
    **no_place("prefill and decoding are not divided between engines", "prefill-num-servers sglang-disaggregation-transfer-backend "
               "sglang-disaggregation-ib-device"),
    **no_place("speculative decoding is refused: its log-probs are not those of the sampled tokens",
               "sglang-speculative-algorithm sglang-speculative-num-steps sglang-speculative-eagle-topk "
               "sglang-speculative-num-draft-tokens sglang-speculative-draft-attention-backend sglang-speculative-draft-model-path"),
    **no_place("weights come from model.path; a run goes on from its own checkpoints by --resume",
               "ref-load load ref-ckpt-step megatron-to-hf-mode"),
    **no_place("another interface: write a rollout (examples/plugins) and set rollout.function",
               "rollout-function-path custom-generate-function-path"),
    **no_place("read from config.json",
               "swiglu group-query-attention use-rotary-position-embeddings disable-bias-linear normalization position-embedding-type "
               "rotary-percent no-position-embedding make-vocab-size-divisible-by moe-layer-freq moe-router-score-function "
               "moe-router-pre-softmax moe-router-enable-expert-bias moe-router-topk-scaling-factor moe-router-num-groups "
               "moe-router-group-topk moe-grouped-gemm rotary-scaling-factor mscale mscale-all-dim use-rope-scaling "
               "max-position-embeddings rotary-interleaved apply-layernorm-1p post-self-attn-layernorm post-mlp-layernorm "
               "moe-shared-expert-gate attention-output-gate use-gated-attention seq-length"),
}  # fmt: skip
"""What stands here for each argument of slime's and of Megatron's that needs a word; others are megatron-core's or SGLang's fields."""

_FIELDS = {
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
"""Fields of megatron-core whose argument has another name."""
SHAPES = {
    "num-layers": lambda spec: spec.num_layers,
    "hidden-size": lambda spec: spec.hidden_size,
    "ffn-hidden-size": lambda spec: spec.ffn_hidden_size,
    "num-attention-heads": lambda spec: spec.num_heads,
    "num-query-groups": lambda spec: ... if spec.mla else spec.num_kv_heads,
    "kv-channels": lambda spec: ... if spec.mla else spec.head_dim,
    "vocab-size": lambda spec: spec.vocab_size,
    "norm-epsilon": lambda spec: spec.norm_epsilon,
    "rotary-base": lambda spec: spec.rotary.theta,
    "qk-layernorm": lambda spec: bool(spec.qk_norm or spec.mla),
    "add-qkv-bias": lambda spec: spec.qkv_bias,
    "untie-embeddings-and-output-weights": lambda spec: not spec.tie_embeddings,
    "multi-latent-attention": lambda spec: spec.mla is not None,
    "q-lora-rank": lambda spec: spec.mla and spec.mla.q_lora_rank,
    "kv-lora-rank": lambda spec: spec.mla and spec.mla.kv_lora_rank,
    "qk-head-dim": lambda spec: spec.mla and spec.mla.qk_nope_head_dim,
    "qk-pos-emb-head-dim": lambda spec: spec.mla and spec.mla.qk_rope_head_dim,
    "v-head-dim": lambda spec: spec.mla and spec.mla.v_head_dim,
    "num-experts": lambda spec: spec.moe and spec.moe.num_experts,
    "moe-router-topk": lambda spec: spec.moe and spec.moe.num_experts_per_token,
    "moe-ffn-hidden-size": lambda spec: spec.moe and spec.moe.ffn_hidden_size,
    "moe-shared-expert-intermediate-size": lambda spec: spec.moe and (spec.moe.shared_ffn_hidden_size or None),
}
"""Arguments that describe the model, and what config.json says; ... where they are not compared."""

DEFAULTS: dict[str, Any] = {
    "data.samples_per_prompt": 1,
    "training.schedule.decay_style": "linear",
    "training.optimizer.weight_decay": 0.01,
    "eval.interval": 0,
    "run.save_interval": 0,
}
"""Their values, and Megatron's, where the script has none and ours are others."""
_ENTRIES = ("train.py", "train_async.py")


def translate(script: Path, *, given: Mapping[str, str], model: Path | None) -> Translation:
    """Return the settings of the run that `script` starts. Raises UserError for a script without one and for another model."""
    read = Script(script, given=given)
    starts = (words[index:] for words in read.commands for index, word in enumerate(words) if Path(word).name in _ENTRIES)
    command = next(starts, None)
    if command is None:
        raise UserError(f"{script} starts no train.py, needs a run script of slime; give the script that calls train.py or train_async.py")
    t = Translation(_arguments(command[1:]))
    _objective(t)
    _batches(t)
    _processes(t)
    _rewards(t)
    _evaluation(t)
    if Path(command[0]).name == "train_async.py" and t.settings.get("objective.policy_loss") != "sft":
        t.settings["rollout.max_staleness"] = 1
    if "rollout-max-prompt-len" in t.words:
        t.settings["data.overlong"] = "drop"
    else:
        t.differs["no rollout-max-prompt-len"] = "a prompt longer than data.max_prompt_tokens is an error here; set it to the longest"
    t.apply(RULES)
    t.settings["data.shuffle"] = t.flag("rollout-shuffle")
    check_model(t, model or Path(t.settings.get("model.path", "")), SHAPES, complete="num-layers" in t.words)
    if model is not None:
        t.settings["model.path"] = str(model)
    t.settings = {"run.directory": f"runs/{script.stem}", **DEFAULTS} | t.settings
    t.finish(read)
    for name in [word for word in t.words if word.startswith("sglang-")]:
        if (text := t.take(name)) is not None:
            t.settings[f"rollout.sglang.{name.removeprefix('sglang-').replace('-', '_')}"] = plain(text)
    t.upstream({word: _FIELDS.get(word, word.replace("-", "_")) for word in t.words})
    for word in list(t.words):
        t.words.pop(word)
        t.left[word] = "not known here; `megatron-rl train --help all` lists what is"
    return t


def _arguments(words: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return found


def _objective(t: Translation) -> None:
    """Translate estimator, clips, KL, entropy and denominators."""
    estimator = t.take("advantage-estimator", "grpo")
    presets = {"gspo": "gspo", "reinforce_plus_plus": "reinforce_plus_plus", "ppo": "ppo"}
    if estimator == "reinforce_plus_plus_baseline":
        t.settings["objective.advantage.kind"] = estimator
    elif estimator in presets:
        t.settings["objective.preset"] = presets[estimator]
    elif estimator == "cispo":
        t.settings["objective.policy_loss.kind"] = estimator
    elif estimator != "grpo":
        t.left[f"advantage-estimator {estimator}"] = "nearest: objective.distillation_coef with model.teacher, or a plug-in"
    low = t.number("eps-clip", 0.2)
    t.settings["objective.policy_loss.high"] = t.number("eps-clip-high", low)
    # A ratio is never below 0.
    t.settings["objective.policy_loss.low"] = None if estimator == "cispo" and low >= 1 else low
    if (dual := t.number("eps-clip-c", 0.0)) and estimator != "cispo":
        t.settings["objective.policy_loss.dual_clip"] = dual
    by_tokens = t.flag("calculate-per-token-loss")
    t.settings["objective.aggregation"] = "token_mean" if by_tokens else "sequence_mean_token_mean"
    if t.flag("disable-grpo-std-normalization"):
        t.settings["objective.advantage.scale"] = "none"
    if estimator == "ppo":
        whiten, clip = t.flag("normalize-advantages"), float(t.number("value-clip", 0.2))
        t.settings |= {"objective.advantage.whiten": whiten, "objective.advantage.value_clip": clip}
        t.settings["objective.advantage.lam"] = float(t.number("lambd", 1.0))
    if estimator in ("ppo", "reinforce_plus_plus"):
        t.settings["objective.advantage.gamma"] = float(t.number("gamma", 1.0))
    _kl(t, estimator)
    if coef := t.number("entropy-coef", 0.0):
        t.settings |= {"objective.entropy.coef": coef, "objective.entropy.mode": "matched"}
    _corrections(t)
    if (path := t.take("dynamic-sampling-filter-path")) is not None:
        if path.endswith("check_reward_nonzero_std"):
            t.settings["objective.zero_variance"] = "resample"
        else:
            t.left[f"dynamic-sampling-filter-path {path}"] = "another interface: write a filter (examples/plugins) and set rollout.filter"
    if (loss := t.take("loss-type", "policy_loss")) == "sft_loss":
        t.settings = {"objective.policy_loss": "sft", "objective.aggregation": t.settings["objective.aggregation"]}
        t.differs.pop("use-opsm", None)
    elif loss != "policy_loss":
        t.left[f"loss-type {loss}"] = "nearest: objective.policy_loss, or a plug-in"


def _corrections(t: Translation) -> None:
    """Translate weights and masks of the rollout's mismatch."""
    if t.flag("use-tis"):
        t.settings |= {"objective.off_policy.mode": "truncate", "objective.off_policy.high": float(t.number("tis-clip", 2.0))}
        if low := t.number("tis-clip-low", 0.0):
            t.settings["objective.off_policy.low"] = low
    if t.flag("use-rollout-logprobs"):
        t.settings["objective.proximal"] = "rollout"
    delta = t.number("opsm-delta", 1e-4)
    if t.flag("use-opsm"):
        t.settings["objective.off_policy.opsm"] = delta
        if "objective.proximal" not in t.settings:
            t.differs["use-opsm"] = "objective.off_policy.opsm: its mean is of the rollout's log-probs, not of recomputed ones"


def _kl(t: Translation, estimator: str | None) -> None:
    """Translate the KL to the reference, of the loss and of the reward."""
    kind = t.take("kl-loss-type") or "k1"
    kind = KL_ESTIMATORS.get(kind, kind)
    coef, uses = t.number("kl-loss-coef", 0.0), t.flag("use-kl-loss")
    if uses and coef:
        t.settings |= {"objective.kl.coef": coef, "objective.kl.estimator": kind}
        if t.flag("use-unbiased-kl"):
            t.settings["objective.kl.unbiased"] = True
    elif uses:
        # The KL is measured and not trained on.
        t.settings["training.reference_interval"] = 1
    if (coef := t.number("kl-coef", 0.0)) and estimator in ("grpo", "gspo", "cispo"):
        t.left[f"kl-coef {coef}"] = f"{estimator} does not read it there; nearest: objective.kl"
    elif coef:
        t.settings |= {"objective.kl_reward.coef": coef, "objective.kl_reward.estimator": kind}


def _batches(t: Translation) -> None:
    """Translate batch sizes: theirs counts samples of an optimizer step, ours optimizer steps of a batch."""
    steps = int(t.number("num-steps-per-rollout", 0))
    size = int(t.number("global-batch-size", 0))
    made = t.peek("rollout-batch-size", 0) * t.peek("n-samples-per-prompt", 1)
    if not steps and size and made:
        steps = max(1, made // size)
        if made % size:
            t.left[f"global-batch-size {size}"] = f"{made} samples of a rollout are no multiple of it; rounded to {steps} optimizer steps"
    if steps > 1:
        t.settings["training.optimizer_steps_per_batch"] = steps
    if t.flag("partial-rollout"):
        t.settings |= {"rollout.order.kind": "first_complete", "rollout.order.partial": True}
    if (epochs := t.take("num-epoch")) is not None and "num-rollout" not in t.words:
        t.left[f"num-epoch {epochs}"] = "set run.num_steps to rows x epochs / data.prompts_per_step"
    if (fraction := t.take("lr-warmup-fraction")) is not None:
        if decay := t.peek("lr-decay-iters", 0) or t.peek("num-rollout", 0) * max(1, steps):
            t.settings["training.schedule.warmup_steps"] = round(float(fraction) * decay)
        else:
            t.left[f"lr-warmup-fraction {fraction}"] = "set training.schedule.warmup_steps to this share of all optimizer steps"
    only = int(t.number("num-critic-only-steps", 0)) * max(1, steps)
    if t.settings.get("objective.preset") == "ppo":
        # The critic has the policy's learning rate there.
        rates = {f"training.critic.optimizer.{name.replace('-', '_')}": t.words.get(name) for name in ("lr", "min-lr")}
        t.settings["training.critic.optimizer.lr"] = 1e-6
        t.settings |= {path: real(words[0]) for path, words in rates.items() if words and not UNKNOWN.search(words[0])}
        t.settings |= {"training.critic.warmup_steps": only} if only else {}


def _processes(t: Translation) -> None:
    """Translate nodes and GPUs into ranks and engines."""
    nodes, each = int(t.number("actor-num-nodes", 1)), int(t.number("actor-num-gpus-per-node", 8))
    per_engine = int(t.number("rollout-num-gpus-per-engine", 1))
    colocated = "colocate" in t.words or t.settings.get("objective.policy_loss") == "sft"
    gpus, size = int(t.number("rollout-num-gpus", nodes * each)), int(t.number("num-gpus-per-node", 8))
    size = each if colocated else min(size, nodes * each + gpus)
    if per_engine > size:
        t.settings["rollout.sglang.nnodes"] = -(-per_engine // size)
    t.settings |= {
        "training.topology.num_ranks": nodes * each,
        "rollout.num_engines": max(1, (nodes * each if colocated else gpus) // per_engine),
        "rollout.sglang.tp_size": per_engine,
        "runtime.cluster.gpus_per_node": size,
        # Megatron turns it off without tensor parallelism.
        "training.topology.sequence_parallel": t.flag("sequence-parallel") and t.words.get("tensor-model-parallel-size", ["1"]) != ["1"],
        "runtime.cluster.num_nodes": nodes if colocated else -(-(nodes * each + gpus) // size),
    }


def _rewards(t: Translation) -> None:
    """Translate the reward: ours for mathematics, their own function by an adapter."""
    kind, path = t.take("rm-type"), t.take("custom-rm-path")
    if path is not None:
        module, _, name = path.rpartition(".")
        args = {"path": f"{module}:{name}"}
        t.settings |= {"reward.function": "megatron_rl.importers.rewards:slime", "reward.args": args}
    elif kind in ("deepscaler", "math", "dapo"):
        t.differs[f"rm-type {kind}"] = "reward.function is math-verify's: 1 or 0, by the last answer in the response"
    elif kind is not None:
        t.left[f"rm-type {kind}"] = "write a reward function (examples/plugins) and set reward.function"
    if (key := t.take("reward-key")) is not None:
        t.left[f"reward-key {key}"] = "a reward function returns a mapping with 'reward'; others are its components"


def _evaluation(t: Translation) -> None:
    """Translate held-out sets: pairs of a name and a file."""
    values, samples = t.words.pop("eval-prompt-data", []), int(t.number("n-samples-per-eval-prompt", 1))
    values = ["aime", *values] if len(values) == 1 else values
    sampling: dict[str, Any] = {
        ours: plain(text)
        for theirs, ours in (("max-response-len", "max_response_tokens"), ("top-p", "top_p"), ("temperature", "temperature"))
        if (text := t.take(f"eval-{theirs}")) is not None
    }
    if (top_k := t.take("eval-top-k")) is not None and plain(top_k) > 0:
        sampling["top_k"] = plain(top_k)
    sampling |= {name: float(sampling[name]) for name in ("top_p", "temperature") if name in sampling}
    for name, path in zip(values[::2], values[1::2], strict=False):
        if found := UNKNOWN.search(name + path):
            t.left[f"eval-prompt-data {name} {path}"] = f"it comes from outside of the script; give {found[1]}=VALUE after the script"
            continue
        t.settings[f"eval.sets.{name}"] = {"data": path, "samples": samples, "sampling": sampling}
