"""Pydantic's validation errors as sentences that name the setting, the value got, the value needed and the fix."""

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.config.settings_reference import SettingField, sections, setting_fields
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import UserError

_UNKNOWN = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_NEEDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "a mapping of names to values",
    "model_type": "a section with settings inside",
    "model_attributes_type": "a section with settings inside",
    "dataclass_type": "a section with settings inside",
    "tuple_type": "a list, such as [a, b]",
    "list_type": "a list, such as [a, b]",
    "none_required": "null",
    "finite_number": "a finite number",
    "path_type": "a path",
}
_BOUNDS = {
    "greater_than_equal": ("a number >= {}", "ge"),
    "greater_than": ("a number > {}", "gt"),
    "less_than_equal": ("a number <= {}", "le"),
    "less_than": ("a number < {}", "lt"),
}


_ALIASES = {
    "learning_rate": "training.optimizer.lr",
    "lr": "training.optimizer.lr",
    "betas": "training.optimizer.adam_beta1",
    "beta1": "training.optimizer.adam_beta1",
    "beta2": "training.optimizer.adam_beta2",
    "eps": "training.optimizer.adam_eps",
    "epsilon": "training.optimizer.adam_eps",
    "weight_decay": "training.optimizer.weight_decay",
    "max_grad_norm": "training.optimizer.clip_grad",
    "grad_clip": "training.optimizer.clip_grad",
    "gradient_clipping": "training.optimizer.clip_grad",
    "lr_scheduler_type": "training.schedule.decay_style",
    "lr_warmup_steps": "training.schedule.warmup_steps",
    "batch_size": "data.prompts_per_step",
    "train_batch_size": "data.prompts_per_step",
    "rollout_batch_size": "data.prompts_per_step",
    "n": "data.samples_per_prompt",
    "group_size": "data.samples_per_prompt",
    "num_generations": "data.samples_per_prompt",
    "n_samples_per_prompt": "data.samples_per_prompt",
    "max_steps": "run.num_steps",
    "output_dir": "run.directory",
    "max_tokens": "rollout.sampling.max_response_tokens",
    "max_new_tokens": "rollout.sampling.max_response_tokens",
    "max_completion_length": "rollout.sampling.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "kl_coef": "objective.kl.coef",
    "kl_loss_coef": "objective.kl.coef",
    "kl_reward_coef": "objective.kl_reward.coef",
    "beta": "objective.kl.coef",
    "clip_low": "objective.policy_loss.low",
    "clip_high": "objective.policy_loss.high",
    "epsilon_high": "objective.policy_loss.high",
    "entropy_coef": "objective.entropy.coef",
    "estimator": "objective.advantage.kind",
    "loss_args": "objective.policy_loss",
    "lambda": "objective.advantage.lam",
    "rollout_num_gpus_per_engine": "rollout.sglang.tp_size",
    "tensor_parallel_size": "rollout.sglang.tp_size",
    "world_size": "training.topology.num_ranks",
    "tensor_model_parallel_size": "training.topology.tp",
    "pipeline_model_parallel_size": "training.topology.pp",
    "context_parallel_size": "training.topology.cp",
    "expert_model_parallel_size": "training.topology.ep",
}
"""Names of settings in other programs."""

_WHOLE = (
    "tokens are drawn from the whole distribution, whose log-probs are what the trainer learns from; rollout.sampling.temperature shapes it"
)
_SURELY = 0.85
"""Least similarity of `topp` and `min_pp` to the intended names.

No setting's name is as similar to the intended names.
"""
_NEVER = {name: _WHOLE for name in ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")}


@functools.cache
def _settings() -> tuple[SettingField, ...]:
    return tuple(setting_fields())


def settings_error(error: ValidationError, *, values: Mapping[str, Any], origin: str) -> UserError:
    """Return one UserError with a line for every wrong setting in `values` from `origin`."""
    by_path: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_path(details["loc"], values), []).append(details)
    return joined_error([_sentence(path, details) for path, details in by_path.items()], origin=origin)


def joined_error(sentences: Sequence[str], *, origin: str) -> UserError:
    """Return an error of one sentence as given, or of several as a headed list of lines."""
    if len(sentences) == 1:
        return UserError(f"{origin}: {sentences[0]}")
    return UserError("\n  - ".join([f"{origin}: {len(sentences)} things are wrong", *sentences]))


