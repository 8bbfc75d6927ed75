"""Which collectives there are: those of an optimizer step stand in one file, and each of the others is here with its reason."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from torch import distributed

PACKAGE = Path(__file__).parents[3] / "megatron_rl"
# Of an optimizer step; and the start and end of a process group, which are collective as a whole.
AUDITED = ("training/collectives.py", "training/topology.py", "training/joining.py")
# Rooms whose processes are not the ranks of a step.
OTHER_ROOMS = {
    "weights": "sends between rank 0 and the engines, in a group of their own, between steps",
    "doctor": "measures what a node does in collectives",
    "planning": "plays one rank in a process alone, on a backend that sends nothing",
}
# Calls that ask this process alone.
QUERIES = {"get_rank", "get_world_size", "get_backend", "get_process_group_ranks", "is_initialized"}
# Function and call -> the ranks that call it together, and why it does not stand with the others.
ELSEWHERE = {
    "gather_partials: all_gather": "tensor-parallel ranks: part of a forward pass, and the room of algorithms is given its groups",
    "drawn_log_probs: all_gather": "tensor-parallel ranks: part of a forward pass, as gather_partials",
    "balance_loss: all_reduce": "ranks that share a router's sequences: part of its forward pass",
    "UnevenAllGatherDispatcher.token_dispatch: all_reduce": "expert-parallel ranks: part of the forward pass of a mixture's layer",
    "_holders: all_gather_object": "pipeline or expert ranks: before weights are exported, outside of steps",
    "_gathered: all_gather": "tensor- or expert-parallel ranks: while weights are exported, outside of steps",
    "_from_owner: broadcast": "pipeline or expert ranks: while weights are exported, outside of steps",
    "check_on_ranks: all_gather": "all ranks: what became of each rank's share of the files, outside of steps",
    "StateFiles.__init__: broadcast": "all ranks: what became of rank 0's directory of a save, outside of steps",
    "_Planning.save: reduce_scatter": "all ranks: the plan of a save, outside of steps",
    "Saving.finish: all_reduce": "all ranks: what became of each rank's files of a save, outside of steps",
}


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(dotted name of the innermost function or class, node) of every node."""
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{outer}.{node.name}".lstrip(".")
        yield name, node
        yield from functions(node, name)


def aliases(tree: ast.AST) -> set[str]:
    """The names under which a file has torch.distributed or something out of it; `all_ranks` of checkpoints is its wrapper."""
    found = {"torch.distributed", "all_ranks()"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            functions_taken = [alias.name for alias in node.names if inspect.isfunction(vars(distributed).get(alias.name))]
            assert not functions_taken, f"line {node.lineno} takes {functions_taken} out of torch.distributed; import the module"
            found |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed_c10d"}
    return found


def calls(path: Path) -> Iterator[str]:
    """`function: call` for every call of torch.distributed in the file."""
    source = path.read_text(encoding="utf-8")
    if "distributed" not in source:  # whose call would need that word, at least in an import
        return
    tree = ast.parse(source)
    known = aliases(tree)
    for function, node in functions(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in known:
            yield f"{function}: {node.func.attr}"


def test_every_other_collective_has_a_reason() -> None:
    found = {
        call
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := path.relative_to(PACKAGE).as_posix()) not in AUDITED and name.partition("/")[0] not in OTHER_ROOMS
        for call in calls(path)
        if call.partition(": ")[2] not in QUERIES
    }
    assert found == ELSEWHERE.keys(), f"without a reason: {sorted(found - ELSEWHERE.keys())}; gone: {sorted(ELSEWHERE.keys() - found)}"
