"""The arguments of the SGLang server: every field of the installed ServerArgs by its own name, checked before anything starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from megatron_rl.config.messages import closest
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError

RECORD_ROUTING = "enable_return_routed_experts"
OWNED = {
    "model_path": "model.path sets it",
    "tokenizer_path": "model.path sets it",
    "host": "each engine binds the address of the machine that it is placed on",
    "port": "each engine takes a free port",
    "api_key": "each engine makes its own",
    "device": "it follows from the machine",
    "dtype": "model.dtype sets it",
    "random_seed": "run.seed sets it",
    "weight_version": "every weight sync sets it",
    "skip_tokenizer_init": "it follows from rollout.sampling.stop",
    "use_ray": "each engine is placed by this program",
    "grpc_mode": "engines are spoken to by HTTP",
    "smg_grpc_mode": "engines are spoken to by HTTP",
    RECORD_ROUTING: "training.routing_replay sets it",
    "encoder_only": "engines generate",
    "is_embedding": "engines generate",
}
"""Fields that the system sets itself, with what to use instead."""

CPU_DEFAULTS: dict[str, Any] = {
    "sleep_on_idle": True,  # else the idle scheduler keeps a core busy
    "disable_overlap_schedule": True,  # nothing to overlap with: half the latency of a lone request
    "max_total_tokens": 32768,  # else the KV pool takes 72 % of the machine's memory
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "log_level": "warning",
}
"""What a server without a GPU starts with where the user sets nothing else."""

GPU_DEFAULTS: dict[str, Any] = {"log_level": "warning"}

SHORT_PROMPT_TOKENS = 32
"""Prompts of at most so many tokens are computed anew rather than looked up: see `keeps_prefixes`."""


def sent_prompt_tokens(settings: Settings) -> int | None:
    """The longest prompt in tokens, None when a rollout of its own decides what engines are sent."""
    return settings.data.max_prompt_tokens if settings.rollout.function is None else None


def keeps_prefixes(*, device_kind: str, max_prompt_tokens: int | None) -> bool:
    """Whether a server is to keep the cache of finished requests for later ones that begin alike, its radix cache.

    The samples of a prompt are sent together and computed in one batch, where they find nothing of each other. What is left is
    the prompt's next visit, by when other weights have emptied the cache. On a CPU the tree then only costs, a seventh of the scheduler's
    time for prompts of 6 tokens. `max_prompt_tokens` None: a rollout of its own may send what it got back, which is worth keeping.
    """
    return device_kind != "cpu" or max_prompt_tokens is None or max_prompt_tokens > SHORT_PROMPT_TOKENS


def field_types() -> dict[str, tuple[Any, tuple[Any, ...] | None]]:
    """Type and, where the field is an enumeration, choices of every ServerArgs field. Imports SGLang (3 s)."""
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
    """Check `rollout.sglang` against the installed SGLang.

    Raises:
        UserError: a name that does not exist (with the closest one), a value of the wrong type or outside its choices, or a
            name that the system owns (with the setting to use instead).
    """
    owned = [name for name in arguments if name in OWNED]
    if owned:
        raise UserError(f"rollout.sglang.{owned[0]} is {arguments[owned[0]]!r} but cannot be set here: {OWNED[owned[0]]}; remove it")
    if not arguments:
        return
    fields = field_types()
    for name, value in arguments.items():
        if name not in fields:
            guess = closest(name, fields)
            fix = f"did you mean {guess}?" if guess else "see the fields of sglang.srt.server_args.ServerArgs"
            raise UserError(f"rollout.sglang.{name} is not an argument of the installed SGLang server; {fix}")
        declared, choices = fields[name]
        _check_type(name, value, declared)
        members = value if isinstance(value, list) else [value]
        if choices is not None and value is not None and any(member not in choices for member in members):
            raise UserError(f"rollout.sglang.{name} is {value!r}, needs one of {', '.join(map(str, choices))}")
    share = arguments.get("mem_fraction_static")
    if share is not None and not 0 < share <= 1:
        raise UserError(f"rollout.sglang.mem_fraction_static is {share}, needs a share of the device's memory, above 0 and at most 1")


def check_records_routing() -> None:
    """Raise UserError when the installed SGLang cannot tell to which experts it routes tokens. Imports SGLang (3 s)."""
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
        # SGLang declares a few unions that no converter can tell apart; the server itself reads those.
        return


def server_arguments(
    user: Mapping[str, Any],
    *,
    model_path: Path,
    device_kind: str,
    dtype: str,
    seed: int,
    host: str,
    port: int,
    api_key: str,
    num_gpus: int,
    needs_tokenizer: bool,
    records_routing: bool = False,
    colocated: bool = False,
    max_prompt_tokens: int | None = None,
) -> dict[str, Any]:
    """All fields for one server: defaults, then what the user set, then what the system owns. `num_gpus` is the default tp_size.

    A `colocated` server on GPUs allocates so that its memory can be released. `max_prompt_tokens` is the longest prompt of requests that
    are all prompts, None when they may be anything.

    Raises:
        UserError: something that JSON cannot carry was set.
    """
    defaults = dict(CPU_DEFAULTS) if device_kind == "cpu" else {**GPU_DEFAULTS, "tp_size": num_gpus}
    if not keeps_prefixes(device_kind=device_kind, max_prompt_tokens=max_prompt_tokens):
        defaults["disable_radix_cache"] = True
    owned: dict[str, Any] = {
        "model_path": str(model_path),
        "device": device_kind,
        "dtype": dtype,
        "random_seed": seed,
        "host": host,
        "port": port,
        "api_key": api_key,
        "weight_version": "0",
        "skip_tokenizer_init": not needs_tokenizer,
    }
    if records_routing:
        owned[RECORD_ROUTING] = True
    if colocated and device_kind == "cuda":
        owned["enable_memory_saver"] = True
    arguments = {**defaults, **user, **owned}
    try:
        json.dumps(arguments)
    except TypeError as error:
        raise UserError(f"rollout.sglang holds a value that JSON cannot carry ({error}); use strings, numbers, lists, mappings") from error
    return arguments