def closest(name: str, candidates: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the most similar candidate to `name`; None when no similarity reaches `cutoff`."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_field(path: str, *, owner: str, known: Collection[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    """Return the sentence for the unknown setting `path`.

    The last part of `path` is no field of the upstream class `owner`, whose fields are `known`.
    `elsewhere` are the fields of other sections, by the section's path. Names in other programs are
    searched too.
    """
    section, _, name = path.rpartition(".")
    homes = [home for home, names in elsewhere.items() if name in names]
    alias = _ALIASES.get(name.lower())
    own = alias.rpartition(".")[2] if alias is not None else closest(name, known)
    if homes:
        guess: str | None = f"{homes[0]}.{name}"
    else:
        guess = f"{section}.{own}" if own in known else alias
    fix = f"did you mean {guess}?" if guess else f"the fields of {owner} are in the documentation of the installed release"
    return f"{path} is not a field of {owner}; {fix}"


def unknown_setting(path: str, *, kind: str | None = None) -> str:
    """Return the sentence for a setting that does not exist, with the closest existing setting.

    `kind` names the choice of the setting. A misspelled name is searched in its own section first,
    then everywhere by its last part: `run.temperature` finds `rollout.sampling.temperature`.
    """
    section, _, name = path.rpartition(".")
    never = closest(name.lower(), _NEVER, cutoff=_SURELY)
    if never is not None:
        meant = "" if name == never else f", meant as {never}"
        return f"unknown setting {path}{meant}; there is none because {_NEVER[never]}"
    settings = _settings()
    others = [other for field in settings if field.path == path for other in field.kinds]
    if others:
        return f"unknown setting {path} of {section}.kind {kind}; it is an argument of {', '.join(others)}: set {section}.kind={others[0]}"
    here = [
        field.path
        for field in settings
        if kind is None or not field.kinds or kind in field.kinds or not field.path.startswith(f"{section}.")
    ]
    paths = list(dict.fromkeys([*here, *sections()]))
    siblings = [known.rpartition(".")[2] for known in paths if known.rpartition(".")[0] == section]
    same_name = [known for known in paths if known.rpartition(".")[2] == name]
    sibling = closest(name, siblings)
    if name.lower() in _ALIASES:
        guess: str | None = _ALIASES[name.lower()]
    elif sibling is not None:
        guess = f"{section}.{sibling}" if section else sibling
    elif same_name:
        guess = same_name[0]
    else:
        leaf = closest(name, [known.rpartition(".")[2] for known in paths])
        guess = next((known for known in paths if known.rpartition(".")[2] == leaf), None) or closest(path, paths)
    if guess:
        kinds = next((field.kinds for field in settings if field.path == guess and kind is None), ())
        of_kind = f" of {guess.rpartition('.')[0]}.kind {', '.join(kinds)}" if kinds else ""
        return f"unknown setting {path}; did you mean {guess}{of_kind}? (`megatron-rl train --help all` lists them)"
    known_names = f"known in {section or 'the settings'}: {', '.join(siblings)}" if siblings else f"there is no section {section}"
    return f"unknown setting {path}; {known_names}"


def _path(location: tuple[int | str, ...], values: Any) -> str:
    """Return the dotted path of an error's location.

    Pydantic's parts for the members of a union are left out.
    """
    parts: list[str] = []
    for part in location:
        inside = isinstance(values, Mapping) and isinstance(part, str) and values.get("kind") != part
        if isinstance(values, Sequence) and not isinstance(values, str) and isinstance(part, int):
            parts.append(str(part))
            values = values[part] if part < len(values) else None
        elif inside:
            parts.append(str(part))
            values = values.get(part)
    return ".".join(parts)


def _sentence(path: str, details: Sequence[ErrorDetails]) -> str:
    """Return the sentence on all errors at one path.

    Several details are the alternatives of a union without a match.
    """
    first = details[0]
    if first["type"] in _UNKNOWN:
        return unknown_setting(path, kind=_kind_of(first["loc"], path))
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        kinds = next(field.type for field in _settings() if field.path == f"{path}.kind").removeprefix("one of ").split(", ")
        if first["type"] == "union_tag_not_found":
            return f"{path}.kind is missing, needs one of {', '.join(kinds)}; set {path}.kind={kinds[0]}"
        guess = closest(first["ctx"]["tag"], kinds)
        fix = f"; did you mean {path}.kind={guess}?" if guess else ""
        return f"{path}.kind is {first['ctx']['tag']!r}, needs one of {', '.join(kinds)}{fix}"
    if first["type"] == "missing":
        # Of a whole section, name the required fields.
        needed = [field for field in _settings() if field.required and f"{field.path}.".startswith(f"{path}.")]
        described = {field.path: f" ({field.description.rstrip('.')})" for field in needed} or {path: ""}
        return "; ".join(f"{name} is missing{meaning}; set it in the file, or with {name}=VALUE" for name, meaning in described.items())
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        if text.startswith(f"{path}."):
            return text
        owner, dot, rest = text.partition(".")
        # Users without a settings file make a record by its class, so the message names the class.
        if dot and owner.isidentifier():
            return f"{path}.{rest}"
        return f"{path} {text}" if text.startswith(("is ", "has ")) else f"{path}: {text}"
    got = first["input"]
    shown = format_value(got) if first["type"] in _BOUNDS or got is None else f"{format_value(got)} ({_kind(got)})"
    needs = ", or ".join(dict.fromkeys(_need(detail) for detail in details))
    return f"{path} is {shown}, needs {needs}{_fix(path, details, got)}"


def _kind_of(location: tuple[int | str, ...], path: str) -> str | None:
    """Return the kind that pydantic puts before the last part of an error's `location`.

    None where the setting is in no choice.
    """
    known = {kind for field in _settings() if field.path.rpartition(".")[0] == path.rpartition(".")[0] for kind in field.kinds}
    kinds = [str(part) for part in location[:-1] if part in known]
    return kinds[-1] if kinds else None


def _need(details: ErrorDetails) -> str:
    kind = details["type"]
    if kind in _NEEDS:
        return _NEEDS[kind]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        bound = details["ctx"][key]
        return words.format(int(bound) if bound == int(bound) else bound)
    if kind == "literal_error":
        return f"one of {details['ctx']['expected']}"
    message = details["msg"]
    return message[0].lower() + message[1:]


def _fix(path: str, details: Sequence[ErrorDetails], got: Any) -> str:
    """Return advice beyond giving a value of the needed kind; empty where there is none."""
    for detail in details:
        if detail["type"] == "literal_error" and isinstance(got, str):
            names = [name.strip(" '") for name in detail["ctx"]["expected"].replace(" or ", ",").split(",")]
            guess = closest(got, names)
            return f"; did you mean {path}={guess}?" if guess else ""
        if detail["type"] == "string_type" and isinstance(got, bool | int | float):
            return f"; put quotes around it if it is meant as text: {path}='\"{format_value(got)}\"'"
    return ""


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "mapping", type(None): "null"}
    return kinds[type(value)]
