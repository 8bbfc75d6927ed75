"""Attacks on the code reward, each by a program in real bubblewrap: nothing gets out, and nothing passes that should not."""

import http.server
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_rl.config.settings import RewardSettings
from megatron_rl.errors import UserError
from megatron_rl.rewards import sandbox
from megatron_rl.rewards.code import same_output, score
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.rewards.sandbox import content, memory_file, sandboxed
from megatron_rl.types import Prompt, Sample

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap (Debian: apt-get install bubblewrap)")
pytestmark = needs_bubblewrap
ASSERTS = "assert f(1) == 2\nassert f(3) == 4"
PAIRS = {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]}
CALLS = {"fn_name": "f", "inputs": [[1], [3]], "outputs": [2, 4]}


def value_of(program: str, tests: Any, **options: Any) -> float:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", metadata={"tests": tests})
    sample = Sample.written(prompt, text=f"First\n```python\nraise SystemExit\n```\nthen\n```python\n{program}\n```\nDone.")
    reward = score(sample=sample, **options)["reward"]
    assert isinstance(reward, float)
    return reward


def printed(program: str, *, timeout_s: float = 5.0) -> tuple[bool, str, str]:
    """Exit status 0, standard output and standard error of a program alone in a sandbox."""
    with memory_file() as given, memory_file() as out:
        with sandboxed({"main.py": program}, given, out, timeout_s=timeout_s, memory_mb=256) as box:
            ended = box.wait(timeout_s)
            errors = content(box.errors).decode()
        return ended, content(out).decode(), errors


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return x + 1", ASSERTS),
        ("def f(x): return x + 1", [ASSERTS, "assert f(x=5) == 6"]),
        ("def f(x): return x + 1", "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"),
        ("def f(x): return x + 1", CALLS),
        ("class Solution:\n    def f(self, x): return x + 1", json.dumps(CALLS)),
        ("def f(x): return x + 1", [{"fn_name": "f", "input": [1], "output": 2}]),
        ("print(int(input()) + 1)", PAIRS),
        ("print(int(input()) + 1)", [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]),
        ("def f(*a): return (a, {1}, {2: [None]}, 1e308 * 10)", "assert f(1, 'b') == ((1, 'b'), {1}, {2: [None]}, float('inf'))"),
        ("def f(x): raise ValueError(x)", "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == '1'"),
    ],
)  # fmt: skip
def test_a_right_program_passes_tests_of_each_form(program: str, tests: Any) -> None:
    assert value_of(program, tests) == 1.0


def test_results_may_be_in_lists_of_one() -> None:
    wrapped = CALLS | {"outputs": [[2], [4]]}
    assert [value_of("def f(x): return x + 1", wrapped, wrapped=wraps) for wraps in (True, False)] == [1.0, 0.0]


