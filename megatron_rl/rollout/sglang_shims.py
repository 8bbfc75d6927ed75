"""What SGLang needs to run where there is no GPU. Called once, in the server's own process, before SGLang is imported."""

import multiprocessing
import sys
import types


def provide_vllm_operators() -> None:
    """Let rotary embeddings be built: without a GPU SGLang takes their kernel from vllm, and then never calls it.

    vllm is 900 MB that nothing else here needs. SGLang's forward pass on a CPU is its native PyTorch one.
    """

    def rotary_embedding(*_: object) -> None:
        raise NotImplementedError("vllm's rotary kernel is a placeholder here: SGLang on a CPU is expected to use its native layers")

    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules[operators.__name__] = operators


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
