"""TransformerEngine's compiled module `transformer_engine_torch`, in plain torch: the kernels that training calls, with their arithmetic.

Its Python sources run on top unchanged. Every call of attention and of the rotary embedding is recorded, so that a test can read with
which arguments the GPU would be asked. A kernel that is not here is an error when it is called.

Legend: T tokens of a micro-batch on this rank, H query heads, G key-value heads, D channels of a query, E of a value, S sequences.
"""

import itertools
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FUSED_ATTENTION: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "fused_attention.json").read_text(encoding="utf-8"))
"""TransformerEngine's answers about fused attention, by heads and compute capability."""
CALLS: list[tuple[str, dict[str, Any]]] = []
"""(kernel, its arguments) in the order of the calls: `attention`, `rotary`, `backend`."""


class _Members(type):
    """An enumeration of the compiled module: every name that is asked for is a number of its own."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(cls.__members__))
        return int(vars(cls)[name])

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if isinstance(value, int)}

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(f"TransformerEngine calls the kernel {cls.__name__}, which tests/rehearsal/te_kernels.py does not have")


class Kernels(types.ModuleType):
    """The module: the functions of this file, and enumerations for all other names."""

    def __init__(self) -> None:
        super().__init__("transformer_engine_torch")
        self.__dict__.update({kernel.__name__: kernel for kernel in _KERNELS}, layernorm_bwd=layernorm_fwd)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = _Members(name, (), {})
        return self.__dict__[name]


def generic_gemm(
    a: Tensor, transposed_a: bool, b: Tensor, transposed_b: bool, out: Tensor | None, *rest: Any, alpha: float = 1.0, **_unused: Any
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(b) @ op(a), into `out` where it is given, added to it where `accumulate`."""
    bias, grad, accumulate = rest[2], rest[6], rest[9]
    b = b.reshape(-1, b.shape[-1]) if transposed_b else b
    a_rows = a.reshape(-1, a.shape[-1])
    product = (b.t() if transposed_b else b) @ (a_rows.t() if transposed_a else a_rows) * alpha
    bias_gradient = None
    if bias is not None and bias.numel():
        if grad:
            bias_gradient = b.sum(0)
        else:
            product = product + bias
    if out is not None:
        out.copy_(out + product.view_as(out) if accumulate else product.view_as(out))
        product = out
    return product, bias_gradient, None, None


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transposed_a: bool,
    b: Sequence[Tensor],
    transposed_b: bool,
    out: Sequence[Tensor],
    out_dtype: int,
    splits: Sequence[int],
    bias: Any,
    bias_dtype: int,
    single_output: bool,
    gelu_input: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *_rest: Any,
) -> Any:
    """One product per expert, into rows of one output or into one output each."""
    outputs = list(out[0].split(list(splits))) if single_output else list(out)
    for one, other, target in zip(a, b, outputs, strict=True):
        left, right = (other.t() if transposed_b else other), (one.t() if transposed_a else one)
        target.copy_(target + left @ right if accumulate else left @ right)
    return bias


