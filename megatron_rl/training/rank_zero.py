"""What rank 0 does alone, with an outcome that every rank knows."""

from collections.abc import Callable
from pathlib import Path

from torch import distributed

from megatron_rl.errors import UserError


def on_rank_zero(function: Callable[[Path], object], path: Path) -> None:
    """Run `function(path)` on rank 0; a UserError of rank 0 is raised on every rank. Collective."""
    message: list[str | None] = [None]
    if distributed.get_rank() == 0:
        try:
            function(path)
        except UserError as error:
            message[0] = str(error)
    distributed.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise UserError(message[0])
