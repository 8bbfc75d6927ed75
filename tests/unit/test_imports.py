"""Imports run downhill: a room may import its own tier's foundations, never what stands above it."""

import ast
import functools
import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(__file__).parents[2] / "megatron_rl"

# Lower tiers first. A room imports itself and rooms of lower tiers.
TIERS = (
    ("errors", "system"),
    ("types", "check", "plugins"),
    ("algorithms", "data", "rewards", "config", "observe"),
    ("engines", "models", "checkpoints", "rollout", "training", "weights"),
    ("evaluation",),
    ("runtime",),
    ("planning",),
    ("convert", "exit_status", "importers", "report", "serve"),
    ("cli", "__main__", "doctor"),
)
# Within a tier rooms stand side by side, except for these uses.
SIDEWAYS = {
    "system": {"errors"},
    "config": {"algorithms"},  # the objective is a section of the settings
    "data": {"config"},
    "rewards": {"config", "data"},
    "observe": {"config"},
    "checkpoints": {"models"},
    "training": {"checkpoints", "models"},
    "rollout": {"engines"},
    "weights": {"engines", "models"},
    "cli": {"doctor"},
    "__main__": {"cli"},
}
# Rooms that can be used and tested without a GPU stack.
LIGHT = (
    "check",
    "types",
    "errors",
    "plugins",
    "algorithms",
    "data",
    "rewards",
    "config",
    "observe",
)
HEAVY_PACKAGES = {"megatron", "sglang", "ray"}
# Heavy packages of the other rooms: Ray places processes, and only the runtime knows.
ALLOWED_HEAVY = {
    "system": {"megatron"},  # by a function that a rank calls before all else
    "models": {"megatron"},
    "checkpoints": {"megatron"},
    "training": {"megatron"},
    "engines": {"sglang"},
    "rollout": set(),
    "evaluation": set(),
    "weights": set(),
    "planning": {"megatron"},
    "convert": set(),
    "runtime": {"ray"},
    "cli": set(),
    "doctor": set(),
}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The first name below megatron_rl: a folder or a module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of the file, also those inside functions; `from a import b` gives `a.b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the module in full"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def type_checking_lines(path: Path) -> set[int]:
    """Lines of the imports that only type checkers make."""
    source = path.read_text(encoding="utf-8")
    if "TYPE_CHECKING" not in source:
        return set()
    guards = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)]
    return {line.lineno for node in guards if ast.unparse(node.test) == "TYPE_CHECKING" for line in node.body}


def allowed_rooms(room: str) -> set[str]:
    """Rooms that `room` may import from."""
    tier = next((index for index, rooms in enumerate(TIERS) if room in rooms), None)
    assert tier is not None, f"{room} has no tier: put it into TIERS"
    below = {name for rooms in TIERS[:tier] for name in rooms}
    return below | {room} | SIDEWAYS.get(room, set())


def test_imports_run_downhill() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        if room == "__init__":
            continue
        allowed = allowed_rooms(room)
        # The protocols of plug-ins name records of rooms above them, for type checkers alone.
        checked_only = {("plugins", line) for line in type_checking_lines(path)}
        for line, module in imported_modules(path):
            parts = module.split(".")
            if (room, line) in checked_only:
                continue
            if parts[0] == "megatron_rl" and len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{path}:{line}: {room} imports megatron_rl.{parts[1]}, may import {', '.join(sorted(allowed))}")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_in_their_rooms() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        allowed = set() if room in LIGHT else ALLOWED_HEAVY.get(room, set())
        for line, module in imported_modules(path):
            package = module.split(".")[0]
            if package in HEAVY_PACKAGES - allowed:
                wrong.append(f"{path}:{line}: {room} imports {package}, may import {sorted(allowed) or 'none of them'}")
    assert not wrong, "\n".join(wrong)


def test_algorithms_import_torch_only() -> None:
    """And pydantic, whose Discriminator tells the kinds of a choice apart."""
    allowed = {"torch", "pydantic", "megatron_rl", *sys.stdlib_module_names}
    files = sorted((PACKAGE / "algorithms").rglob("*.py"))
    imports = [(path, line, module) for path in files for line, module in imported_modules(path)]
    assert imports, "algorithms imports torch"
    wrong = [f"{path}:{line}: {module}" for path, line, module in imports if module.split(".")[0] not in allowed]
    assert not wrong, f"algorithms imports more than torch, pydantic and the standard library: {', '.join(wrong)}"


def test_rollout_and_training_do_not_know_each_other() -> None:
    assert "training" not in allowed_rooms("rollout") | allowed_rooms("engines")
    assert not {"engines", "rollout"} & allowed_rooms("training")


def third_party_distributions() -> dict[str, str]:
    """Distribution -> a file that imports it, for all imports of the package from elsewhere."""
    providers = importlib.metadata.packages_distributions()
    found = {}
    for path in FILES:
        for _, module in imported_modules(path):
            package = module.split(".")[0]
            if package != "megatron_rl" and package not in sys.stdlib_module_names:
                found |= {canonicalize_name(name): str(path) for name in providers.get(package, [package])}
    return found


def test_every_import_is_declared() -> None:
    """What the package imports stands in setup.py, so that `pip install .` is complete."""
    setup = ast.parse((PACKAGE.parent / "setup.py").read_text(encoding="utf-8"))
    lists = [node.value for node in setup.body if isinstance(node, ast.Assign)]
    words = [node.value for value in lists for node in ast.walk(value) if isinstance(node, ast.Constant)]
    names = {"gpu", "report", "tasks", "test", "wandb"}
    declared = {canonicalize_name(Requirement(word).name) for word in words if word not in names}
    declared.add("pydantic-core")  # the half of pydantic that its exact pin brings along
    missing = [f"{distribution} ({path})" for distribution, path in third_party_distributions().items() if distribution not in declared]
    assert not missing, f"setup.py does not declare {', '.join(missing)}"


def test_every_sideways_import_goes_one_way() -> None:
    for room, targets in SIDEWAYS.items():
        for target in targets:
            assert room not in SIDEWAYS.get(target, set()), f"{room} and {target} import each other"
