"""Reward for programs: 1 when the program in the response passes all tests of its row, 0 when not.

Expected values never enter the sandbox of the program. Its output is compared outside; calls of
its functions come from a second sandbox, which has the tests and gets values alone.
"""

import ast
import builtins
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from megatron_rl.rewards.sandbox import check_isolation, content, memory_file, sandboxed
from megatron_rl.rewards.text import final_text
from megatron_rl.types import Sample

_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_PASSED = b"readypassed"
_TOLERANCE = 1e-6
_CODEC = """
import json, os
def encode(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(each)] for key, each in value.items()]]
    for name, kinds in (("tuple", tuple), ("set", (set, frozenset)), ("list", None)):
        if kinds is None or isinstance(value, kinds):
            return [name, [encode(each) for each in value]]
def decode(value):
    if not isinstance(value, list):
        return value
    kind, items = value
    if kind == "dict":
        return {decode(key): decode(each) for key, each in items}
    return {"tuple": tuple, "set": set, "list": list}[kind](map(decode, items))
here, there = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
elsewhere = os.open("/tmp/output", os.O_RDWR | os.O_CREAT)
os.dup2(elsewhere, 0), os.dup2(elsewhere, 1)
"""
_SERVE = """
names = {"__name__": "program"}
exec(compile(open("/program.py", encoding="utf-8").read(), "/program.py", "exec"), names)
for line in here:
    name, positional, named = json.loads(line)
    try:
        function = names[name] if name in names else getattr(names["Solution"](), name)
        reply = ["", encode(function(*decode(positional), **decode(named)))]
    except BaseException as error:
        reply = [type(error).__name__, str(error)]
    print(json.dumps(reply), file=there)
"""
_CHECK = """
import builtins, math
calls = []
def remote(name):
    def call(*positional, **named):
        calls.append(name)
        print(json.dumps([name, encode(positional), encode(named)]), file=there)
        failed, value = json.loads(here.readline(2**23))
        if not failed:
            return decode(value)
        kind = vars(builtins).get(failed)
        # A StopIteration would end a loop of the tests early.
        known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (StopIteration, StopAsyncIteration))
        raise (kind if known else RuntimeError)(value)
    return call
def same(value, expected):
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return value == expected
names = {name: remote(name) for name in NAMES} | {"__name__": "tests", "_same": same}
try:
    exec(compile(open("/tests.py", encoding="utf-8").read(), "/tests.py", "exec"), names)
except BaseException as error:
    if not calls:
        os.write(REPORT, f"{type(error).__name__}: {error}".encode()[:500])
    raise
os.write(REPORT, b"passed" if calls else b"they call nothing of it")
"""


def score(*, sample: Sample, timeout_s: float = 10.0, memory_mb: int = 1024, wrapped: bool = False) -> dict[str, float | str]:
    """Return reward 1.0 when the last fenced program of the response passes all tests within `timeout_s` in all, else 0.0.

    Tests are the field `tests` of the row, or the label. They are text, or values:
    - `{"inputs": [..], "outputs": [..]}`: standard input and output of each run; with `fn_name`,
      arguments and result of each call of this function, or method of the class Solution;
    - `[{"input": .., "output": ..}, ..]`: the same. Results are in a list of one each where `wrapped`,
      as in APPS;
    - Python with asserts, or a list of such texts. Names that it does not define are functions of
      the program, called in its sandbox: plain values go in and come out.

    Keep `timeout_s` below reward.timeout_s. Raises ValueError for tests that cannot be used, and
    OSError where programs cannot be isolated.
    """
    check_isolation()
    tests = list(_tests(sample, wrapped))
    programs: list[str] = _FENCE.findall(final_text(sample))
    if not programs:
        return {"reward": 0.0, "answer": ""}
    for given, expected in tests:
        limits = {"timeout_s": timeout_s, "memory_mb": memory_mb}
        passed, seconds = _calls(programs[-1], expected, limits) if given is None else _prints(programs[-1], given, expected, limits)
        timeout_s -= seconds
        if not passed:
            return {"reward": 0.0, "answer": programs[-1]}
    return {"reward": 1.0, "answer": programs[-1]}


