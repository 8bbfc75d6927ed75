"""Words of another project into settings of ours: rules, what is left over, and the YAML of both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.load import parse_yaml
from megatron_rl.config.yaml_text import format_value, format_yaml
from megatron_rl.errors import UserError
from megatron_rl.importers.shell import UNKNOWN, Script

if TYPE_CHECKING:
    from megatron_rl.models.model_spec import ModelSpec


_NO_OFFLOAD = "the optimizer's state stays on the ranks' device; runtime.colocate puts it away in turns"
_UNUSED = {
    **dict.fromkeys(("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"), _NO_OFFLOAD),
    "use_precision_aware_optimizer": "main parameters and moments are float32",
}
"""Fields of megatron-core's classes with which no run starts, and why."""
_UPSTREAM = ("model.megatron.", "training.optimizer.", "training.ddp.", "rollout.sglang.")


def plain(text: str) -> Any:
    """Return the value of a text as YAML 1.2 reads it: a number, a boolean, null, a list or the text."""
    return parse_yaml(text, origin=text)


@dataclass(frozen=True, slots=True)
class Rule:
    """The setting `path` for a word, with `convert` for its value; without a path the reason why there is none.

    `note` says what differs in meaning.
    """

    path: str = ""
    convert: Callable[[str], Any] = plain
    note: str = ""


def none(reason: str) -> Rule:
    """Return the rule of a word without a place, with the reason and the nearest thing."""
    return Rule(note=reason)


def no_place(reason: str, names: str) -> dict[str, Rule]:
    """Return the rules of several words without a place for one reason."""
    return {name: none(reason) for name in names.split()}


def real(text: str) -> float:
    """Return a number that settings want as a real one, however it is written."""
    return float(plain(text))


def positive(text: str) -> Any:
    """Return None for -1 and 0, by which no token is left out."""
    value = plain(text)
    return value if value > 0 else None


@dataclass(slots=True)
class Translation:
    """The words not yet translated (a name and its values), our settings by path, and what is left over with the reason."""

    words: dict[str, list[str]]
    settings: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, default: str | None = None) -> str | None:
        """Return and remove the value of a word; "true" for a flag, `default` where it is not given or not known."""
        values = self.words.pop(name, None)
        if values is None:
            return default
        text = " ".join(values) if values else "true"
        if found := UNKNOWN.search(text):
            again = f"give {found[1]}=VALUE after the script" if found[1] else "set it by hand"
            self.left[name] = f"its value {text} comes from outside of the script; {again}"
            return default
        return text

    def number(self, name: str, default: float) -> float:
        """Return and remove a number, `default` for null. Raises UserError for another value."""
        value = plain(self.take(name) or "null")
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name} is {value!r}, needs a number; correct the script")
        return value

    def peek(self, name: str, default: int) -> int:
        """Return a whole number and leave its word; `default` where it is not given, not known or no whole number."""
        text = " ".join(self.words.get(name, ()))
        return int(text) if text.isdecimal() else default

    def flag(self, name: str, default: bool = False) -> bool:
        """Return and remove a switch."""
        return str(self.take(name, str(default))).lower() in ("true", "1", "yes")

    def apply(self, rules: Mapping[str, Rule]) -> None:
        """Translate every word that has a rule of its own."""
        for name, rule in rules.items():
            if name not in self.words:
                continue
            shown = " ".join(self.words[name])
            if not rule.path:
                self.words.pop(name)
                self.left[f"{name} {shown}".strip()] = rule.note
                continue
            text = self.take(name)
            if text is None:
                continue
            self.settings[rule.path] = value = rule.convert(text)
            # A bound that leaves nothing out means the same everywhere.
            if rule.note and value not in (None, 1.0):
                self.differs[f"{name} {shown}".strip()] = f"{rule.path}: {rule.note}"

    def finish(self, script: Script | None) -> None:
        """Leave out what contradicts other settings here, and note sourced files that are not there."""
        for file in [] if script is None else script.missing:
            self.left[f"source {file}"] = "the file is not there, so its variables are not known"
        for assignment in [] if script is None else script.skipped:
            self.left[assignment] = "in an if or a loop, and the value from outside of it is taken; give this one after the script"
        get, sft = self.settings.get, self.settings.get("objective.policy_loss") == "sft"
        cp, budget = get("training.topology.cp", 1), get("training.max_tokens_per_micro_batch")
        longest = get("data.max_prompt_tokens", 1024) + get("rollout.sampling.max_response_tokens", 1024)
        if budget is not None and budget * cp < longest and not sft:
            reason = f"less than the longest sequence of {longest} tokens shared by cp {cp}, which is taken"
            self.left[f"training.max_tokens_per_micro_batch {self.settings.pop('training.max_tokens_per_micro_batch')}"] = reason
        if get("rollout.max_staleness") and not sft and not {"objective.off_policy.mode", "objective.proximal"} & set(self.settings):
            self.settings["objective.proximal"] = "rollout"
            words = "objective.proximal: ratios are taken to the policy that sampled, not to a recomputed one"
            self.differs["asynchronous training"] = words

    def upstream(self, names: Mapping[str, str]) -> None:
        """Give the words in `names` (to a name of an upstream class) the settings of megatron-core's own fields."""
        import dataclasses

        from megatron_rl.models.upstream_fields import DistributedDataParallelConfig, OptimizerConfig, TransformerConfig

        owners = {"model.megatron": TransformerConfig, "training.optimizer": OptimizerConfig, "training.ddp": DistributedDataParallelConfig}
        for section, owner in owners.items():
            known = {each.name for each in dataclasses.fields(owner)}
            for word, name in names.items():
                if name not in known or word not in self.words or (text := self.take(word)) is None:
                    continue
                if name in _UNUSED:
                    self.left[f"{word} {text}"] = _UNUSED[name]
                else:
                    self.settings[f"{section}.{name}"] = plain(text)

    def text(self, origin: str, *, problems: Sequence[str] = ()) -> str:
        """Return the settings as YAML, under a comment with all that is left over and the `problems` to be mended."""
        lines = [f"# From {origin} by `megatron-rl import`."]
        for title, found in (("Without a place here", self.left), ("Of another meaning here", self.differs)):
            reasons: dict[str, list[str]] = {}
            for word, reason in found.items():
                reasons.setdefault(reason, []).append(word)
            lines += [f"# {title}:", *(f"#   {', '.join(words)}: {reason}" for reason, words in reasons.items())] if found else []
        lines += ["# To be mended before it starts:", *(f"#   {problem}" for problem in problems)] if problems else []
        return "\n".join(lines) + "\n" + format_yaml(_nested(self.settings))


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in sorted(settings.items()):
        *sections, name = path.split(".")
        section = nested
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return {name: nested[name] for name in ("run", "model", "data", *nested) if name in nested}


