"""From a YAML file and command line overrides to validated settings, and back to text.

Order: file, then overrides (a later one wins), then the objective's preset fills open values, then
validation, then decisions on open settings (`config/decided.py`), then the cross-checks of
`config/checks.py`. Types are strict: an integer is no number in quotes and no boolean. Paths are
relative to the directory in which the command runs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_rl.algorithms.objective import expand_preset
from megatron_rl.config.checks import contradictions
from megatron_rl.config.decided import Decision, decide
from megatron_rl.config.messages import joined_error, settings_error
from megatron_rl.config.overrides import apply_overrides
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_yaml, parse_yaml
from megatron_rl.errors import UserError

_ADAPTER = TypeAdapter(Settings)


def load_settings(path: Path | None, overrides: Sequence[str] = (), *, on_gpus: bool | None = None) -> Settings:
    """Load settings from the YAML file `path`, with `key.path=value` overrides set on top.

    `path` None takes the overrides alone. Raises UserError for an unreadable file, bad YAML,
    unknown or misspelled settings, wrong types or ranges, and contradictions between settings.
    Several mistakes are reported together, one line each.
    """
    return load_decided(path, overrides, on_gpus=on_gpus)[0]


def load_decided(path: Path | None, overrides: Sequence[str] = (), *, on_gpus: bool | None = None) -> tuple[Settings, tuple[Decision, ...]]:
    """Return settings as `load_settings`, with the decisions on open settings.

    `on_gpus` None takes GPUs where `runtime.cluster.gpu` names some or this machine has some; False
    decides nothing about GPUs.
    """
    origin = " and ".join([str(path)] * (path is not None) + ["overrides"] * bool(overrides)) or "settings"
    values = apply_overrides({} if path is None else _read(path), overrides)
    validated = _validated(values, origin=origin)
    # Asking torch would take seconds.
    has_gpus = (validated.runtime.cluster.gpu is not None or Path("/dev/nvidia0").exists()) if on_gpus is None else on_gpus
    settings, decisions = decide(validated, has_gpus=has_gpus)
    return _sound(settings, origin=origin), decisions


def validate_settings(values: Mapping[str, Any], *, origin: str) -> Settings:
    """Return settings from nested plain values as YAML gives them. Raises UserError.

    `origin` names the source of the values in errors.
    """
    return _sound(_validated(values, origin=origin), origin=origin)


def _sound(settings: Settings, *, origin: str) -> Settings:
    wrong = contradictions(settings)
    if wrong:
        raise joined_error(wrong, origin=origin)
    return settings


def _validated(values: Mapping[str, Any], *, origin: str) -> Settings:
    values = _expanded(values, origin=origin)
    try:
        text = json.dumps(values, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{origin}: the settings cannot be written as JSON ({error}); remove half characters and a YAML alias that contains itself"
        ) from None
    try:
        # Through JSON, because pydantic's strict mode takes JSON strings as paths and lists as tuples, but no Python ones.
        return _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        raise settings_error(error, values=values, origin=origin) from None


def dump_settings(settings: Settings) -> str:
    """Return all settings, defaults included, as YAML text.

    `load_settings` makes equal settings from the text.
    """
    return format_yaml(_ADAPTER.dump_python(settings, mode="json"))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Settings file {path} cannot be read ({error.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"Settings file {path} is not UTF-8 text (byte {error.start}); give the path of a YAML file") from None
    values = parse_yaml(text, origin=str(path))
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path} holds {type(values).__name__}, needs a mapping of sections; start with a line such as `run:`")
    return values


def _expanded(values: Mapping[str, Any], *, origin: str) -> dict[str, Any]:
    """Return `values` with the objective's preset replaced by fields, and with a section data.

    The section names its missing values.
    """
    values = {**values, "data": values.get("data", {})}
    objective = values.get("objective")
    if not isinstance(objective, Mapping):
        return dict(values)
    try:
        return {**values, "objective": expand_preset(objective)}
    except ValueError as error:
        raise UserError(f"{origin}: objective.preset: {error}") from None
