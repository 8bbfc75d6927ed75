"""Everything public says what it is; what takes or returns tensors says their shapes."""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")

ARRAY_NAMES = {"Tensor", "ndarray", "NDArray", "Ints", "Floats", "Doubles", "Bools"}
# [T], [S, V], [1, T, V/tp], "scalar", or arrays of any shape.
SHAPE = re.compile(r"\[[A-Z0-9][^\]]*\]|\bscalar|\b0-d\b|any shape|same shape|shapes?\b", re.IGNORECASE)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """(qualified name, node) of public functions, classes and methods; what is nested in functions is private."""

    def visit(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
        for node in body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    yield from visit(node.body, f"{prefix}{node.name}.")

    yield from visit(tree.body, "")


def is_overload(node: Definition) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)


def mentions_arrays(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True when an annotation of the signature is an array type itself, not a container or a callable of arrays."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments] + [node.returns]
    for annotation in annotations:
        for name in top_level_names(annotation):
            if name in ARRAY_NAMES:
                return True
    return False


def top_level_names(annotation: ast.expr | None) -> Iterator[str]:
    """Names of the types that the annotation is a union of: `torch.Tensor | None` gives Tensor and None."""
    if isinstance(annotation, ast.BinOp):
        yield from top_level_names(annotation.left)
        yield from top_level_names(annotation.right)
    elif isinstance(annotation, ast.Name):
        yield annotation.id
    elif isinstance(annotation, ast.Attribute):
        yield annotation.attr
    elif isinstance(annotation, ast.Subscript):
        yield from top_level_names(annotation.value)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_public_names_are_documented() -> None:
    missing = [str(path) for path in FILES if not ast.get_docstring(tree_of(path))]
    for path in FILES:
        definitions = public_definitions(tree_of(path))
        missing += [f"{path}:{name}" for name, node in definitions if not ast.get_docstring(node) and not is_overload(node)]
    assert not missing, f"no docstring in {', '.join(missing)}"


def test_functions_of_arrays_give_shapes() -> None:
    missing = []
    for path in FILES:
        definitions = dict(public_definitions(tree_of(path)))
        for name, node in definitions.items():
            if isinstance(node, ast.ClassDef) or not mentions_arrays(node):
                continue
            # A method may rely on what its class says about the same arrays.
            owner = definitions.get(name.rpartition(".")[0])
            docs = (ast.get_docstring(node) or "") + ((ast.get_docstring(owner) or "") if owner else "")
            if not SHAPE.search(docs):
                missing.append(f"{path}:{name}")
    assert not missing, f"the docstring of {', '.join(missing)} gives no shape such as [T]"
