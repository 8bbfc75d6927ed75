"""What this project relies on of megatron-core and SGLang, read in their sources: parameters of functions, fields of records and requests.

Nothing is imported, so that a release for another Python or for GPUs can be read as well. Called with a distribution and a folder in which
its packages lie (an unpacked wheel), this file prints their surface, for a file in tests/data/upstream.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_DISTRIBUTED = "megatron/core/optimizer/distrib_optimizer.py:DistributedOptimizer"
# File and name -> who relies on it here. A function stands for its parameters, a class for its fields.
MEGATRON: Mapping[str, str] = {
    "megatron/core/parallel_state.py:initialize_model_parallel": "training/topology.py",
    "megatron/core/packed_seq_params.py:PackedSeqParams": "models/packed_sequences.py",
    "megatron/core/models/gpt/gpt_model.py:GPTModel.__init__": "models/build.py",
    "megatron/core/models/gpt/gpt_model.py:GPTModel.forward": "models/build.py",
    "megatron/core/models/gpt/gpt_layer_specs.py:get_gpt_layer_local_spec": "models/layer_spec.py",
    "megatron/core/models/gpt/gpt_layer_specs.py:get_gpt_layer_with_transformer_engine_spec": "models/layer_spec.py",
    "megatron/core/models/common/language_module/language_module.py:LanguageModule._set_attention_backend": "models/build.py",
    "megatron/core/transformer/multi_latent_attention.py:MLASelfAttention.get_query_key_value_tensors": "models/attention/latent.py",
    "megatron/core/transformer/moe/router.py:TopKRouter.routing": "models/experts/router.py",
    "megatron/core/transformer/moe/token_dispatcher.py:MoEAllGatherTokenDispatcher.token_dispatch": "models/experts/router.py",
    "megatron/core/transformer/moe/token_dispatcher.py:MoEAllGatherTokenDispatcher.token_combine": "models/experts/router.py",
    "megatron/core/tensor_parallel/mappings.py:gather_from_sequence_parallel_region": "models/build.py",
    "megatron/core/tensor_parallel/layers.py:param_is_not_tensor_parallel_duplicate": "training/trained_model.py",
    "megatron/core/tensor_parallel/random.py:model_parallel_cuda_manual_seed": "training/topology.py",
    "megatron/core/distributed/distributed_data_parallel.py:DistributedDataParallel.__init__": "training/optimizer.py",
    "megatron/core/distributed/finalize_model_grads.py:finalize_model_grads": "training/trained_model.py",
    "megatron/core/optimizer/__init__.py:get_megatron_optimizer": "training/optimizer.py",
    "megatron/core/optimizer/clip_grads.py:clip_grad_by_total_norm_fp32": "training/optimizer.py",
    f"{_DISTRIBUTED}._get_main_param_and_optimizer_states": "checkpoints/optimizer_shards.py",
    f"{_DISTRIBUTED}._get_model_param_range_map": "checkpoints/optimizer_shards.py",
    "megatron/core/optimizer_param_scheduler.py:OptimizerParamScheduler.__init__": "training/optimizer.py",
    "megatron/core/dist_checkpointing/serialization.py:save": "checkpoints/saving.py",
    "megatron/core/dist_checkpointing/serialization.py:load": "checkpoints/training_state.py",
}
_REQUESTS = "sglang/srt/managers/io_struct.py"
SGLANG: Mapping[str, str] = {
    f"{_REQUESTS}:{name}": "engines/client.py"
    for name in (
        "GenerateReqInput",
        "AbortReq",
        "FlushCacheReqInput",
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "InitWeightsUpdateGroupReqInput",
        "DestroyWeightsUpdateGroupReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromTensorReqInput",
        "UpdateWeightFromDiskReqInput",
        "CheckWeightsReqInput",
    )
} | {
    "sglang/srt/sampling/sampling_params.py:SamplingParams": "engines/sampling.py",
    "sglang/srt/weight_sync/tensor_bucket.py:FlattenedTensorMetadata": "weights/ipc.py",
}
ARGUMENTS, ROUTES, VARIABLES = "arguments of the server", "routes of the server", "variables of the environment"
OTHERS = {ARGUMENTS: "engines/server_args.py", ROUTES: "engines/client.py", VARIABLES: "engines/server_args.py"}
ENGINES = Path(__file__).resolve().parents[2] / "megatron_rl" / "engines"
TARGETS: Mapping[str, Mapping[str, str]] = {"megatron-core": MEGATRON, "sglang": SGLANG}
Surface = dict[str, list[str]]


def surface(distribution: str, root: Path) -> Surface:
    """Parameters or fields of every target, in order, of the release whose packages lie in `root`; empty where it is not there."""
    found: Surface = {}
    for target in TARGETS[distribution]:
        path, _, name = target.partition(":")
        file = root / path
        tree = ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")
        node = _find(tree, name.split("."))
        found[target] = [] if node is None else [*_inherited(node, tree), *_names(node)]
    if distribution == "sglang":
        found[ARGUMENTS] = sorted(set(_server_arguments(root / "sglang" / "srt")))
        servers = (root / "sglang" / "srt" / "entrypoints" / name for name in ("http_server.py", "v1_loads.py"))
        found[ROUTES] = sorted(route for server in servers for route in _routes(server))
        read = set().union(*(_variables(path) for path in (root / "sglang" / "srt").rglob("*.py")))
        found[VARIABLES] = sorted(read & own_variables())
    return found


def _find(tree: ast.AST, parts: list[str]) -> ast.AST | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == parts[0]:
            return node if len(parts) == 1 else _find(node, parts[1:])
    return None


def _inherited(node: ast.AST, tree: ast.AST) -> Iterator[str]:
    """Fields of a class's bases in the same file."""
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        found = _find(tree, [base.id]) if isinstance(base, ast.Name) else None
        if found is not None:
            yield from _inherited(found, tree)
            yield from _names(found)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield from (line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name))
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        yield from (argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if argument.arg != "self")
        yield from (f"{stars}{rest.arg}" for stars, rest in (("*", arguments.vararg), ("**", arguments.kwarg)) if rest is not None)


