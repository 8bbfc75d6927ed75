"""Odd settings files, overrides and settings that contradict the model."""

from collections.abc import Callable
from pathlib import Path

import pytest

Refuse = Callable[..., str]

SETTINGS_FILES: list[tuple[str, bytes | str, list[str]]] = [
    ("unclosed list", "run: [", ["odd.yaml, line 1", "not valid YAML"]),
    ("key twice", "run: {seed: 1}\nrun: {seed: 2}", ["odd.yaml, line 2", 'duplicate key "run"']),
    ("list", "- run", ["holds list", "mapping of sections"]),
    ("number", "3", ["holds int"]),
    ("number for a section", "run: 5", ["run is 5 (integer)", "a section with settings"]),
    ("number as key", "run: {1: 2}", ["key 1 is not a string", "quotes"]),
    ("Python object", "run: !!python/name:os.system x", ["line 1", "could not determine a constructor"]),
    ("bytes", "run: {directory: !!binary aGk=}", ["type bytes", "write it as text"]),
    ("set", "data: !!set {a}", ["type set"]),
    ("alias of itself", "a: &a [*a]", ["more than 10000 values", "aliases"]),
    (
        "alias bomb",
        "\n".join(["a: &a0 [1,1,1,1,1,1,1,1,1,1]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9))]),
        ["more than 10000"],
    ),
    ("alias of nothing", "run: *base", ["line 1", "undefined alias"]),
    ("tab", "\trun: 1", ["line 1", "cannot start any token"]),
    ("UTF-16", "run: {seed: 1}".encode("utf-16"), ["not UTF-8 text"]),
    ("control character", b"run: {seed: 1}\x00", ["unacceptable character"]),
    ("two documents", "run: {}\n---\nrun: {}", ["another document"]),
    ("other version", "%YAML 9.9\n---\nrun: {}", ["incompatible YAML"]),
    ("merge of a number", "run: {<<: 3}", ["for merging"]),
    ("half a character", 'data: {train: "\\ud800"}', ["cannot be written as JSON", "half characters"]),
    ("zero character", 'run: {directory: "a\\0b"}', ["run.directory", "zero character"]),
    ("integer of 5,000 digits", "run: {seed: " + "9" * 5000 + "}", ["4300 digits"]),
    ("data file", "# a row\n" * 2**18, ["odd.yaml has more than 1,048,576 bytes", "path of a YAML file"]),
    ("nested", "[" * 2000, ["nested too deeply"]),
    ("date", "run: {seed: 2026-01-02}", ["run.seed is '2026-01-02' (string)", "an integer"]),
]


@pytest.mark.parametrize(("text", "parts"), [case[1:] for case in SETTINGS_FILES], ids=[case[0] for case in SETTINGS_FILES])
def test_settings_files(text: bytes | str, parts: list[str], tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refuse(["train", str(path)], *parts)


LEAST = ["run.directory=runs/x", "model.path=model", "data.train=train.jsonl"]
OVERRIDES: list[tuple[list[str], list[str]]] = [
    (["=1"], ["=1 cannot be read"]),
    (["run="], ["run is null", "a section"]),
    (["data=[]"], ["data is [] (list)"]),
    (["run.seed.x=1"], ["run.seed is {x: 1} (mapping)", "an integer"]),
    (["run.seed=1", "two.yaml", "three.yaml"], ["'three.yaml' after the settings file two.yaml", "at most one"]),
    (["--run.seed"], ["--run.seed has no value", "run.seed=VALUE"]),
    (["--run.seed=[1"], ["override 'run.seed=[1'", "not valid YAML"]),
    ([".".join(["run"] * 300) + "=1"], ["the settings are nested too deeply", "so many levels"]),
    (["--nothing=3"], ["unknown setting nothing"]),
    (["--check=1"], ["'--check' does not take a value"]),
    (["/proc/self/mem"], ["/proc/self/mem cannot be read"]),
    (["/"], ["/ cannot be read (Is a directory)"]),
    (["run.seed=\uff11"], ["run.seed is", "an integer"]),
    (["run.seed=1e3"], ["run.seed is 1000.0 (number)", "an integer"]),
    (["run.seed=true"], ["run.seed is true (boolean)"]),
    (["run.seed=-1"], ["run.seed is -1", ">= 0"]),
    (["run.seed=4294967296"], ["run.seed", "2147483647"]),
    (["run.num_steps=0"], ["run.num_steps is 0", ">= 1"]),
    (["run.directory=~nobodyhere/x"], ["run.directory", "no such home directory"]),
    (['run.directory=" "'], ["run.directory is empty"]),
    (["model.dtype=fp16"], ["model.dtype is fp16", "bfloat16"]),
    (["model.teacher=[]"], ["model.teacher is []"]),
    (["model.megatron=3"], ["model.megatron is 3", "a mapping"]),
    (["model.megatron.x=.nan"], ["model.megatron.x is nan", "a finite number"]),
    (["data.train=null"], ["data.train is missing", "data.source"]),
    (["data.source=a:b"], ["data.train is train.jsonl and data.source is a:b", "one of them"]),
    (["data.args={a: 1}"], ["data.args has a", "data.source is not set"]),
    (["data.samples_per_prompt=1"], ["data.samples_per_prompt is 1", "2 or more"]),
    (["data.prompts_per_step=2147483647"], ["more than 2147483647", "lower data.prompts_per_step"]),
    (["data.max_prompt_tokens=0"], ["data.max_prompt_tokens is 0"]),
    (["objective.preset=grop"], ["objective.preset", "grpo"]),
    (["rollout.sampling.temperature=0"], ["rollout.sampling.temperature is 0", ">= 0.01"]),
    (["rollout.sampling.stop=x"], ["rollout.sampling.stop is x", "a list"]),
    (['rollout.sampling.stop=[""]'], ["rollout.sampling.stop has an empty text"]),
    (["rollout.sampling.stop_token_ids=[-1]"], ["rollout.sampling.stop_token_ids.0 is -1", ">= 0"]),
    (["rollout.sampling.frequency_penalty=0.9"], ["there is none", "top_p"]),
    (
        ["rollout.sampling.min_p=0.1", "rollout.sglang={enable_deterministic_inference: true}"],
        ["rollout.sampling.min_p is 0.1", "enable_deterministic_inference", "use top_p or top_k"],
    ),
    (["rollout.num_engines=20000"], ["rollout.num_engines is 20000", "<= 16384"]),
    (["rollout.max_staleness=1", "runtime.colocate=true"], ["runtime.colocate is true with rollout.max_staleness 1", "to 0"]),
    (["rollout.filter={}"], ["rollout.filter.function is missing"]),
    (["reward.timeout_s=.inf"], ["reward.timeout_s is .inf"]),
    (["rollout.max_concurrent_requests=0"], ["rollout.max_concurrent_requests is 0", ">= 1"]),
    (["reward.max_error_rate=1.5"], ["reward.max_error_rate is 1.5", "<= 1"]),
    (["reward.function=3"], ["reward.function is 3 (integer)", "a string", "quotes"]),
    (["--reward", ""], ["reward.function has an empty text"]),
    (["--ray-address", ""], ["runtime.ray_address has an empty text"]),
    (["--ray-address", "notanaddress"], ["runtime.ray_address is notanaddress", "HOST:PORT", "leave it out"]),
    (["runtime.ray_address=node:0"], ["runtime.ray_address is node:0", "HOST:PORT"]),
    (["training.topology.num_ranks=3", "training.topology.tp=2"], ["3 ranks cannot be divided by tp 2", "2 or 4"]),
    (["training.topology.vpp=2"], ["vpp is 2 with pp 1"]),
    (["training.topology.sequence_parallel=true"], ["sequence_parallel is true with tp 1"]),
    (["training.topology={num_ranks: 2, ep: 3}"], ["2 ranks cannot be divided by", "ep 3"]),
    (["training.topology={num_ranks: 4, tp: 2, ep: 2}"], ["needs sequence_parallel"]),
    (["training.optimizer_steps_per_batch=7"], ["not divisible by 7 optimizer steps", "optimizer_steps_per_batch to 4 or 8"]),
    (["training.max_tokens_per_micro_batch=10"], ["a sequence may have", "micro-batch holds", "2048 or more"]),
    (["training.schedule.warmup_steps=101"], ["warmup_steps is 101", "100 or less"]),
    (["training.schedule.decay_steps=5"], ["decay_style constant never decays"]),
    (["training.schedule={decay_style: cosine, decay_steps: 5, warmup_steps: 5}"], ["reach its floor at optimizer step 5"]),
    (["training.schedule.decay_style=cosin"], ["decay_style is cosin", "did you mean training.schedule.decay_style=cosine?"]),
    (["training.optimizer.lr=-1"], ["training.optimizer.lr is -1", ">= 0"]),
    (["training.optimizer={lr: 1.0e-6, min_lr: 1.0e-5}"], ["min_lr", "above lr", "exchange"]),
    (["weights.transport=ipc"], ["weights.transport is ipc with runtime.colocate false"]),
    (["weights.transport=pigeon"], ["weights.transport is pigeon", "broadcast"]),
    (["weights.parity_threshold=0"], ["weights.parity_threshold is 0", "> 0"]),
    (["eval.interval=5"], ["eval.interval is 5, but eval.sets is empty"]),
    (["objective.policy_loss=sft", "eval.sets.x=x.jsonl"], ["eval.sets has x", "sft starts no engine"]),
    (["run.seed=2000000000", "rollout.num_engines=3"], ["seed of the last engine", "or less"]),
    (["runtime.cluster.num_nodes=0"], ["runtime.cluster.num_nodes is 0"]),
    (["learning_rate=1"], ["training.optimizer.lr"]),
    (["--config-only"], ["--config-only was given without --check"]),
    (["--weights-only"], ["--weights-only was given without --resume"]),
    (["--help", "trainin"], ["names no section", "did you mean training?"]),
]


@pytest.mark.parametrize(("odd", "parts"), OVERRIDES, ids=[" ".join(case[0])[:60] for case in OVERRIDES])
def test_overrides(odd: list[str], parts: list[str], refuse: Refuse) -> None:
    refuse(["train", *LEAST, *odd], *parts)


CHECKED: list[tuple[list[str], list[str]]] = [
    (["training.optimizer.lr=true"], ["training.optimizer.lr is true", "valid number"]),
    (['training.optimizer.lr="1e-3"'], ["training.optimizer.lr is '1e-3'", "valid number"]),
    (["training.optimizer.lr=11"], ["training.optimizer.lr is 11", "from 0 to 10"]),
    (["training.optimizer.adam_beta1=1"], ["adam_beta1 is 1", "< 1"]),
    (["training.optimizer.optimizer=sgd"], ["'sgd'", "only 'adam'"]),
    (["training.optimizer.params_dtype=float8"], ["params_dtype is float8", "float32, bfloat16, float16"]),
    (["training.ddp.bucket_size=0"], ["bucket_size is 0", ">= 1"]),
    (
        ["training.ddp.overlap_param_gather=true", "training.optimizer.use_distributed_optimizer=false"],
        ["overlap_param_gather is on without"],
    ),
    (["model.megatron.attention_backend=best"], ["attention_backend is best", "flash, fused"]),
    (["model.megatron.activation_func=gelu"], ["Python objects", "remove it"]),
    (["model.megatron.num_layers=2.0"], ["num_layers is 2.0", "valid integer"]),
    (["model.megatron.hidden_size=128"], ["hidden_size is 128", "64"]),
    (["training.frozen=[nothing]"], ["'nothing', which matches no tensor"]),
    (["training.topology={num_ranks: 8, tp: 8}"], ["tp 8"]),
    (["training.topology={num_ranks: 3, pp: 3}"], ["pp 3"]),
    (["training.routing_replay=true"], ["has no experts"]),
    (["rollout.sampling.stop_token_ids=[32]"], ["stop_token_ids has 32", "below vocab_size 32"]),
    (["rollout.sampling.max_response_tokens=500"], ["16 + rollout.sampling.max_response_tokens 500", "512"]),
    (["rollout.sglang.tp_size=3"], ["tp_size", "num_attention_heads 4", "divisor of 4"]),
    (["rollout.sglang.tp_size=0"], ["rollout.sglang.tp_size is 0", "from 1 to 1024", "change it"]),
    (["rollout.sglang.host=0.0.0.0"], ["rollout.sglang.host", "cannot be set here"]),
    (["rollout.sglang.mem_fraction_static=true"], ["rollout.sglang.mem_fraction_static is True", "another type"]),
    (["rollout.function=odd_reward:score"], ["rollout.function odd_reward:score has the signature (*, sample)", "prompt=.."]),
    (["reward.args.x=1"], ["reward.args.x is no argument of odd_reward:score"]),
    (["reward.function=odd_reward"], ["reward.function is 'odd_reward'", "package.module:function"]),
    (["reward.function=odd_reward:scores"], ["odd_reward has no scores", "did you mean odd_reward:score?"]),
    (["data.label_key=answer"], ["no row has the field 'answer'", "data.label_key"]),
    (["data.prompt_key=question"], ["no field 'question'", "data.prompt_key"]),
    (["data.train=rows.csv"], ["rows.csv does not exist"]),
    (["eval.sets.a=/"], ["data file / is a directory"]),
    (["eval.sets.a=/dev/null"], ["/dev/null"]),
    (["run.directory=/dev/null/x"], ["/dev/null is a file", "another directory"]),
    (["run.directory=/proc/x"], ["run.directory is /proc/x", "another directory"]),
    (["run.directory={model}"], ["holds a run already", "--resume"]),
    (["model.teacher=/nope", "objective.distillation_coef=1"], ["model.teacher is /nope", "not a directory"]),
    (["model.path=/dev/null"], ["model.path is /dev/null, which is not a directory"]),
    (["runtime.cluster.gpu=T4"], ["T4"]),
    (["runtime.network_interface=lo"], ["without runtime.ray_address", "remove it"]),
    (["runtime.network_interface=ib9", "runtime.ray_address=10.0.0.1:6379"], ["interfaces here are", "name one"]),
]


@pytest.mark.parametrize(("odd", "parts"), CHECKED, ids=[" ".join(case[0])[:60] for case in CHECKED])
def test_settings_against_the_model(odd: list[str], parts: list[str], words: list[str], model: Path, refuse: Refuse) -> None:
    refuse([*words, *(word.replace("{model}", str(model)) for word in odd)], *parts)
