"""Plain values as YAML 1.2 text."""

import io
import math
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML, SafeRepresenter


class _Representer(SafeRepresenter):
    """Representer without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _written(value: Any, *, flow: bool, width: int) -> str:
    writer, text = YAML(typ="safe", pure=True), io.StringIO()
    writer.Representer, writer.default_flow_style, writer.width, writer.allow_unicode = _Representer, flow, width, False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # ruamel declares None alone
    writer.dump(value, text)
    return text.getvalue()


def format_yaml(value: Mapping[str, Any]) -> str:
    """Return `value` as ASCII YAML text, keys in order; `parse_yaml` returns an equal value."""
    return _written(dict(value), flow=False, width=140)


def format_value(value: Any) -> str:
    """Return one value as on the command line: `0.2`, `cosine`, `[a, b]`, `null`."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return _written(value, flow=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def by_path(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values inside of nested mappings by their dotted paths, such as `rollout.sampling.top_p`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= by_path(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
