"""Programs of strangers in bubblewrap: no network, no host files, one process, bounded memory, time and output.

A sandbox sees the system's libraries and Python's, read-only, and a small /tmp of its own. System
calls that start processes, or take memory which no limit counts, are refused by a seccomp filter.
"""

import functools
import math
import os
import platform
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

OUTPUT_BYTES = 2**23  # of one file: standard output, and any in /tmp
DISK_BYTES = 2**26
SMALLEST_MEMORY_MB = 128
_READY = b"ready"
_MOST_FILES = 64
STARTS_S = 10.0
_POLL_S = 0.002
_CALLS = ("clone", "clone3", "fork", "vfork", "execve", "execveat", "ptrace", "shmget", "unshare", "setns", "memfd_create", "bpf",
          "userfaultfd", "io_uring_setup", "keyctl", "add_key", "perf_event_open", "syslog")  # fmt: skip
_NUMBERS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, (56, 435, 57, 58, 59, 322, 101, 29, 272, 308, 319, 321, 323, 425, 250, 248, 298, 103)),
    "aarch64": (0xC00000B7, (220, 435, -1, -1, 221, 281, 117, 194, 97, 268, 279, 280, 282, 425, 219, 217, 241, 116)),
}
"""The audit number of an architecture, and the numbers of _CALLS there; -1: there is none."""
_PRELUDE = """
import ctypes, os, resource
for name, value in {limits}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
code = bytes.fromhex("{code}")
if ctypes.CDLL(None, use_errno=True).prctl(22, 2, ctypes.byref(Filter(len(code) // 8, code))):
    raise OSError(ctypes.get_errno(), "no seccomp filter")
os.write({report}, b"ready")
"""
_MAIN = """
exec(compile(open("/main.py", encoding="utf-8").read(), "/main.py", "exec"), {"__name__": "__main__"})
"""


class Sandbox:
    """A program that runs, or has run for `seconds`. `report` is a file of the code before it, and of a trusted program."""

    def __init__(self, process: subprocess.Popen[bytes], *, report: int, errors: int) -> None:
        self.process, self.report, self.errors, self.seconds = process, report, errors, 0.0

    def begin(self) -> None:
        """Wait for the program's begin, behind all limits. Raises OSError where nothing was isolated."""
        end_s = time.monotonic() + STARTS_S
        while not content(self.report).startswith(_READY):
            ended = self._has_ended(_POLL_S)
            if (ended or time.monotonic() > end_s) and not content(self.report).startswith(_READY):
                self.process.kill()
                why = f"status {self.process.wait()}" if ended else f"not begun after {STARTS_S:g} s"
                raise OSError(f"{why}: {content(self.errors).decode(errors='replace').strip()[-500:]}".strip(": "))

    def wait(self, timeout_s: float) -> bool:
        """Wait `timeout_s` from its begin for the end, and kill it then; return True for exit status 0. Raises as `begin`."""
        self.begin()
        begin_s = time.monotonic()
        ended = self._has_ended(max(timeout_s, 0.0))
        self.seconds = time.monotonic() - begin_s
        self.process.kill()
        return self.process.wait() == 0 and ended

    def _has_ended(self, timeout_s: float) -> bool:
        # Popen.wait sleeps in steps of up to 50 ms, as long as a whole start.
        file = os.pidfd_open(self.process.pid)
        try:
            return bool(select.select([file], [], [], timeout_s)[0])
        finally:
            os.close(file)


def content(file: int) -> bytes:
    """Return what is in an open file."""
    return os.pread(file, OUTPUT_BYTES, 0)


