"""The SGLang server's arguments: fields of the installed ServerArgs, checked before any start."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from packaging.version import Version

from megatron_rl.config.messages import unknown_field
from megatron_rl.errors import UserError
from megatron_rl.system.versions import installed_version

SAFE_RELEASE = "0.5.21"
"""The first SGLang that unpickles no more than a list of names, and asks for the key where adapters are loaded from tensors."""
RECORD_ROUTING = "enable_return_routed_experts"
LOGIT_PROCESSOR = "enable_custom_logit_processor"
ORDER_LOADER = "megatron_rl.engines.received_weights.follow"
ROUTER, ROUTER_RELEASE = "router", "0.3.2"  # no field of ServerArgs, but those of a router before all engines; what it was tried with
ENGINE_HEADER = "x-megatron-rl-engine"  # with it an engine behind a router names its URL in each answer
ROUTER_FIELDS = ("policy", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold", "eviction_interval_secs", "max_tree_size")
WeightOrder = Literal["begin", "note", "digest", "end"]
"""Of a sync: its begin, the same with checksums of what comes, a look at what the model has, its end."""

_SAMPLED = "every token has to be drawn from the policy's own distribution at rollout.sampling.temperature"
_SEEN = "the trainer builds its model from config.json alone and would not see it"
OWNED = {
    "model_path": "model.path sets it",
    "tokenizer_path": "model.path sets it",
    "host": "each engine binds the address of the machine that it is placed on",
    "port": "each engine takes a free port",
    "api_key": "each engine makes its own",
    "node_rank": "each server of an engine on several nodes gets its own",
    "dist_init_addr": "the servers of an engine meet at a free port of its first node",
    "device": "it follows from the machine",
    "dtype": "model.dtype sets it",
    "random_seed": "run.seed sets it",
    "weight_version": "every weight sync sets it",
    "skip_tokenizer_init": "it follows from rollout.sampling.stop and rollout.agent",
    "use_ray": "each engine is placed by this program",
    "grpc_mode": "engines are spoken to by HTTP",
    "smg_grpc_mode": "engines are spoken to by HTTP",
    RECORD_ROUTING: "training.routing_replay sets it",
    "encoder_only": "engines generate",
    "is_embedding": "engines generate",
    "preferred_sampling_params": f"it adds to what rollout.sampling says, and {_SAMPLED}",
    LOGIT_PROCESSOR: f"rollout.sampling.entropy sets it; without, {_SAMPLED}",
    "enable_watermark": _SAMPLED,
    "enable_strict_thinking": f"it forbids tokens, and {_SAMPLED}",
    "dllm_algorithm": f"a diffusion model's tokens have no log-prob of their own, and {_SAMPLED}",
    "json_model_override_args": f"{_SEEN}; change config.json",
    "forward_hooks": _SEEN,
}
"""Fields that are set here or would train silently wrong, with the reason or setting."""

OWNED_PREFIXES = {
    "speculative_": "a draft model is not trained along, and its tokens may be accepted by a rule that draws from another distribution; "
    f"{_SAMPLED}",
    "watermark_": _SAMPLED,
}
"""As OWNED, for all fields that begin so."""

OWNED_ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probs would leave the temperature out, and the trainer divides by it",
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "responses would end before rollout.sampling.max_response_tokens, which sets their budget",
    "SGLANG_MAX_THINK_TOKENS": f"it forces tokens, and {_SAMPLED}",
    "SGLANG_SANITIZE_NAN_LOGITS": "it draws tokens from logits that are NaN, where the run has to stop",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": "tokens would go to experts that the router did not choose",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "tokens would go to experts that the router did not choose",
}
"""Environment variables that change draws or reports, with the reason for their refusal."""

_SIZES = ("nnodes", "tp_size", "pp_size", "dp_size", "ep_size", "context_length", "max_total_tokens", "max_running_requests")

CPU_DEFAULTS: dict[str, Any] = {
    "sleep_on_idle": True,  # else the idle scheduler keeps a core busy
    "disable_overlap_schedule": True,  # nothing to overlap with: half the latency of a lone request
    "disable_hybrid_swa_memory": True,  # torch's attention there reads every layer's keys where those of layers without a window are
    "max_total_tokens": 32768,  # else the KV pool takes 72 % of the machine's memory
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
}
"""What a server without a GPU starts with where the user sets nothing else."""

CPU_DETERMINISTIC: dict[str, Any] = {
    "attention_backend": "torch_native",
    "chunked_prefill_size": -1,  # a prompt is never cut where others in its batch leave room
    "mem_fraction_static": 0.5,  # else SGLang keeps more than there is for prompts of any length
}
"""The same for a server with `enable_deterministic_inference`."""

SHORT_PROMPT_TOKENS = 32  # longest prompts that are computed anew rather than looked up: see `keeps_prefixes`


def keeps_prefixes(*, device_kind: str, max_prompt_tokens: int | None) -> bool:
    """Return True when a server should keep a radix cache of finished requests.

    Samples of a prompt are computed in one batch, without cache hits, and new weights empty the
    cache before the prompt's next visit. On a CPU the tree takes a seventh of the scheduler's time
    for prompts of 6 tokens. `max_prompt_tokens` None: a custom rollout may resend earlier output.
    """
    return device_kind != "cpu" or max_prompt_tokens is None or max_prompt_tokens > SHORT_PROMPT_TOKENS


def field_types() -> dict[str, tuple[Any, tuple[Any, ...] | None]]:
    """Return type and choices, if any, of every ServerArgs field. Imports SGLang (3 s)."""
    from sglang.srt.server_args import ServerArgs

    fields: dict[str, tuple[Any, tuple[Any, ...] | None]] = {}
    for name, hint in get_type_hints(ServerArgs, include_extras=True).items():
        if name.startswith("_"):
            continue
        declared, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        choices = [note.choices for note in notes if not isinstance(note, str) and note.choices is not None]
        fields[name] = (declared, tuple(choices[0]) if choices else None)
    return fields


def validate_server_args(arguments: Mapping[str, Any]) -> None:
    """Raise UserError for a name or value in `rollout.sglang` that cannot be set in this SGLang."""
    for name, value in arguments.items():
        reasons = [OWNED[name]] if name in OWNED else [why for prefix, why in OWNED_PREFIXES.items() if name.startswith(prefix)]
        if reasons:
            raise UserError(f"rollout.sglang.{name} is {value!r} but cannot be set here: {reasons[0]}; remove it")
    if ROUTER in arguments:
        _check_router(arguments[ROUTER])
        arguments = {name: value for name, value in arguments.items() if name != ROUTER}
    if not arguments:
        return
    fields = field_types()
    for name, value in arguments.items():
        if name not in fields:
            raise UserError(unknown_field(f"rollout.sglang.{name}", owner="the installed SGLang's ServerArgs", known=fields, elsewhere={}))
        declared, choices = fields[name]
        _check_type(name, value, declared)
        members = value if isinstance(value, list) else [value]
        if choices is not None and value is not None and any(member not in choices for member in members):
            raise UserError(f"rollout.sglang.{name} is {value!r}, needs one of {', '.join(map(str, choices))}")
    for name in _SIZES:
        if arguments.get(name) is not None and arguments[name] < 1:
            raise UserError(f"rollout.sglang.{name} is {arguments[name]}, needs an integer >= 1")
    copies = arguments.get("dp_size", 1)
    if copies > 1 and not arguments.get("enable_dp_attention", False):
        raise UserError(
            f"rollout.sglang.dp_size is {copies}, which would put {copies} copies of the model behind one server, which takes no weight "
            f"broadcast and meets at a port that is open to every interface; remove it and raise rollout.num_engines, or set "
            f"enable_dp_attention"
        )
    share = arguments.get("mem_fraction_static")
    if share is not None and not 0 < share <= 1:
        raise UserError(f"rollout.sglang.mem_fraction_static is {share}, needs a share of the device's memory, above 0 and at most 1")


def _check_router(fields: Any) -> None:
    path = f"rollout.sglang.{ROUTER}"
    if not isinstance(fields, Mapping):
        raise UserError(f"{path} is {fields!r}, needs a mapping of RouterArgs's fields, such as {{}} or {{cache_threshold: 0.5}}")
    try:
        known = get_type_hints(importlib.import_module("sglang_router.router_args").RouterArgs)
    except ModuleNotFoundError as error:
        got = f"{path} is set, but {error.name} is not installed"
        raise UserError(f"{got}; pip install sglang-router=={ROUTER_RELEASE}, or remove {path}") from error
    for name, value in fields.items():
        if name not in known:
            raise UserError(unknown_field(f"{path}.{name}", owner="the installed RouterArgs", known=known, elsewhere={}))
        if name not in ROUTER_FIELDS:
            raise UserError(f"{path}.{name} is {value!r} but cannot be set here, where a run needs {', '.join(ROUTER_FIELDS)}; remove it")
        _check_type(f"{ROUTER}.{name}", value, known[name])
    if (policy := fields.get("policy", "cache_aware")) != "cache_aware":
        why = "with others the router does not count an engine's requests, by which a hanging engine is told from an idle one"
        raise UserError(f"{path}.policy is {policy!r}, needs cache_aware: {why}")


def check_tensor_parallel(arguments: Mapping[str, Any], config: Mapping[str, Any], *, origin: str) -> None:
    """Raise UserError for a tp_size that does not divide the heads of `config` in `origin`."""
    # SGLang would load everything first. Ranks may share a key-value head.
    ranks = arguments.get("tp_size", 1) // (arguments.get("dp_size", 1) if arguments.get("enable_dp_attention") else 1)
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", groups)):
        if isinstance(count, int) and ranks > 1 and count % ranks and (name == "num_attention_heads" or ranks % count):
            raise UserError(
                f"rollout.sglang.tp_size shares {name} {count} of {origin} out to {ranks} ranks, needs a divisor of {count}; change it"
            )


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise UserError for an environment variable of an engine that changes draws or reports, or an unsafe SGLang."""
    check_release(installed_version("sglang"))
    for name, why in OWNED_ENVIRONMENT.items():
        if name in environment:
            raise UserError(f"the environment has {name}={environment[name]}, which the engines would follow: {why}; unset it")


