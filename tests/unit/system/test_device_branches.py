"""Everything in the rooms of ranks and engines that asks for the device, or takes what only a GPU has, is listed here, with what runs its
GPU half without a GPU.

A branch that only a GPU runs fails on the first day of a user who has one. A new one is therefore rehearsed, or its entry says why it need
not be.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("training", "checkpoints", "models", "engines", "rollout", "weights", "algorithms")
WORDS = re.compile(r"cuda(:.*)?|cpu(:.*)?|nccl|gloo|transformer_engine|triton|(CUDA|NCCL|NVTE|PYTORCH_(CUDA|HIP))_\w*")
"""A whole string: a device, a backend, what is taken on GPUs alone, or a variable of the environment."""
ATTRIBUTES = {"cuda", "is_cuda", "is_pinned", "pin_memory", "accelerator", "get_device", "get_backend", "is_nccl_available", "device_kind"}
NAMES = {"local_device", "device_kind", "chosen_backends", "chosen_row_maths", "resolve_attention", "HAVE_TE"}

TE = "tests/dist/test_te_layouts.py"  # trains on a pretended GPU
ENGINE = "tests/unit/engines/test_server_args.py"
KERNELS = "tests/unit/models/test_head_kernels.py"  # in Triton's interpreter, and on the meta device
REHEARSED: dict[str, str] = {
    "training/collectives.py collective_device": TE,
    "training/joining.py join": TE,
    "training/offload.py ModelMemory.__init__": "tests/trainer/test_offload.py",
    "training/offload.py ModelMemory.take_back": "tests/trainer/test_offload.py",
    "training/offload.py ModelMemory._synchronize": "tests/trainer/test_offload.py",
    "training/offload.py ModelMemory._release_caches": "tests/trainer/test_offload.py",
    "training/resting.py RestingWeights.__init__": TE,
    "checkpoints/saving.py StateFiles.__init__": TE,
    "checkpoints/training_state.py _rng_object": TE,
    "checkpoints/training_state.py _set_rng_state": TE,
    "training/teacher.py build_teacher": TE,
    "training/trained_model.py build_trained_model": TE,
    "training/trained_model.py model_dtype": TE,
    "models/megatron_config.py _attention_fields": TE,
    "models/attention/latent.py ReplicatedLinear.__init__": TE,
    "models/norms.py RMSNorm.__init__": TE,
    "models/build.py PolicyModel._set_attention_backend": TE,
    "models/build.py build_model": TE,
    "models/language_model_head.py row_maths": KERNELS,
    "models/layer_spec.py _layer": TE,
    "models/layer_spec.py layer_specs": TE,
    "models/megatron_config.py transformer_config": TE,
    "models/attention/attention_choice.py transformer_engine_here": "tests/unit/models/test_recompute.py",
    "algorithms/head_statistics.py add_product": KERNELS,
    "weights/ipc.py _HandlePickler.reducer_override": "tests/unit/weights/test_ipc.py",
    "models/hf_weights.py _from_owner": TE,
    "models/attention/attention_choice.py resolve_attention": TE,
    "models/megatron_config.py _topology_fields": TE,
    "models/megatron_config.py _default_fields": TE,
    "engines/engine.py Engine._environment": "tests/unit/engines/test_engine.py",
    "engines/server_args.py server_arguments": ENGINE,
}
"""Function -> the tests in which a GPU's branch of it runs."""
THE_SAME_ON_A_GPU: dict[str, str] = {
    "models/attention/attention_plan.py plan_attention": "a default",
    "models/attention/packed.py _attend_bucket": "the CPU takes a shorter way to the same numbers, which test_attention compares",
    "models/attention/packed.py _attend_long": "the CPU takes a shorter way to the same numbers, which test_attention compares",
    "engines/on_cpu/sglang_shims.py take_cpu_for_the_device.get_device_module": "a server on a CPU alone",
    "models/norms.py split_parameter": "where it lies, as the weight of RMSNorm, which is rehearsed",
    "models/packed_sequences.py packed_sequences": "a default",
    "models/attention/attention_choice.py ": "the names of the choices",
    "models/head_kernels.py ": "the kernels' name",
    "models/unavailable_fields.py ": "how another setting is called",
    "algorithms/head_statistics.py ": "the size of a chunk",
    "algorithms/log_prob.py ": "the size of a chunk",
    "engines/received_deltas.py Merge.rest": "memory that is given back between syncs",
    "engines/received_deltas.py pack": "where the changed elements are",
    "weights/deltas.py Deltas.messages": "where the weights are",
    "weights/deltas.py keep": "the elements are compared where the weights are",
    "weights/ipc.py IpcSender._send": "torch drops what nobody uses any more",
    "weights/ipc.py SharedMemory.allocate": "memory of its own for each bucket, as allocate_shared",
    "weights/ipc.py SharedMemory.free": "torch frees it",
    "weights/ipc.py IpcSender._offer": "files that a CPU's memory leaves",
    "weights/ipc.py IpcSender._those_that_took": "users of a CPU's memory, which are counted here",
    "weights/ipc.py allocate_shared": "torch.empty, where a CPU needs a file",
    "engines/server_args.py keeps_prefixes": "what the CPU's server does not have",
    "engines/sglang_server.py main": "shims for a server without a GPU",
    "checkpoints/pickles.py stored_part": "numbers of a file, which lie in the CPU's memory",
    "checkpoints/saving.py _own_storage": "views in a CPU's memory, which torch would copy; a GPU's tensors are left alone",
    "engines/on_cpu/sglang_shims.py allocate_host_memory_unpinned": "shims for a server without a GPU",
}
"""Function -> why nothing in it is for GPUs alone."""