def _tests(sample: Sample, wrapped: bool) -> Iterator[tuple[str | None, str]]:
    """Yield tests: input and output, or None and a text of asserts."""
    given = sample.prompt.metadata.get("tests", sample.prompt.label)
    where = "the field tests, or the label,"
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = [given]
    if isinstance(given, Mapping):
        inputs, outputs = given.get("inputs", ()), given.get("outputs", ())
        if len(inputs) != len(outputs):
            raise ValueError(f"{where} has {len(inputs)} inputs and {len(outputs)} outputs, needs as many of both")
        name = {"fn_name": given["fn_name"]} if given.get("fn_name") else {}
        given = [{"input": one, "output": other, **name} for one, other in zip(inputs, outputs, strict=True)]
    if not isinstance(given, Sequence) or not given:
        raise ValueError(f"{where} is {given!r:.60}, needs inputs and outputs, or Python with asserts")
    texts = []
    for each in given:
        if isinstance(each, Mapping) and {"input", "output"} <= each.keys():
            if not each.get("fn_name"):
                yield _lines(each["input"]), _lines(each["output"])
                continue
            arguments, result = each["input"], each["output"]
            texts.append(f"assert _same({each['fn_name']}(*{arguments!r}), {(result[0] if wrapped else result)!r})")
        elif isinstance(each, str) and each.strip():
            texts.append(each)
        else:
            raise ValueError(f"{where} holds {each!r:.60}, needs an object with input and output, or a text with asserts")
    if texts:
        yield None, "\n".join(texts)


def _lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _prints(program: str, given: str, expected: str, limits: Mapping[str, Any]) -> tuple[bool, float]:
    """Return True where the program makes the `expected` output from the input `given`, and its seconds."""
    with memory_file(given.encode()) as stdin, memory_file() as stdout, sandboxed({"main.py": program}, stdin, stdout, **limits) as box:
        ended = box.wait(limits["timeout_s"])
        return ended and same_output(content(stdout).decode(errors="replace"), expected), box.seconds


def _calls(program: str, tests: str, limits: Mapping[str, Any]) -> tuple[bool, float]:
    """Return True where the tests pass in one sandbox, with calls of the program in another, and their seconds."""
    try:
        names = sorted(_free_names(ast.parse(tests)))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are no Python ({error})") from None
    check = f"{_CODEC}TOLERANCE, NAMES = {_TOLERANCE}, {names}\n{_CHECK}"
    with ExitStack() as boxes:
        asked, ask, answered, answer = (*os.pipe(), *os.pipe())
        try:
            served = boxes.enter_context(sandboxed({"main.py": _CODEC + _SERVE, "program.py": program}, asked, answer, **limits))
            box = boxes.enter_context(sandboxed({"main.py": check, "tests.py": tests}, answered, ask, trusted=True, **limits))
        finally:
            for end in (asked, ask, answered, answer):
                os.close(end)
        served.begin()
        box.wait(limits["timeout_s"])
        verdict = content(box.report)
    if verdict not in (b"ready", _PASSED):
        raise ValueError(f"the tests do not reach the program: {verdict.removeprefix(b'ready').decode(errors='replace')}")
    return verdict == _PASSED, box.seconds


def _free_names(tests: ast.AST) -> set[str]:
    """Return the names that a module reads and neither it nor Python defines."""
    used, bound = set[str](), {*dir(builtins), "_same"}
    for node in ast.walk(tests):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def same_output(output: str, expected: str) -> bool:
    """Return True where lines are equal without spaces at their ends, or words are, of which numbers with a point may be close."""
    lines, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    if lines == wanted:
        return True
    words, needed = output.split(), expected.split()
    return bool(needed) and len(words) == len(needed) and len(lines) == len(wanted) and all(map(_close, words, needed))


def _close(word: str, wanted: str) -> bool:
    if word == wanted or not re.fullmatch(r"[+-]?\d+\.\d+([eE][+-]?\d+)?", wanted):
        return word == wanted
    try:
        return math.isclose(float(word), float(wanted), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False
