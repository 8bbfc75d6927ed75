"""Exceptions of the project in one tree, each also of a standard type; and counts in messages.

A message gives in one sentence the event, the value got, the value needed and the fix.
"""


def counted(count: int, noun: str) -> str:
    """Return `count` and the noun in words: "1 rank", "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def sized(num_bytes: float) -> str:
    """Return a size with its unit, such as "700 KiB", "45 MiB" and "1.5 GiB"."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**10:.0f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


class MegatronRLError(Exception):
    """Base of every error raised by this package on purpose."""


class UserError(MegatronRLError, ValueError):
    """A mistake in the user's input: a setting, a file, a reward function.

    Printed as one sentence, without a traceback.
    """


class CheckpointError(UserError):
    """A checkpoint that does not allow a continuation: the same command would end the same way."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with other files than the saved ones."""


class TrajectoryError(MegatronRLError, RuntimeError):
    """The failure of one trajectory, with a `cause` to count and the `trace` of the user's code."""

    def __init__(self, cause: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.cause, self.trace = cause, trace


class EngineError(MegatronRLError, RuntimeError):
    """The end of a generation engine, a refused request, or no answer within the deadline."""


class EngineRefusal(EngineError):
    """An answer of the engine at `url`, of another HTTP `status` than success or of a failure."""

    def __init__(self, message: str, *, status: int, url: str = "") -> None:
        super().__init__(message)
        self.status, self.url = status, url


class WorkerDiedError(MegatronRLError, RuntimeError):
    """A process of the run ended without being asked to."""


class EngineDiedError(EngineError, WorkerDiedError):
    """The end of an engine's server after service, by itself or by an outside signal."""


class ParityError(MegatronRLError, RuntimeError):
    """Engine and trainer disagree about the probability of the same tokens."""


class DeadlineError(MegatronRLError, TimeoutError):
    """The end of a named wait at its deadline."""


class ResumableError(MegatronRLError, RuntimeError):
    """An end of the run by an outside cause; a new start with --resume goes on from a checkpoint.

    `interrupted` is True at the user's request: no program should start the run again by itself.
    """

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.interrupted = interrupted
