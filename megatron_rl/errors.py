"""Exceptions of the project, all of one tree, each also of the standard type it refines; and what their messages count.

A message says in one sentence what happened, the value got, the value needed and how to fix it.
"""


def counted(count: int, noun: str) -> str:
    """`count` of these in words: "1 rank", "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


class MegatronRLError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(MegatronRLError, ValueError):
    """Input that the user can mend: a setting, a file, a reward function. Printed as one sentence, without a traceback."""


class CheckpointError(UserError):
    """A checkpoint that cannot be gone on from as it is: the same command would end the same way."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not those that were saved."""


class EngineError(MegatronRLError, RuntimeError):
    """A generation engine died, refused a request or did not answer within its deadline."""


class WorkerDiedError(MegatronRLError, RuntimeError):
    """A process of the run ended without being asked to."""


class EngineKilledError(EngineError, WorkerDiedError):
    """A server of a generation engine was ended by a signal from outside, such as that of a machine without memory."""


class ParityError(MegatronRLError, RuntimeError):
    """Engine and trainer disagree about the probability of the same tokens, so training would be silently off-policy."""


class DeadlineError(MegatronRLError, TimeoutError):
    """A named wait ran past its deadline."""


class ResumableError(MegatronRLError, RuntimeError):
    """The run was ended by what has nothing to do with it, and goes on from a checkpoint when it is started again with --resume."""
