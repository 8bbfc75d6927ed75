"""Which groups a step trains on by the user's own rule, `rollout.filter`."""

from collections.abc import Callable

from megatron_rl.config.settings import FilterSettings
from megatron_rl.errors import UserError
from megatron_rl.plugins import KINDS, load
from megatron_rl.types import Group

GroupFilter = Callable[[Group], str | None]
"""A group -> None to train on it, or why not, as the buffer notes it."""


def load_filter(settings: FilterSettings | None) -> GroupFilter:
    """The filter that the settings name, its answers checked; one that keeps everything when they name none.

    Raises:
        UserError: it cannot be imported or does not take the arguments of the contract or of the settings. The filter itself raises
            UserError where the user's function fails or returns something else than None or a reason.
    """
    if settings is None:
        return lambda group: None
    name = f"{KINDS['filter'].setting} {settings.function}"
    keep = load(settings.function, kind="filter", args=settings.args)

    def checked(group: Group) -> str | None:
        try:
            reason = keep(group=group)
        except Exception as error:  # a user's function can fail in any way
            raise UserError(f"{name} failed for the group of prompt {group.id}: {type(error).__name__}: {error}") from error
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(
                f"{name} returned {reason!r} of type {type(reason).__name__} for the group of prompt {group.id}, needs None to keep it, or "
                "a text that says why not"
            )
        return f"{name}: {reason}"

    return checked
