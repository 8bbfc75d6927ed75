"""Pydantic's validation errors as sentences that name the setting, the value got, the value needed and the fix."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.config.settings_reference import sections, setting_fields
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import UserError

_NAMES_ELSEWHERE = {
    "run.directory": "output_dir",
    "run.num_steps": "max_steps",
    "data.max_prompt_tokens": "max_prompt_length",
    "eval.interval": "eval_interval test_freq",
    "data.prompts_per_step": "batch_size train_batch_size rollout_batch_size",
    "data.samples_per_prompt": "n group_size num_generations n_samples_per_prompt",
    "objective.advantage.kind": "estimator",
    "objective.advantage.lam": "lambda",
    "objective.entropy.coef": "entropy_coef",
    "objective.kl.coef": "kl_coef kl_loss_coef beta",
    "objective.kl_reward.coef": "kl_reward_coef",
    "objective.policy_loss": "loss_args",
    "objective.policy_loss.low": "clip_low",
    "objective.policy_loss.high": "clip_high epsilon_high",
    "rollout.sampling.max_response_tokens": "max_tokens max_new_tokens max_completion_length",
    "rollout.sglang.tp_size": "rollout_num_gpus_per_engine tensor_parallel_size",
    "training.optimizer.adam_beta1": "betas beta1",
    "training.optimizer.adam_beta2": "beta2",
    "training.optimizer.adam_eps": "eps epsilon",
    "training.optimizer.clip_grad": "max_grad_norm grad_clip gradient_clipping",
    "training.optimizer.lr": "learning_rate lr",
    "training.optimizer.weight_decay": "weight_decay",
    "training.schedule.decay_style": "lr_scheduler_type",
    "training.schedule.warmup_steps": "lr_warmup_steps",
    "training.topology.cp": "context_parallel_size",
    "training.topology.ep": "expert_model_parallel_size",
    "training.topology.num_ranks": "world_size",
    "training.topology.pp": "pipeline_model_parallel_size",
    "training.topology.tp": "tensor_model_parallel_size",
}
"""Names of settings in other programs."""
_ALIASES = {name: path for path, names in _NAMES_ELSEWHERE.items() for name in names.split()}
_YAML_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "mapping"}
_SET = re.compile(r"eval\.sets\.[^.]+\.")
"""Begin of the path of a setting of one set."""
_NEVER = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
"""Settings of sampling that do not exist."""
_SURELY = 0.85
"""Least similarity of a misspelled name to the intended one.