@contextmanager
def sandboxed(
    files: Mapping[str, str], stdin: int, stdout: int, *, timeout_s: float, memory_mb: int, trusted: bool = False
) -> Iterator[Sandbox]:
    """Run main.py of `files`, which are in the sandbox's root, from `stdin` to `stdout`; kill it at the end of the block.

    Only a `trusted` program gets the file of `report`, as descriptor REPORT.
    """
    with ExitStack() as stack:
        report, errors = (stack.enter_context(memory_file()) for _ in range(2))
        sources = {name: stack.enter_context(memory_file(text.encode("utf-8", "replace"))) for name, text in files.items()}
        limits = {
            "CPU": math.ceil(timeout_s) + 1, "AS": max(memory_mb, SMALLEST_MEMORY_MB) * 2**20, "FSIZE": OUTPUT_BYTES,
            "NOFILE": _MOST_FILES, "CORE": 0,
        }  # fmt: skip
        prelude = _PRELUDE.format(limits=limits, code=_filter().hex(), report=report)
        prelude += f"REPORT = {report}" if trusted else f"os.close({report})"
        main = _MAIN.replace('{"__name__"', '{"REPORT": REPORT, "__name__"') if trusted else _MAIN
        process = subprocess.Popen(
            [*_command(), *(word for name, file in sources.items() for word in ("--ro-bind-data", str(file), f"/{name}")),
             "--remount-ro", "/", _python(), "-I", "-B", "-c", prelude + main],
            stdin=stdin, stdout=stdout, stderr=errors, pass_fds=[report, *sources.values()],
        )  # fmt: skip
        try:
            yield Sandbox(process, report=report, errors=errors)
        finally:
            # The sandbox dies with this one process.
            process.kill()
            process.wait()


@contextmanager
def memory_file(data: bytes = b"") -> Iterator[int]:
    """Open a file in memory with `data`, at its begin."""
    file = os.memfd_create("sandbox")
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(data)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


@functools.cache
def check_isolation() -> None:
    """Raise OSError, one sentence, where no sandbox can be started; tried once in a process."""
    try:
        with (
            memory_file() as empty,
            memory_file() as out,
            sandboxed({"main.py": "print(1)"}, empty, out, timeout_s=STARTS_S, memory_mb=512) as box,
        ):
            if not box.wait(STARTS_S) or content(out) != b"1\n":
                raise OSError(f"a trial program did not print 1: {content(box.errors).decode(errors='replace')[-500:]}")
    except (OSError, KeyError) as error:
        reason = "there is no bwrap on PATH" if isinstance(error, FileNotFoundError) else str(error)
        raise OSError(
            f"code is not run, because it cannot be isolated here ({reason}); install bubblewrap (Debian: apt-get install bubblewrap) and "
            "allow user namespaces, or score on another machine by the reward remote"
        ) from None


def _python() -> str:
    """Return the interpreter's real file: a virtual environment is not in a sandbox."""
    return os.path.realpath(sys.executable)


@functools.cache
def _command() -> tuple[str, ...]:
    """Return the command line of bubblewrap before the program's own files."""
    words = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--clearenv"]
    variables = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
    words += [word for name, value in variables.items() for word in ("--setenv", name, value)]
    for path in (Path("/lib"), Path("/lib64")):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
    libraries = dict.fromkeys(["/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{os.path.realpath(sys.base_prefix)}/lib"])
    found = [path for path in libraries if os.path.isdir(path) and not os.path.islink(path)]
    words += [word for path in (*found, _python()) for word in ("--ro-bind", path, path)]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # No devices: in a sandbox of root the program would own the host's nodes, and could change their modes.
    return (*words, "--size", str(DISK_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp")


@functools.cache
def _filter() -> bytes:
    """Return a seccomp filter in BPF: _CALLS fail, clone unless for a thread, and other architectures' calls kill."""
    architecture, numbers = _NUMBERS[platform.machine()]
    load, equal, at_least, any_bit, result = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (result, 0, 0, kill), (load, 0, 0, 0)]
    # Numbers of x32, whose architecture is the same.
    code += [(at_least, 0, 1, 0x40000000), (result, 0, 0, kill)]
    for name, number in zip(_CALLS, numbers, strict=True):
        if number >= 0 and name != "clone":
            # The C library takes clone where there is no clone3.
            code += [(equal, 0, 1, number), (result, 0, 0, unknown if name == "clone3" else refuse)]
    code += [(equal, 0, 3, numbers[0]), (load, 0, 0, 16), (any_bit, 1, 0, 0x10000), (result, 0, 0, refuse), (result, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *each) for each in code)
