"""Settings that are fields of megatron-core's own configuration classes: which names there are, and what their values can be."""

import dataclasses
import enum
import typing
from collections.abc import Mapping
from typing import Any

import pydantic
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.messages import unknown_field
from megatron_rl.errors import UserError

_SECTIONS: Mapping[type, str] = {
    OptimizerConfig: "training.optimizer",
    DistributedDataParallelConfig: "training.ddp",
    TransformerConfig: "model.megatron",
}
_DTYPES: Mapping[Any, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RATES = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay")
_MOMENTUMS = ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum")
_SIZES = ("bucket_size", "suggested_communication_unit_size", "muon_num_ns_steps", "hysteresis")


def checked_fields(section: str, given: Mapping[str, Any], owner: type, *, nullable: bool = False) -> dict[str, Any]:
    """`given`, the settings at `section`, with values of the types that the fields of the dataclass `owner` declare.

    A dtype and a member of an enumeration may be named. `nullable` takes None for every field. Raises UserError for a name that `owner`
    lacks (with the closest one, also of the other sections), a value of another type, and a number that the field cannot mean.
    """
    return {name: _checked(f"{section}.{name}", value, owner, nullable=nullable) for name, value in given.items()}


def _checked(path: str, value: Any, owner: type, *, nullable: bool) -> Any:
    name, known = path.rpartition(".")[2], _names(owner)
    if name not in known:
        upstream = next(base for base in _SECTIONS if issubclass(owner, base))
        others = {section: _names(base) for base, section in _SECTIONS.items() if base is not upstream}
        raise UserError(unknown_field(path, owner=f"megatron-core's {upstream.__name__}", known=known, elsewhere=others))
    hint = typing.get_type_hints(owner)[name]
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    if hint is torch.dtype and value in _DTYPES:
        value = _DTYPES[value]
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(
        hint | None if nullable else hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
    )
    try:
        checked = adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise UserError(f"{path} is {value!r}: {error.errors()[0]['msg']}; give a value of that type") from error
    _check_bounds(path, checked)
    return checked


def _names(owner: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)]


def _check_bounds(path: str, value: Any) -> None:
    """Raise UserError for a number that the field at `path` cannot mean: rates above 10, momenta that never forget, negative numbers."""
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
