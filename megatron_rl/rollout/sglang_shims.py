"""What SGLang needs to run where there is no GPU. Called once, in the server's own process, before SGLang is imported."""

import multiprocessing
import os
import sys
import types
from importlib.metadata import version
from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    from torch import Tensor


def provide_vllm_operators() -> None:
    """Let rotary embeddings be built: without a GPU SGLang takes their kernel from vllm, and then never calls it.

    vllm is 900 MB that nothing else here needs. SGLang's forward pass on a CPU is its native PyTorch one.
    """

    def rotary_embedding(*_: object) -> None:
        raise NotImplementedError("vllm's rotary kernel is a placeholder here: SGLang on a CPU is expected to use its native layers")

    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules[operators.__name__] = operators


def compile_nothing() -> None:
    """Let torch run everything as it is written. SGLang compiles what draws tokens by seeds, anew for other sizes of a batch."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def fork_server_processes() -> None:
    """Let SGLang fork its scheduler and detokenizer instead of spawning them.

    Its start is imports: 10 CPU seconds in each of three processes. A forked child has them already, which halves the
    start and saves 400 MiB. Safe without CUDA only: a CUDA context does not survive a fork.
    """
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method


def allocate_host_memory_unpinned() -> None:
    """Let SGLang keep the experts that it routed tokens to: it registers that host memory with CUDA even where there is none."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: object) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def gate_shared_experts_in_torch() -> None:
    """Let Qwen2-MoE run: the gate of its shared expert is a Triton kernel on every device. Before SGLang's models are imported."""
    if Version(version("sglang")) < Version("0.5.23"):
        # Whose kernel may be elsewhere: it was not looked for.
        return
    from sglang.kernels.ops.elementwise import elementwise

    elementwise.fused_gate_sigmoid_mul_add = add_gated


def add_gated(hidden: "Tensor", gate: "Tensor", shared: "Tensor", output: "Tensor") -> None:
    """Add the experts' `shared` [T, C], weighed by the sigmoid of the product of `gate` [C] and `hidden` [T, C], to `output` [T, C]."""
    output.add_((hidden @ gate).sigmoid()[:, None] * shared)


def allow_deterministic_inference() -> None:
    """Let `enable_deterministic_inference` run without a GPU, for which SGLang has neither kernels, attention nor hash of that kind.

    `deterministic_cpu` and `sglang_attention` take their places.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.layers import sampler

    from megatron_rl.rollout.deterministic_cpu import murmur_hash

    def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
        """Nothing is left to do."""

    batch_invariant_ops.enable_batch_invariant_mode = enable_batch_invariant_mode
    sampler.murmur_hash32 = murmur_hash
    add_deterministic_attention_backend_choices(["torch_native"])
