"""The base of all sections of the settings, and the types of paths and seconds."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

MAX_INTEGER = 2**31 - 1  # Accepted by torch, numpy, SQLite, SGLang and timers alike.


def _usable_path(value: Any) -> Any:
    """Return a path's text with `~` as the home directory."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise ValueError("is empty, needs a path")
    if "\0" in value:
        raise ValueError(f"is {value!r}, but no file name has a zero character; remove it")
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        raise ValueError(f"is {value}, but there is no such home directory here; give the whole path") from None


FilePath = Annotated[Path, BeforeValidator(_usable_path)]
Seconds = Annotated[float, Field(ge=0.001, le=366 * 86400)]  # A year is within the range of every clock.


class Section(BaseModel):
    """A frozen group of settings in which an unknown key, a number that is not finite and an empty text are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _sound(cls, value: Any) -> Any:
        """Return the value of any field after a check of size, so that readers cannot fail."""
        for item in value if isinstance(value, tuple) else (value,):
            if item == "":
                raise ValueError("has an empty text, needs at least one character")
            if type(item) is int and not -1 <= item <= MAX_INTEGER:
                raise ValueError(f"is {item}, needs an integer of at most {MAX_INTEGER}")
        return value
