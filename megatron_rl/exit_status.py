"""The exit status of a command.

0 for a command that is done; 2 for input that the user can mend, told in one sentence; 75 ended by SIGTERM,
SIGHUP or a death that no restart mends, where `--resume` goes on from the checkpoint; 1 any other
failure; 130 after Ctrl-C, with a checkpoint, too; 143 and 129 after SIGTERM and SIGHUP
without a checkpoint; 137 where the system killed the command; 141 when the output is not read to
the end, as behind `| head`: a started run goes on instead.
"""

import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable

import click

from megatron_rl.errors import MegatronRLError, ResumableError, UserError
from megatron_rl.runtime.grace import ENDING

RESUMABLE = 75
"""Exit status for starting the same command again: EX_TEMPFAIL of sysexits.h."""
_LEFT_BY = {128 + number: number for number in ENDING}
"""Signals that end a command, by the exit status."""
_REFUSED_PATHS = {
    errno.EACCES: "give yourself permission, or name another path",
    errno.EPERM: "give yourself permission, or name another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EISDIR: "a file is needed there: move the directory away, or name another path",
    errno.ENOTDIR: "a directory is needed there: name another path",
    errno.ELOOP: "mend the links of this path, or name another one",
}
"""What to do about a path that the system refuses, by the error's number. Checks ask of paths in many places."""


def exit_status(command: Callable[[], int | None]) -> int:
    """Run a command, by click's parser alone, which swallows no error; say why it ended, and return the exit status."""
    try:
        return _status(command)
    except BrokenPipeError:
        if not _silence_unread():
            traceback.print_exc()
            return 1
        return 128 + signal.SIGPIPE


def _status(command: Callable[[], int | None]) -> int:
    """Return the exit status. Raises BrokenPipeError for a pipe without a reader."""
    try:
        status = command()
        print(end="", flush=True)
    except BrokenPipeError:
        raise
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _tell(_sentence(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _tell("interrupted")
        return 128 + signal.SIGINT
    except SystemExit as error:
        if error.code not in _LEFT_BY:
            # An error of a user's own function.
            traceback.print_exc()
            return 1
        _tell("interrupted" if error.code == 128 + signal.SIGINT else f"ended by {_LEFT_BY[error.code].name}")
        return int(error.code)
    except UserError as error:
        _tell(str(error))
        return 2
    except ResumableError as error:
        _tell(str(error))
        return 128 + signal.SIGINT if error.interrupted else RESUMABLE
    except MegatronRLError as error:
        _tell(f"{type(error).__name__}: {error}")
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _REFUSED_PATHS and error.filename is not None:
            _tell(f"{error.filename} cannot be used ({error.strerror}); {_REFUSED_PATHS[error.errno]}")
            return 2
        # The third of the named boundaries: unforeseen errors end with a traceback and a status for scripts.
        traceback.print_exc()
        return 1
    return int(status or 0)


def _sentence(error: click.ClickException) -> str:
    """Return click's complaint, with a way to valid input where click proposes none."""
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or message.endswith("?"):
        return message
    return f"{message}; `{context.command_path} --help` lists what it takes"


def _tell(sentence: str) -> None:
    """Say why the command ends; without a reader the exit status stays."""
    try:
        print(f"megatron-rl: {sentence}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        _silence_unread()


def _silence_unread() -> bool:
    """Drop text buffered for a closed stream, which would fail at exit; False if none is closed."""
    poll = select.poll()
    # Standard output and standard error.
    for output in (1, 2):
        poll.register(output, 0)
    unread = [output for output, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in unread:
        os.dup2(nowhere, output)
    os.close(nowhere)
    return bool(unread)