def settle(translation: Translation, *, origin: str) -> list[str]:
    """Leave out upstream fields that a run refuses, with its reason, as `train --check --config-only` finds them.

    Returns the problems that are left for the user, none when the check passes.
    """
    from megatron_rl.config.decided import decide
    from megatron_rl.config.load import validate_settings
    from megatron_rl.runtime.preflight import preflight

    while True:
        try:
            settings, _ = decide(validate_settings(_nested(translation.settings), origin=origin), has_gpus=True)
            preflight(settings, config_only=True)
            return []
        except UserError as error:
            problems = [line.strip(" -") for line in str(error).splitlines()]
            refused = {path: line for line in problems for path in translation.settings if path in line and path.startswith(_UPSTREAM)}
            if not refused:
                return [line for line in problems if not line.endswith("things are wrong")]
            for path, line in refused.items():
                translation.left[f"{path} {format_value(translation.settings.pop(path))}"] = line


def check_model(translation: Translation, config: Path, shapes: "Mapping[str, Callable[[ModelSpec], Any]]", *, complete: bool) -> None:
    """Compare the words that describe the model with its config.json, and drop them; `complete` where all are given.

    Raises UserError with every difference.
    """
    from megatron_rl.models.read_spec import read_model_spec

    given = {name: translation.take(name) for name in shapes if name in translation.words}
    if not (config / "config.json").is_file():
        if given:
            translation.left[" ".join(given)] = f"{config} has no config.json to compare them with; the architecture is read there"
        return
    spec, wrong = read_model_spec(config), []
    for name, shape in shapes.items():
        needed, text = shape(spec), given.get(name)
        got = plain(text) if text is not None else False if isinstance(needed, bool) else None
        if needed is not ... and (complete or text is not None) and got is not None and got != needed:
            wrong.append(f"{name} is {format_value(got)}, but config.json needs {format_value(needed)}")
    if wrong:
        raise UserError(f"the script describes another model than {config}: {'; '.join(wrong)}; give the model of the script by --model")