def rmsnorm_fwd(
    rows: Tensor, weight: Tensor, epsilon: float, out: Any, quantizer: Any, out_dtype: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """The norm of `rows` [T, C], and the inverse of their root mean square [T] in fp32."""
    inverse = (rows.float().square().mean(-1) + epsilon).rsqrt()
    gamma = weight.float() + 1 if zero_centered else weight.float()
    normed = (rows.float() * inverse[..., None] * gamma).to(rows.dtype)
    if out is not None:
        out.copy_(normed)
    return normed if out is None else out, None, inverse


def rmsnorm_bwd(gradient: Tensor, rows: Tensor, inverse: Tensor, weight: Tensor, margin: int, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weight."""
    values, gamma = rows.float() * inverse[..., None], weight.float() + 1 if zero_centered else weight.float()
    scaled = gradient.float().view_as(values) * gamma
    of_rows = inverse[..., None] * (scaled - values * (scaled * values).mean(-1, keepdim=True))
    of_weight = (gradient.float().view_as(values) * values).flatten(0, -2).sum(0)
    return of_rows.to(rows.dtype), of_weight.to(weight.dtype)


def fused_rope_forward(
    values: Tensor,
    angles: Tensor,
    starts: Tensor | None,
    layout: int,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    *_rest: Any,
) -> Tensor:
    """`values` [T, H, D] of packed sequences, the first channels rotated by `angles` [longest, 1, 1, rotated]."""
    CALLS.append(
        ("rotary", {"cu_seqlens": cu_seqlens, "angles": angles, "interleaved": interleaved, "cp_size": cp_size, "cp_rank": cp_rank})
    )
    return _rotated(values, angles, interleaved, cu_seqlens, cp_size, cp_rank, sign=1.0)


def fused_rope_backward(
    values: Tensor,
    angles: Tensor,
    starts: Tensor | None,
    layout: int,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    *_rest: Any,
) -> Tensor:
    """The rotation back."""
    return _rotated(values, angles, interleaved, cu_seqlens, cp_size, cp_rank, sign=-1.0)


def _rotated(
    values: Tensor, angles: Tensor, interleaved: bool, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int, *, sign: float
) -> Tensor:
    assert cu_seqlens is not None, "sequences are packed"
    assert not interleaved, "channels are rotated by halves"
    angle = angles.squeeze(2).squeeze(1)[zigzag_positions(cu_seqlens, cp_size, cp_rank)][:, None, :]
    width = angle.shape[-1]
    rotated, kept = values[..., :width].float(), values[..., width:]
    first, second_half = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second_half, first), dim=-1) * sign
    return torch.cat(((rotated * angle.cos() + turned * angle.sin()).to(values.dtype), kept), dim=-1)


def get_fused_attn_backend(*arguments: Any) -> int:
    """Return the answer of TransformerEngine's own function for packed sequences on a GPU of the pretended capability.

    Tiny heads get the answer for the smallest heads of the table that hold them.
    """
    CALLS.append(("backend", {"arguments": arguments}))
    import transformer_engine_torch

    training, (qk, v) = arguments[0], arguments[12:14]
    answers = {(row["qk"], row["v"]): row["trains" if training else "forwards"] for row in FUSED_ATTENTION["cases"]}
    heads = min((heads for heads in answers if qk <= heads[0] and v <= heads[1]), key=sum, default=None)
    found = heads is not None and not (qk % 8 or v % 8) and list(torch.cuda.get_device_capability()) in answers[heads]
    backends = transformer_engine_torch.NVTE_Fused_Attn_Backend
    return int(backends.NVTE_F16_arbitrary_seqlen if found else backends.NVTE_No_Backend)


def get_cudnn_version() -> int:
    """9.24.0, of the table."""
    return 92400


def get_num_cublas_streams() -> int:
    """Streams among which experts are divided."""
    return 1


def attention_forward(arguments: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Fused attention of its Python arguments: q [T, H, D], k [T, G, D], v [T, G, E] packed by cu_seqlens_q; output [T, H, E]."""
    CALLS.append(("attention", arguments))
    return _attention(arguments, arguments["q"], arguments["k"], arguments["v"]), [torch.zeros(1)]


def attention_backward(arguments: dict[str, Any]) -> list[Tensor]:
    """Gradients of q, k and v."""
    inputs = [arguments[name].detach().requires_grad_() for name in ("q", "k", "v")]
    with torch.enable_grad():
        output = _attention(arguments, *inputs)
    return list(torch.autograd.grad(output, inputs, arguments["d_o"].view_as(output)))


def attention_over_ranks(arguments: dict[str, Any]) -> Tensor:
    """Attention with context parallelism of its Python arguments: q [T, H, D], k and v of this rank's chunks of every sequence.

    The arithmetic of TransformerEngine's own exchange, with all keys and values gathered. Differentiable.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    CALLS.append(("attention over ranks", arguments))
    group, bounds = arguments["cp_group"], arguments["cu_seqlens_q_padded"]
    query, keys, values = arguments["q"], *(gather_from_sequence_parallel_region(arguments[name], group=group) for name in "kv")
    places = [zigzag_positions(bounds, group.size(), rank) for rank in range(group.size())]
    sequences = torch.cat([torch.full((length // group.size(),), number) for number, length in enumerate(bounds.diff().tolist())])
    behind = places[group.rank()][:, None] - torch.cat(places)
    seen = (behind >= 0) & (sequences[:, None] == sequences.repeat(group.size()))
    repeat = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(repeat, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * arguments["softmax_scale"]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, values.float()).to(query.dtype).contiguous()


def zigzag_positions(bounds: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in its sequence of every token [T] of a context parallel rank, of whole sequences at `bounds` [S + 1]."""
    positions = []
    for length in (bounds.diff() // cp_size).tolist():
        local, chunk = torch.arange(length), (length // 2 if cp_size > 1 else length)
        second = cp_size * length - (cp_rank + 1) * chunk + local - chunk
        positions.append(torch.where(local < chunk, cp_rank * chunk + local, second))
    return torch.cat(positions)


def _attention(arguments: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bounds = arguments["cu_seqlens_q"].tolist()
    left, _ = arguments["window_size"]
    outputs = []
    for start, stop in itertools.pairwise(bounds):
        repeat = query.shape[1] // key.shape[1]
        keys, values = (tensor[start:stop].repeat_interleave(repeat, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), keys.float()) * arguments["attn_scale"]
        behind = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = behind >= 0
        if left >= 0:
            seen &= behind <= left
        scores = scores.masked_fill(~seen, float("-inf"))
        outputs.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), values.float()))
    return torch.cat(outputs).to(query.dtype)


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool) -> tuple[Tensor, Tensor | None]:
    """The norm of all tensors together."""
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().reshape(1), None


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """The second list becomes the first, scaled."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    decoupled: int,
    correct: int,
    weight_decay: float,
) -> None:
    """Adam of gradients, parameters and both moments, which are float32."""
    corrections = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
    for gradient, parameter, first, second in zip(*lists, strict=True):
        gradient = gradient.float() if decoupled else gradient.float() + weight_decay * parameter
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = first / corrections[0] / ((second / corrections[1]).sqrt() + epsilon)
        parameter.sub_(lr * (update + weight_decay * parameter if decoupled else update))


def layernorm_fwd(*_arguments: Any) -> None:
    """No model here has one."""
    raise NotImplementedError("a model asked for LayerNorm")


_KERNELS: tuple[Callable[..., Any], ...] = (
    generic_gemm,
    te_general_grouped_gemm,
    rmsnorm_fwd,
    rmsnorm_bwd,
    fused_rope_forward,
    fused_rope_backward,
    get_cudnn_version,
    get_num_cublas_streams,
    get_fused_attn_backend,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_adam,
    layernorm_fwd,
)
