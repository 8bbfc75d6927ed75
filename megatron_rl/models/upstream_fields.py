"""Settings taken from megatron-core's own configuration classes: valid names and values."""

import dataclasses
import enum
import json
import typing
from collections.abc import Mapping
from typing import Any

import pydantic
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.messages import unknown_field
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import UserError

_SECTIONS: Mapping[type, str] = {
    OptimizerConfig: "training.optimizer",
    DistributedDataParallelConfig: "training.ddp",
    TransformerConfig: "model.megatron",
}
_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RATES = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay")
_MOMENTUMS = ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum")
_SIZES = ("bucket_size", "suggested_communication_unit_size", "muon_num_ns_steps", "hysteresis")


def checked_fields(section: str, given: Mapping[str, Any], owner: type, *, nullable: bool = False) -> dict[str, Any]:
    """Return `given`, the settings at `section`, with values of the types declared by `owner`.

    `owner` is a dataclass. A dtype and a member of an enumeration may be named. `nullable` takes
    None for every field. Raises UserError for a name absent from `owner` (with the closest one,
    also of the other sections), a value of another type, and a number outside the field's meaning.
    """
    return {name: _checked(f"{section}.{name}", value, owner, nullable=nullable) for name, value in given.items()}


def _checked(path: str, value: Any, owner: type, *, nullable: bool) -> Any:
    name, known = path.rpartition(".")[2], _names(owner)
    if name not in known:
        upstream = next(base for base in _SECTIONS if issubclass(owner, base))
        others = {section: _names(base) for base, section in _SECTIONS.items() if base is not upstream}
        raise UserError(unknown_field(path, owner=f"megatron-core's {upstream.__name__}", known=known, elsewhere=others))
    hint = typing.get_type_hints(owner)[name]
    named: Mapping[str, Any] | None = _DTYPES if torch.dtype in (hint, *typing.get_args(hint)) else None
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        named = hint.__members__
    if named is not None:
        if isinstance(value, str) and value in named:
            return named[value]
        if value is None and (nullable or type(None) in typing.get_args(hint)):
            return None
        raise UserError(f"{path} is {format_value(value)}, needs one of {', '.join(named)}")
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(
        hint | None if nullable else hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
    )
    try:
        # Through JSON, as our own settings are: strict mode then takes lists as tuples, and neither true nor "1" as a number.
        checked = adapter.validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if first["type"] in ("callable_type", "is_instance_of"):
            raise UserError(
                f"{path} is {format_value(value)}, but its values are Python objects, which no setting can name; remove it"
            ) from None
        raise UserError(f"{path} is {format_value(value)}: {first['msg']}; give a value of that type") from error
    _check_bounds(path, checked)
    return checked


def _names(owner: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)]


def _check_bounds(path: str, value: Any) -> None:
    """Raise UserError for rates above 10, momenta without forgetting and negative numbers."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return
    name = path.rpartition(".")[2]
    if name in _RATES:
        inside, needed = 0 <= value <= 10, "a number from 0 to 10"
    elif name in _MOMENTUMS:
        inside, needed = 0 <= value < 1, "a number >= 0 and < 1"
    elif name == "adam_eps":
        inside, needed = 0 < value <= 1, "a number > 0 and <= 1"
    elif name in _SIZES:
        inside, needed = value >= 1, "an integer >= 1"
    else:
        inside, needed = value >= 0, "a number >= 0"
    if not inside:
        raise UserError(f"{path} is {value}, needs {needed}")