def named_nodes(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(dotted name of the innermost function or class, node) of every node."""
    for node in ast.iter_child_nodes(tree):
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{outer}.{node.name}".lstrip(".") if is_scope else outer  # type: ignore[attr-defined]
        yield name, node
        yield from named_nodes(node, name)


def asks_for_the_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and WORDS.fullmatch(node.value) is not None
    if isinstance(node, ast.Attribute) and node.attr == "kind":
        return ast.unparse(node.value).endswith("device")
    return (isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES) or (isinstance(node, ast.Name) and node.id in NAMES)


def found(source: str, name: str) -> set[str]:
    return {f"{name} {function}" for function, node in named_nodes(ast.parse(source)) if asks_for_the_device(node)}


def test_every_question_for_the_device_is_rehearsed() -> None:
    package = ROOT / "megatron_rl"
    files = [path for room in ROOMS for path in sorted((package / room).rglob("*.py"))]
    asking = set[str]().union(*(found(path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()) for path in files))
    listed = REHEARSED.keys() | THE_SAME_ON_A_GPU.keys()
    assert asking == listed, f"neither rehearsed nor with a reason: {sorted(asking - listed)}; gone: {sorted(listed - asking)}"
    missing = [test for test in REHEARSED.values() if not (ROOT / test).is_file()]
    assert not missing, f"no such tests: {missing}"


def test_a_new_branch_is_found() -> None:
    method = "class A:\n    def f(self, x):\n        if x.device.type == 'cuda':\n            return x.pin_memory()\n"
    assert found(f"{method}\ndef g(): return local_device()", "a.py") == {"a.py A.f", "a.py g"}
    assert found("def f(device): return device.index, pair.kind", "a.py") == set()


@pytest.mark.parametrize(
    "idiom",
    [
        "torch.zeros(1, device=f'cuda:{rank}')",
        "x.to('cuda:0')",
        "x.is_cuda",
        "torch.cuda.synchronize()",
        "self._device.kind",
        "SIZES[device.kind]",
        "dist.get_backend(group)",
        "os.environ['CUDA_VISIBLE_DEVICES']",
        "os.environ.get('NVTE_DEBUG')",
        "attention == 'transformer_engine'",
        "chosen_row_maths(x.device.type, 'bfloat16')",
        "resolve_attention(choice)",
    ],
)
def test_every_idiom_is_found(idiom: str) -> None:
    assert found(f"def f(): return {idiom}", "a.py") == {"a.py f"}