def check_release(installed: str | None) -> None:
    """Raise UserError for an installed SGLang with known holes; None, for no SGLang, passes."""
    if installed is not None and Version(installed) < Version(SAFE_RELEASE):
        raise UserError(
            f"SGLang {installed} is installed, needs {SAFE_RELEASE} or later: earlier ones unpickle code that a request brings "
            "(CVE-2026-15969); install a later one"
        )


def check_records_routing() -> None:
    """Raise UserError when the installed SGLang cannot report experts. Imports SGLang (3 s)."""
    if RECORD_ROUTING not in field_types():
        raise UserError(
            f"training.routing_replay is true, but the installed SGLang has no argument {RECORD_ROUTING}; install 0.5.9 or later, or set "
            "it to false"
        )


def _check_type(name: str, value: Any, declared: Any) -> None:
    try:
        msgspec.convert(value, declared, strict=True)
    except msgspec.ValidationError as error:
        reason = str(error)
        raise UserError(f"rollout.sglang.{name} is {value!r}, needs another type: {reason[0].lower()}{reason[1:]}") from error
    except TypeError:
        # A few unions are such that no converter tells them apart; the server reads the values.
        return


def server_arguments(
    user: Mapping[str, Any],
    *,
    model_path: Path,
    device_kind: str,
    dtype: str,
    seed: int,
    needs_tokenizer: bool = False,
    records_routing: bool = False,
    shapes_logits: bool = False,
    colocated: bool = False,
    max_prompt_tokens: int | None = None,
    has_weights: bool = True,
) -> dict[str, Any]:
    """Return the fields for one server but its address: defaults, then the user's, then ours.

    A `colocated` server on GPUs allocates releasable memory. `max_prompt_tokens` None: requests are
    not only prompts. One that `shapes_logits` runs what a request names. Without `has_weights` the
    directory describes the model alone. Raises UserError for a value that JSON cannot carry.
    """
    defaults: dict[str, Any] = {"log_level": "warning"}
    if device_kind == "cpu":
        defaults |= CPU_DEFAULTS | (CPU_DETERMINISTIC if user.get("enable_deterministic_inference") else {})
    if not keeps_prefixes(device_kind=device_kind, max_prompt_tokens=max_prompt_tokens):
        defaults["disable_radix_cache"] = True
    owned: dict[str, Any] = {
        "model_path": str(model_path),
        "device": device_kind,
        "dtype": dtype,
        "random_seed": seed,
        "weight_version": "0",
        "custom_weight_loader": [*(user.get("custom_weight_loader") or ()), ORDER_LOADER],
        "skip_tokenizer_init": not needs_tokenizer,
    }
    if not has_weights:
        owned["load_format"] = "dummy"
    owned |= {name: True for name, asked in ((RECORD_ROUTING, records_routing), (LOGIT_PROCESSOR, shapes_logits)) if asked}
    if colocated and device_kind == "cuda":
        owned["enable_memory_saver"] = True
    arguments = {**defaults, **user, **owned}
    try:
        json.dumps(arguments)
    except TypeError as error:
        raise UserError(f"rollout.sglang holds a value that JSON cannot carry ({error}); use strings, numbers, lists, mappings") from error
    return arguments
