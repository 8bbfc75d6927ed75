"""Additions to SGLang, mostly to run without a GPU. Called once, in the server's process."""

import functools
import importlib.util
import json
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.engines.server_args import ENGINE_HEADER

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from torch import Tensor


def refuse_deadly_requests() -> None:
    """Let SGLang call `check_request` first: such a request would end the server."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def check(manager: "TokenizerManager", request: object, input_ids: Sequence[int] | None) -> None:
        if isinstance(request, GenerateReqInput):
            check_request(manager, request, input_ids)

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
    HookRegistry.register(target, check, HookType.BEFORE)


def hide_the_key_in_logs() -> None:
    """Leave the API key out of the arguments that SGLang writes to its log from level info on."""
    from sglang.srt.entrypoints import engine

    original = engine._server_args_for_logging
    engine._server_args_for_logging = lambda server_args: {**original(server_args), "api_key": "hidden"}


def name_the_engine(url: str) -> None:
    """Let every answer say which engine gave it: a router in between passes headers of an answer on."""
    from sglang.srt.entrypoints.http_server import app

    # FastAPI's own form of this would keep the end of a client's connection from SGLang.
    def named(inner: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
            async def send_named(message: dict[str, Any]) -> None:
                begins = message["type"] == "http.response.start"
                await send({**message, "headers": [*message["headers"], (ENGINE_HEADER.encode(), url.encode())]} if begins else message)

            await inner(scope, receive, send_named)

        return answer

    app.add_middleware(named)


def check_request(manager: "TokenizerManager", request: "GenerateReqInput", input_ids: Sequence[int] | None) -> None:
    """Raise ValueError, status 400 in SGLang, for tokens and log-probs beyond the vocabulary."""
    size = manager.model_config.vocab_size
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < size:
        raise ValueError(f"the prompt has token ids from {min(input_ids)} to {max(input_ids)}, needs ids from 0 to {size - 1}")
    stops = (request.sampling_params or {}).get("stop_token_ids") or ()
    if not all(0 <= token < size for token in stops):
        raise ValueError(f"stop_token_ids are {list(stops)}, needs ids from 0 to {size - 1}")
    wanted = request.top_logprobs_num or 0
    if not isinstance(wanted, int) or not 0 <= wanted <= size:
        raise ValueError(f"{wanted} log-probs are asked for at each token, needs a number from 0 to {size}")
    first = request.logprob_start_len
    if first is not None and (not isinstance(first, int) or first < -1):
        raise ValueError(f"log-probs are asked for from token {first}, needs a number from 0, or -1 for the answer alone")


def hide_megatron() -> None:
    """Let megatron-core count as absent: SGLang's dumper, unused here, would import it for 2 s."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # Python then raises ImportError


def provide_vllm_operators() -> None:
    """Let rotary embeddings be built: without a GPU SGLang imports a kernel of vllm, uncalled."""

    def rotary_embedding(*_: object) -> None:
        raise NotImplementedError("vllm's rotary kernel is a placeholder here: SGLang on a CPU is expected to use its native layers")

    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules[operators.__name__] = operators


def fork_server_processes() -> None:
    """Let SGLang fork the scheduler and detokenizer, without a CUDA context to survive the fork.

    Forked children have the imports, 10 CPU seconds each: half of the start, and 400 MiB less.
    """
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method


def take_cpu_for_the_device() -> None:
    """Let `torch.get_device_module` name the CPU where SGLang names no device.

    A CUDA build of torch names CUDA without a GPU, and the scheduler dies after freeing memory.
    """
    import torch

    original = torch.get_device_module

    # torch.compile looks for what is wrapped.
    @functools.wraps(original)
    def get_device_module(device: "torch.device | str | None" = None) -> types.ModuleType:
        return original(device or "cpu")

    torch.get_device_module = get_device_module  # type: ignore[assignment]


def compile_at_first_call() -> None:
    """Let `torch.compile` make a function's compiled form when called: the compiler takes 1 s to import.

    SGLang decorates dozens of functions at import, few of which are called on a CPU.
    """
    import torch

    original = torch.compile

    def compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if model is None:
            return functools.partial(compile_later, **options)
        if not isinstance(model, types.FunctionType):
            return original(model, **options)
        compiled = functools.cache(functools.partial(original, model, **options))

        @functools.wraps(model)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return compiled()(*arguments, **keywords)

        return call

    torch.compile = compile_later


def import_needed_models(arguments: Mapping[str, Any]) -> None:
    """Let SGLang import the modules that name the model's architecture, instead of 250: 2 s of CPU time.

    All are imported for an architecture without a class there, which SGLang may rename, and beside a
    draft model, which may have another one.
    """
    package = importlib.util.find_spec("sglang.srt.models")
    names = json.loads(Path(arguments["model_path"], "config.json").read_text()).get("architectures")
    if package is None or not names or any(argument.startswith("speculative") for argument in arguments):
        return
    files = [file for place in package.submodule_search_locations or () for file in Path(place).glob("*.py")]
    texts = {file.stem: file.read_text(errors="replace") for file in files}
    if any(f"class {names[0]}(" in text for text in texts.values()):
        others = [module for module, text in texts.items() if names[0] not in text]
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


def allocate_host_memory_unpinned() -> None:
    """Let SGLang record experts: SGLang pins the host memory with CUDA even without CUDA."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: object) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def gate_shared_experts_in_torch() -> None:
    """Replace the Triton kernel of Qwen2-MoE's shared gate, before SGLang imports its models."""
    from sglang.kernels.ops.elementwise import elementwise

    elementwise.fused_gate_sigmoid_mul_add = add_gated


def add_gated(hidden: "Tensor", gate: "Tensor", shared: "Tensor", output: "Tensor") -> None:
    """Add sigmoid(`hidden` [T, C] · `gate` [C]) times `shared` [T, C] to `output` [T, C]."""
    output.add_((hidden @ gate).sigmoid()[:, None] * shared)


def allow_deterministic_inference() -> None:
    """Let `enable_deterministic_inference` run by `deterministic_cpu` and `sglang_attention`."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.layers import sampler

    from megatron_rl.engines.on_cpu.deterministic_cpu import murmur_hash

    def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
        """Nothing is left to do."""

    batch_invariant_ops.enable_batch_invariant_mode = enable_batch_invariant_mode
    sampler.murmur_hash32 = murmur_hash
    add_deterministic_attention_backend_choices(["torch_native"])


def draw_each_request_by_its_own_seed() -> None:
    """Let a seeded request's tokens depend on no other request, as `enable_deterministic_inference` says.

    SGLang draws in the order of ids, or in that of probabilities for all requests of a batch of which
    one is greedy or has top_k or top_p.
    """
    import torch
    from sglang.srt.layers import sampler

    draw_together = sampler.Sampler._sample_from_probs

    def draw(
        self: "sampler.Sampler", probs: "Tensor", info: "SamplingBatchInfo", positions: "Tensor", simple_sampling_case: bool
    ) -> tuple["Tensor", Any]:
        tokens, candidates = draw_together(self, probs, info, positions, simple_sampling_case)
        if simple_sampling_case or info.sampling_seed is None:
            return tokens, candidates
        of_all = sampler.sampling_from_probs_torch(probs, sampling_seed=info.sampling_seed, positions=positions)
        return torch.where((info.top_ks == sampler.TOP_K_ALL) & (info.top_ps == 1), of_all, tokens), candidates

    sampler.Sampler._sample_from_probs = draw
