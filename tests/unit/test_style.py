"""Files and functions stay short enough to be read at once, and nothing in them tells of the place where they were written."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("megatron_rl", "examples", "tests", "tools") for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "megatron_rl")]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70

# Longer ones, each with the reason why splitting would make it harder to read: "path" or "path:function" -> reason.
LONG: dict[str, str] = {}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file_length(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES or name_of(path) in LONG, f"{path} has {lines} lines, needs at most {MAX_FILE_LINES}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_function_length(path: Path) -> None:
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            known = f"{name_of(path)}:{node.name}" in LONG
            assert lines <= MAX_FUNCTION_LINES or known, (
                f"{path}:{node.lineno} {node.name} has {lines} lines, needs at most {MAX_FUNCTION_LINES}"
            )


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_no_probing_and_no_swallowed_errors(path: Path) -> None:
    for node in nodes_of(path):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno} has a bare except, needs the exceptions it expects"
            silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not silent, f"{path}:{node.lineno} swallows an exception with pass; use contextlib.suppress and say why, or handle it"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", f"{path}:{node.lineno} probes with hasattr; ask the version or the type"
            default = node.func.id == "getattr" and len(node.args) == 3
            # A dunder is asked of a foreign object, where it may well be missing.
            dunder = default and isinstance(node.args[1], ast.Constant) and str(node.args[1].value).startswith("__")
            assert dunder or not default, f"{path}:{node.lineno} calls getattr with a default, which hides a misspelled name"


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_zip_is_strict(path: Path) -> None:
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            assert "strict" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno} calls zip without strict"


def test_no_vague_module_names() -> None:
    vague = [name_of(path) for path in PACKAGE if path.stem in {"utils", "helpers", "common", "misc"}]
    assert not vague, f"{', '.join(vague)}: name a module after what it holds"


def test_exceptions_are_still_needed() -> None:
    for entry in LONG:
        path, _, function = entry.partition(":")
        assert (ROOT / path).exists(), f"LONG names {entry}, which does not exist any more"
        assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), (
            f"LONG names {entry}, which does not exist any more"
        )


def test_readme_stays_short() -> None:
    lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    assert lines <= 200, f"README.md has {lines} lines, needs at most 200"


def test_index_hosts_are_not_named() -> None:
    """Whoever installs decides where packages come from."""
    host = re.compile(r"(pypi|pythonhosted|pytorch)\.org|--(extra-)?index-url|--find-links", re.IGNORECASE)
    for path in [*(ROOT / "tools").rglob("*"), *(ROOT / "examples").rglob("*"), ROOT / "setup.py", ROOT / "README.md"]:
        if path.is_file() and path.suffix in {".sh", ".txt", ".py", ".md"}:
            found = host.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path} names a package index: {found.group()}"
