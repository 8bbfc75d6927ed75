"""What this project relies on of megatron-core and SGLang, read in their sources: parameters of functions, fields of records and requests.

Nothing is imported, so that a release for another Python or for GPUs can be read as well. Called with a distribution and a folder in which
its packages lie (an unpacked wheel), this file prints their surface, for a file in tests/data/upstream.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

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
    "megatron/core/transformer/moe/token_dispatcher.py:MoEAllGatherTokenDispatcher.token_dispatch": "models/experts/dispatching.py",
    "megatron/core/transformer/moe/token_dispatcher.py:MoEAllGatherTokenDispatcher.token_combine": "models/experts/dispatching.py",
    "megatron/core/tensor_parallel/mappings.py:gather_from_sequence_parallel_region": "models/build.py",
    "megatron/core/tensor_parallel/layers.py:param_is_not_tensor_parallel_duplicate": "models/parameter_marks.py",
    "megatron/core/tensor_parallel/random.py:model_parallel_cuda_manual_seed": "training/topology.py",
    "megatron/core/distributed/distributed_data_parallel.py:DistributedDataParallel.__init__": "training/optimizer.py",
    "megatron/core/distributed/finalize_model_grads.py:finalize_model_grads": "training/trained_model.py",
    "megatron/core/optimizer/__init__.py:get_megatron_optimizer": "training/optimizer.py",
    "megatron/core/optimizer/clip_grads.py:clip_grad_by_total_norm_fp32": "training/optimizer.py",
    "megatron/core/optimizer/distrib_optimizer.py:DistributedOptimizer.get_parameter_state_dp_zero": "training/gathered_states.py",
    "megatron/core/optimizer/distrib_optimizer.py:DistributedOptimizer._get_main_param_and_optimizer_states": "training/gathered_states.py",
    "megatron/core/optimizer_param_scheduler.py:OptimizerParamScheduler.__init__": "training/optimizer.py",
    "megatron/core/dist_checkpointing/serialization.py:save": "training/sharded_checkpoint.py",
    "megatron/core/dist_checkpointing/serialization.py:load": "training/sharded_checkpoint.py",
}
_REQUESTS = "sglang/srt/managers/io_struct.py"
SGLANG: Mapping[str, str] = {
    f"{_REQUESTS}:{name}": "rollout/client.py"
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
}
TARGETS: Mapping[str, Mapping[str, str]] = {"megatron-core": MEGATRON, "sglang": SGLANG}
Surface = dict[str, list[str]]


def surface(distribution: str, root: Path) -> Surface:
    """Parameters or fields of every target, in order, of the release whose packages lie in `root`; empty where it is not there."""
    found: Surface = {}
    for target in TARGETS[distribution]:
        path, _, name = target.partition(":")
        file = root / path
        node = _find(ast.parse(file.read_text(encoding="utf-8")), name.split(".")) if file.is_file() else None
        found[target] = [] if node is None else list(_names(node))
    if distribution == "sglang":
        found["arguments of the server"] = sorted(set(_server_arguments(root / "sglang" / "srt")))
    return found


def _find(tree: ast.AST, parts: list[str]) -> ast.AST | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == parts[0]:
            return node if len(parts) == 1 else _find(node, parts[1:])
    return None


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
        place = TARGETS[distribution].get(target, "rollout/server_args.py")
        sentences.append(f"{distribution}: {target} {what}: look at megatron_rl/{place}")
    return sentences


if __name__ == "__main__":
    print(json.dumps(surface(sys.argv[1], Path(sys.argv[2])), indent=1))
