"""Changes to megatron-core's descriptions of modules: a ModuleSpec, or since 0.18 a constructor with arguments bound."""

import dataclasses
import functools
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def submodules_of(part: Any) -> Any:
    """Return the record of the submodules in the description `part`, or None."""
    return part.submodules if isinstance(part, ModuleSpec) else part.keywords.get("submodules")


def with_submodules(part: Any, **changes: Any) -> Any:
    """Return the description `part` with its submodules replaced by `changes`."""
    submodules = dataclasses.replace(submodules_of(part), **changes)
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, submodules=submodules)
    return functools.partial(part.func, *part.args, **{**part.keywords, "submodules": submodules})
