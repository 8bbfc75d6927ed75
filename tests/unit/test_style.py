"""Files and functions stay short enough to be read at once, and nothing in them tells of the place where they were written."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("megatron_rl", "examples", "tests", "tools") for path in (ROOT / folder).rglob("*.py"))
PACKAGE = {path for path in SOURCES if path.is_relative_to(ROOT / "megatron_rl")}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70

# Longer ones, each with the reason why splitting would make it harder to read: "path" or "path:function" -> reason.
LONG: dict[str, str] = {}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_file_length() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    long = [f"{name} has {lines} lines" for name, lines in lengths.items() if lines > MAX_FILE_LINES and name not in LONG]
    assert not long, f"{', '.join(long)}; a file needs at most {MAX_FILE_LINES}"


def faults_of(node: ast.AST) -> Iterator[str]:
    """What a node does that hides a mistake."""
    if isinstance(node, ast.ExceptHandler):
        if node.type is None:
            yield "has a bare except, needs the exceptions it expects"
        if len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
            yield "swallows an exception with pass; use contextlib.suppress and say why, or handle it"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "hasattr":
            yield "probes with hasattr; ask the version or the type"
        default = node.func.id == "getattr" and len(node.args) == 3
        # A dunder is asked of a foreign object, where it may well be missing.
        dunder = default and isinstance(node.args[1], ast.Constant) and str(node.args[1].value).startswith("__")
        if default and not dunder:
            yield "calls getattr with a default, which hides a misspelled name"
        if node.func.id == "zip" and "strict" not in {keyword.arg for keyword in node.keywords}:
            yield "calls zip without strict"


@functools.cache
def findings() -> tuple[list[str], list[str]]:
    """Functions that are too long, and faults in the package; of all files in one go, as nodes of all of them are millions of objects."""
    long, faults = [], []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES and f"{name_of(path)}:{node.name}" not in LONG:
                    long.append(f"{path}:{node.lineno} {node.name} has {lines} lines")
            if path in PACKAGE:
                faults += [f"{path}:{getattr(node, 'lineno', 0)} {fault}" for fault in faults_of(node)]
    return long, faults


def test_function_length() -> None:
    long, _ = findings()
    assert not long, f"{', '.join(long)}; a function needs at most {MAX_FUNCTION_LINES}"


def test_no_probing_no_swallowed_errors_and_strict_zips() -> None:
    _, faults = findings()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("try: pass\nexcept: f()", "bare except"),
        ("try: pass\nexcept ValueError: pass", "swallows"),
        ("hasattr(x, 'a')", "hasattr"),
        ("getattr(x, name, None)", "with a default"),
        ("getattr(x, '__doc__', None)", None),
        ("getattr(x, name)", None),
        ("zip(a, b)", "zip without strict"),
        ("zip(a, b, strict=True)", None),
    ],
)
def test_the_rules_see_their_faults(text: str, fault: str | None) -> None:
    found = [message for node in ast.walk(ast.parse(text)) for message in faults_of(node)]
    assert len(found) == (fault is not None) and (fault is None or fault in found[0])


def test_no_vague_module_names() -> None:
    vague = [name_of(path) for path in PACKAGE if path.stem in {"utils", "helpers", "common", "misc"}]
    assert not vague, f"{', '.join(vague)}: name a module after what it holds"


def test_no_two_modules_have_one_name() -> None:
    stems = Counter(path.stem for path in PACKAGE if path.stem != "__init__")
    double = sorted(stem for stem, count in stems.items() if count > 1)
    assert not double, f"several modules are called {', '.join(double)}; name each after what it holds"


def test_exceptions_are_still_needed() -> None:
    for entry in LONG:
        path, _, function = entry.partition(":")
        assert (ROOT / path).exists(), f"LONG names {entry}, which does not exist any more"
        assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), (
            f"LONG names {entry}, which does not exist any more"
        )


def test_readme_stays_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120, f"README.md has {len(lines)} lines, needs at most 120"
    long = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert not long, f"README.md has more than 100 columns in the lines {long}"


def test_readme_names_files_and_rooms_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    way = text.split("## Read the code")[1].split("All rooms")[0]
    files = re.findall(r"`([a-z_/]+)`", way.split("are the loop")[1])
    missing = [file for file in files if not (ROOT / "megatron_rl" / f"{file}.py").exists()]
    assert files and not missing, f"README.md names {', '.join(missing)} below megatron_rl, which do not exist"
    table = text.split("| room |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    rooms = {path.parent.name for path in (ROOT / "megatron_rl").glob("*/__init__.py")}
    assert named == rooms, f"the rooms of README.md differ from the folders: {', '.join(sorted(named ^ rooms))}"


def test_links_of_readmes_lead_to_files() -> None:
    readmes = [
        ROOT / "README.md",
        *(path for top in ("examples", "megatron_rl", "tests", "tools") for path in (ROOT / top).rglob("README.md")),
    ]
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in readmes
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert not broken, f"links that lead nowhere: {', '.join(broken)}"


def test_index_hosts_are_not_named() -> None:
    """Whoever installs decides where packages come from."""
    host = re.compile(r"(pypi|pythonhosted|pytorch)\.org|--(extra-)?index-url|--find-links", re.IGNORECASE)
    for path in [*(ROOT / "tools").rglob("*"), *(ROOT / "examples").rglob("*"), ROOT / "setup.py", ROOT / "README.md"]:
        if path.is_file() and path.suffix in {".sh", ".txt", ".py", ".md"}:
            found = host.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path} names a package index: {found.group()}"