No setting's name is as similar to the intended names.
"""


def settings_error(error: ValidationError, *, values: Mapping[str, Any], origin: str) -> UserError:
    """Return one UserError with a line for every wrong setting in `values` from `origin`."""
    by_path: dict[str, ErrorDetails] = {}
    for details in error.errors(include_url=False):
        # Further errors of a path are the alternatives of a union without a match.
        by_path.setdefault(_path(details["loc"], values), details)
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
    if inside := _SET.match(path):
        known = {field.path: f"{inside[0]}{field.path}" for field in setting_fields(EvalSet)} | {"sampling": f"{inside[0]}sampling"}
        guess = known.get(closest(path.removeprefix(inside[0]), known, cutoff=0.5) or "")
        return f"unknown setting {path}; {f'did you mean {guess}?' if guess else 'a set has ' + ', '.join(known)}"
    never = closest(name.lower(), _NEVER, cutoff=_SURELY)
    if never is not None:
        meant = "" if name == never else f", meant as {never}"
        change = "a bias changes logits" if never == "logit_bias" else "a penalty changes logits by the tokens before"
        return (
            f"unknown setting {path}{meant}; there is none because {change}, which the trainer's log-probs do not; evaluations have it "
            "(eval.sets.NAME.sampling); rollout.sampling.temperature, top_p, top_k and min_p shape the distribution on both sides"
        )
    others = [other for field in setting_fields() if field.path == path for other in field.kinds]
    if others:
        return f"unknown setting {path} of {section}.kind {kind}; it is an argument of {', '.join(others)}: set {section}.kind={others[0]}"
    here = [field.path for field in setting_fields() if field.belongs_to(kind) or not field.path.startswith(f"{section}.")]
    paths = list(dict.fromkeys([*here, *sections()]))
    # The first of several settings of one name is found.
    leaves = {known.rpartition(".")[2]: known for known in reversed(paths)}
    siblings = {known.rpartition(".")[2]: known for known in paths if known.rpartition(".")[0] == section}
    in_section, anywhere = closest(name, siblings), closest(name, leaves)
    guess = _ALIASES.get(name.lower()) or siblings.get(in_section or "") or leaves.get(anywhere or "") or closest(path, paths)
    if guess:
        kinds = next((field.kinds for field in setting_fields() if field.path == guess and kind is None), ())
        of_kind = f" of {guess.rpartition('.')[0]}.kind {', '.join(kinds)}" if kinds else ""
        return f"unknown setting {path}; did you mean {guess}{of_kind}? (`megatron-rl train --help all` lists them)"
    known_names = f"known in {section or 'the settings'}: {', '.join(siblings)}" if siblings else f"there is no section {section}"
    return f"unknown setting {path}; {known_names}"


def _path(location: tuple[int | str, ...], values: Any) -> str:
    """Return the dotted path of an error's location, without pydantic's parts for members of a union."""
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


def _sentence(path: str, details: ErrorDetails) -> str:
    """Return the sentence on an error at `path`."""
    cause, got, kind = details["type"], details["input"], _kind_of(details["loc"], path)
    if cause in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_setting(path, kind=kind)
    if cause == "value_error":
        return _own_sentence(path, str(details["ctx"]["error"]))
    if cause == "missing":
        # Of a whole section, name the required fields.
        needed = [field for field in setting_fields() if field.required and f"{field.path}.".startswith(f"{path}.")]
        described = {field.path: f" ({field.description.rstrip('.')})" for field in needed} or {path: ""}
        return "; ".join(f"{name} is missing{meaning}; set it in the file, or with {name}=VALUE" for name, meaning in described.items())
    if cause.startswith("union_tag_"):
        path = f"{path}.kind"
    needs = _needed(path, kind, details["msg"])
    names = needs.removeprefix("one of ").split(", ")
    if cause == "union_tag_not_found":
        return f"{path} is missing, needs {needs}; set {path}={names[0]}"
    if cause == "union_tag_invalid":
        got = details["ctx"]["tag"]
    fix = ""
    if needs.startswith("one of ") and isinstance(got, str):
        guess = closest(got, names)
        fix = f"; did you mean {path}={guess}?" if guess else ""
    elif cause == "string_type" and isinstance(got, bool | int | float):
        fix = f"; put quotes around it if it is meant as text: {path}='\"{format_value(got)}\"'"
    shown = "null" if got is None else f"{format_value(got)} ({_YAML_TYPES[type(got)]})"
    return f"{path} is {shown}, needs {'a finite number' if cause == 'finite_number' else needs}{fix}"


def _own_sentence(path: str, text: str) -> str:
    """Return the message of a validator of ours with the setting in front, once."""
    if text.startswith(f"{path}."):
        return text
    owner, dot, rest = text.partition(".")
    # Users without a settings file make a record by its class, so the message names the class.
    if dot and owner.isidentifier():
        return f"{path}.{rest}"
    return f"{path} {text}" if text.startswith(("is ", "has ")) else f"{path}: {text}"


def _kind_of(location: tuple[int | str, ...], path: str) -> str | None:
    """Return the kind that pydantic puts before the last part of a choice's `location`, else None."""
    section = path.rpartition(".")[0]
    known = {kind for field in setting_fields() if field.path.rpartition(".")[0] == section for kind in field.kinds}
    kinds = [str(part) for part in location[:-1] if part in known]
    return kinds[-1] if kinds else None


def _needed(path: str, kind: str | None, message: str) -> str:
    """Return the type of the setting in words, of an item where `path` ends in the place in a list, else those of `message`."""
    owner, _, last = path.rpartition(".")
    name = owner if last.isdecimal() else path
    inside = _SET.match(name)
    fields = setting_fields(EvalSet) if inside else setting_fields()
    here = name.removeprefix(inside[0]) if inside else name
    words = next((field.type for field in fields if field.path == here and field.belongs_to(kind)), None)
    if words is None:
        # Within a mapping pydantic alone knows the type.
        _, found, should = message.partition("Input should be ")
        described = found and path not in sections() and should != "an object"
        return f"a value {should}" if described else "a section with settings inside"
    words = words if name == path else words.removeprefix("list of ")
    if words.startswith(("one of", "true or false")):
        return words
    return f"{'an' if words.startswith('integer') else 'a'} {words}"