def _server_arguments(srt: Path) -> Iterator[str]:
    """The fields of ServerArgs, wherever this release keeps them."""
    for path in (srt / "server_args.py", *sorted((srt / "arg_groups" / "fields").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield from _names(node)


def _routes(server: Path) -> Iterator[str]:
    """ "/abort_request POST obj:AbortReq" of every route: its path, methods, and parameters with the names of their types."""
    for node in ast.walk(ast.parse(server.read_text(encoding="utf-8"))):
        for decorator in node.decorator_list if isinstance(node, ast.AsyncFunctionDef) else ():
            if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute) or not decorator.args:
                continue
            path, kind = decorator.args[0], decorator.func.attr
            methods = [ast.literal_eval(word.value) for word in decorator.keywords if word.arg == "methods"] or [[kind.upper()]]
            if isinstance(path, ast.Constant) and kind in ("get", "post", "api_route"):
                assert isinstance(node, ast.AsyncFunctionDef), "only those have decorators here"
                parameters = [f"{argument.arg}:{_type_name(argument.annotation)}" for argument in node.args.args]
                yield " ".join([str(path.value), ",".join(methods[0]), *parameters])


def _type_name(annotation: ast.expr | None) -> str:
    """What an annotation is about: AbortReq of Annotated[AbortReq, Body()], and of Optional[io_struct.AbortReq]."""
    while isinstance(annotation, ast.Subscript):
        annotation = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
    return "" if annotation is None else ast.unparse(annotation).rpartition(".")[2]


def _variables(path: Path) -> set[str]:
    return set(re.findall(r"\bSGLANG_\w+", path.read_text(encoding="utf-8")))


def own_variables() -> set[str]:
    """SGLang's variables of the environment that are named here."""
    return set[str]().union(*map(_variables, ENGINES.rglob("*.py")))


def changes(distribution: str, before: Surface, after: Surface) -> list[str]:
    """One sentence for each target that is not as it was, naming what came and went and who relies on it here."""
    sentences = []
    for target in sorted(before.keys() | after.keys()):
        old, new = before.get(target, []), after.get(target, [])
        if old == new:
            continue
        gone, came = [name for name in old if name not in new], [name for name in new if name not in old]
        what = " and ".join(
            [f"lost {', '.join(gone)}"] * bool(gone) + [f"gained {', '.join(came)}"] * bool(came) or ["has its parameters in another order"]
        )
        place = {**TARGETS[distribution], **OTHERS}[target]
        sentences.append(f"{distribution}: {target} {what}: look at megatron_rl/{place}")
    return sentences


if __name__ == "__main__":
    print(json.dumps(surface(sys.argv[1], Path(sys.argv[2])), indent=1))