EVERY_FILE = "import os\nfor n in range(1, 64):\n    try: os.write(n, b'{}')\n    except OSError: pass"
CHEATS = {
    "wrong": "def f(x): return x",
    "exits early": "import os; os._exit(0)",
    "exits in the call": "def f(x):\n    import os; os._exit(0)",
    "exits quietly": "def f(x): raise SystemExit(0)",
    "prints the marker": f"{EVERY_FILE.format('readypassed')}\nprint('readypassed')",
    "equals all": "class All(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\ndef f(x): return All(0)",
    "ends loops": "def f(x): raise StopIteration",
    "patches the checker": (
        "import builtins, json\nbuiltins.AssertionError = SystemExit\njson.loads = lambda *a, **k: 2\nbuiltins.vars = lambda *a: {}\n"
        "def f(x): return 0"
    ),
    "looks through frames": (
        "import gc, sys\ndef f(x):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
        "        seen += [frame.f_locals, frame.f_globals]\n        frame = frame.f_back\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, str) and 'assert' + ' f(' in o]\n"
        "    return 2 if 'assert' + ' f(' in repr(seen) or found else 0"
    ),
    "reads the tests": "def f(x): return x + 1 if 'assert' in open('/tests.py').read() else 0",
    "answers before it is asked": EVERY_FILE.format('["", 2]\\n["", 3]\\n') + "\ndef f(x): return 0",
    "answers garbage": EVERY_FILE.format('["", ' * 9999 + "\\n") + "\ndef f(x): return 0",
    "floods": "while True:\n    " + EVERY_FILE.format("x" * 9999).replace("\n", "\n    "),
    "waits": "import time; time.sleep(1000)",
    "spins": "while True: pass",
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_no_trick_passes_asserts(name: str) -> None:
    begin_s = time.monotonic()
    loop = "assert all(map(lambda pair: f(pair[0]) == pair[1], [(5, 6), (7, 8)]))"
    tests = loop if name == "ends loops" else ASSERTS
    assert value_of(CHEATS[name], tests, timeout_s=1.0) == 0.0
    assert time.monotonic() - begin_s < 60


@pytest.mark.parametrize(
    "program",
    [
        "print(2)", "import os; print(2); os._exit(0)", "while True: print(2)", "import sys; sys.stdout.write('2\\n4\\n')",
        "print(int(input()) + 1); raise SystemExit(1)", "print('x' * 10**8)", "",
    ],
)  # fmt: skip
def test_no_other_output_passes(program: str) -> None:
    assert value_of(program, PAIRS, timeout_s=1.0) == 0.0


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 \n2\n\n", "1\n2", True), ("1\n2", "1 2", False), ("0.3000000001", "0.3", True), ("0.31", "0.3", False), ("1.0", "1", False),
        ("", "", True), ("x", "", False), ("nan", "0.3", False), ("1 0.5", "1 0.50", True), ("2 0.5", "1 0.50", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_outside(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.fixture
def server() -> Iterator[int]:
    """A server on the host's loopback; its requests fail the test."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made.server_address[1]
    made.shutdown()
    made.server_close()
    assert not asked


def test_the_network_is_away(server: int) -> None:
    attack = "import socket\nfor host in ('127.0.0.1', 'localhost', '1.1.1.1'):\n    try: socket.create_connection((host, PORT), 2)\n"
    attack += "    except OSError as error: print('refused')\n    else: print('OPEN')\n"
    assert printed(attack.replace("PORT", str(server)))[1] == "refused\n" * 3


def test_host_files_and_variables_are_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "secret")
    (tmp_path / "secret").write_text("secret")
    repository = str(Path(__file__).parents[2])
    attack = (
        f"import os\nplaces = {str(tmp_path / 'secret')!r}, {repository!r}, '/etc/passwd', '/proc', '/sys', '/home', '/var'\n"
        f"print([each for each in places if os.path.exists(each)])\nos.symlink({str(tmp_path)!r}, '/tmp/link')\n"
        "print(os.path.exists('/tmp/link/secret'), os.listdir('/tmp'), 'SECRET_KEY' in os.environ)\n"
    )
    assert printed(attack)[1] == "[]\nFalse ['link'] False\n"
    assert printed("import os; print(os.listdir('/tmp'))")[1] == "[]\n", "nothing is left of the run before"


def test_nothing_outside_of_tmp_can_be_written() -> None:
    attack = (
        "import os, sys\nfor place in ('/', '/usr/lib', os.path.dirname(os.__file__)):\n"
        "    try: open(os.path.join(place, 'x'), 'w')\n    except OSError: continue\n    print('WROTE', place)\n"
        "try: os.unlink('/main.py')\nexcept OSError: print('kept')\n"
        "try: os.unlink(os.__file__)\nexcept OSError: print('kept')\nopen('/tmp/x', 'w').write('1')\n"
        "print(os.path.exists('/dev'))\nfor place in ('/', '/usr/lib', '/main.py', os.__file__):\n"
        "    for change in (lambda: os.chmod(place, 0o755), lambda: os.utime(place), lambda: os.chown(place, 65534, 65534)):\n"
        "        try: change()\n        except OSError: continue\n        print('CHANGED', place)\n"
    )
    assert printed(attack) == (True, "kept\nkept\nFalse\n", "")


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['/usr/bin/true'])", "PermissionError"),
        ("import os; os.execv(os.sys.executable, ['python'])", "PermissionError"),
        ("import os; os.memfd_create('x')", "PermissionError"),
        ("import ctypes; assert ctypes.CDLL(None).klogctl(3, ctypes.create_string_buffer(99), 99) >= 0", "AssertionError"),
        ("x = bytearray(10**10)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError"),
        ("for n in range(1000): open(f'/tmp/{n}', 'wb').write(bytes(8 * 10**6))", "No space left"),
        ("open('/tmp/x', 'wb').write(bytes(10**7))", "File too large"),
        ("import os\nfiles = [os.open('/main.py', 0) for _ in range(1000)]", "Too many open files"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "ValueError"),
        ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ""),
        ("import ctypes; ctypes.string_at(0)", ""),
    ],
)  # fmt: skip
def test_processes_memory_and_files_are_bounded(attack: str, error: str) -> None:
    ended, _, errors = printed(attack, timeout_s=20.0)
    assert not ended and error in errors
    assert printed("print(1)") == (True, "1\n", ""), "and the next program runs as ever"


def test_calls_of_other_architectures_end_the_program() -> None:
    ended, out, _ = printed("import ctypes\nprint('before', flush=True)\nctypes.CDLL(None).syscall(0x40000000 + 57)\nprint('after')")
    assert (ended, out) == (False, "before\n")


def test_signals_reach_no_process_of_the_host() -> None:
    before = os.getppid()
    ended, out, _ = printed(
        "import os, signal\nfor pid in (1, os.getppid(), -1):\n    try: os.kill(pid, 9)\n    except OSError: pass\nprint('sent')"
    )
    assert (ended, out, os.getppid()) == (True, "sent\n", before)


def test_no_process_of_a_killed_program_is_left() -> None:
    def ours() -> set[int]:
        return {each.pid for each in psutil.process_iter(["cmdline"]) if "/main.py" in " ".join(each.info["cmdline"] or ())}

    before = ours()
    assert not printed(
        "import threading\n[threading.Thread(target=exec, args=('while True: pass',)).start() for _ in range(3)]", timeout_s=0.5
    )[0]
    deadline_s = time.monotonic() + 10
    while ours() - before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not ours() - before


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], r"is \[\], needs inputs and outputs"),
        (None, "is None, needs"),
        ("", "holds ''"),
        ("assert True", "they call nothing of it"),
        ("from solution import f\nassert f(1) == 2", "No module named 'solution'"),
        ("assert f(1) == ", "no Python"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ],
)
def test_tests_that_test_nothing_are_an_error(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value_of("def f(x): return x + 1", tests)


@pytest.mark.parametrize(("text", "tests"), [("no program", PAIRS), ("```python\nprint(2)", PAIRS), ("", ASSERTS)])
def test_a_response_without_a_whole_program_gets_zero(text: str, tests: Any) -> None:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", metadata={"tests": tests})
    assert score(sample=Sample.written(prompt, text=text)) == {"reward": 0.0, "answer": ""}


@pytest.mark.parametrize(("command", "reason"), [("no-such-bwrap", "there is no bwrap on PATH"), ("false", "status 1")])
def test_without_isolation_nothing_runs(command: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe says it before a run begins; a call is an error, never a zero."""
    monkeypatch.setattr(sandbox, "_command", lambda: (command,))
    sandbox.check_isolation.cache_clear()
    with pytest.raises(OSError, match=rf"cannot be isolated here \({reason}.*install bubblewrap"):
        value_of("def f(x): return x + 1", ASSERTS)
    sandbox.check_isolation.cache_clear()


def test_a_probe_says_that_nothing_can_be_isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label=ASSERTS)
    with RewardRunner(RewardSettings(function="code")) as runner, pytest.raises(UserError, match="No permissions to create new namespace"):
        runner.probe(prompt)
