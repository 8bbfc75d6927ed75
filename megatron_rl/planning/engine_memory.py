"""Memory of the inference engines, from the architecture alone: weights and KV cache tokens."""

from math import prod

from megatron_rl.config.derived import derive
from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.config.settings import Settings
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.planning.records import EngineMemory

_WEIGHT_BYTES = 2
_CACHE_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}
# Room for activations and CUDA graphs on GPUs above 60 GiB, by SGLang's rule (server_args' memory settings).
_LEFT_BYTES = 10 * GIB
_LEFT_PER_GPU_BYTES = GIB // 8


def plan_engine(settings: Settings, spec: ModelSpec, gpu: Gpu, *, shared_with: int) -> EngineMemory:
    """Return the memory of each GPU of an engine.

    Attention's keys and values are split over the engine's GPUs, a latent is on each GPU. Others
    always take `shared_with` bytes of the GPU.
    """
    arguments, tp = settings.rollout.sglang, settings.rollout.ranks_per_engine
    share = float(arguments.get("mem_fraction_static") or _default_share(gpu, tp))
    weights = _weight_bytes(spec, tp=tp)
    usable = int(gpu.memory_bytes * share)
    attention_tp = max(1, tp // int(arguments.get("dp_size", 1))) if arguments.get("enable_dp_attention") else tp
    per_token = _token_numbers(spec, tp=attention_tp) * _CACHE_BYTES.get(str(arguments.get("kv_cache_dtype", "auto")), 2)
    cache = max(0, usable - weights - shared_with)
    longest = derive(settings).max_sequence_tokens or 0
    tokens = cache // per_token
    return EngineMemory(
        num_gpus=tp,
        num_engines=settings.rollout.num_engines,
        weights=weights,
        cache=cache,
        reserved=gpu.memory_bytes - usable,
        bytes_per_token=per_token,
        cache_tokens=tokens,
        longest_sequence=longest,
    )


def _default_share(gpu: Gpu, num_gpus: int) -> float:
    return 1.0 - (_LEFT_BYTES + num_gpus * _LEFT_PER_GPU_BYTES) / gpu.memory_bytes


def _weight_bytes(spec: ModelSpec, *, tp: int) -> int:
    """Return the bytes of weights on one GPU.

    Matrices are split over the engine's GPUs; one-dimensional weights are on each GPU.
    """
    shapes = [shape for _, shape in tensor_shapes(spec)]
    return _WEIGHT_BYTES * sum(-(-prod(shape) // tp) if len(shape) > 1 else prod(shape) for shape in shapes)


def _token_numbers(spec: ModelSpec, *, tp: int) -> int:
    """Return the cached numbers of one token on one GPU.

    Keys and values of the GPU's heads, or the latent and its rotary part.
    """
    if spec.mla is not None:
        return spec.num_layers * (spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim)
    heads = max(1, -(-spec.num_kv_heads // tp))
    return spec.num_layers * heads * 2 * spec.head_dim
