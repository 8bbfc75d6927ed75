"""Weights stored as codes and scales: the tensors of one weight, and the numbers meant.

Legend: R rows, C columns of a weight, E experts. Forms, by `quantization_config` in config.json:

    fp8                   X.weight [R, C] float8, X.weight_scale_inv [R/128, C/128], last ones smaller (DeepSeek-V3, Qwen3-FP8)
    compressed-tensors    float-quantized: X.weight [R, C] float8, X.weight_scale for the tensor, a row or a block (GLM-4.5-FP8);
                          pack-quantized: X.weight_packed [R, C/8] int32, X.weight_scale [R, C/group], X.weight_shape (Kimi-K2-Thinking)
    mxfp4                 X_blocks [E, R, C/32, 16] uint8, X_scales [E, R, C/32] uint8, for X [E, C, R] (gpt-oss)
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.errors import UserError

Form = Literal["fp8", "int4", "mxfp4"]
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CODE_DTYPES = (*FP8_DTYPES, torch.int8, torch.uint8, torch.int32)
"""dtypes of codes, which mean nothing without their scales."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STORED_DTYPES: Mapping[Form, tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = {
    "fp8": (FP8_DTYPES, (*_FLOATS, torch.float8_e8m0fnu)),
    "int4": ((torch.int32,), _FLOATS),
    "mxfp4": ((torch.uint8,), (torch.uint8,)),
}
"""dtypes of codes and scales of each form in a file; others, such as exponents in bytes, would be read as scales."""
_MXFP4_GROUP = 32
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Quantised:
    """One weight, by the tensors of its codes and scales; `block`: rows and columns of a scale, where config.json has them."""

    name: str
    form: Form
    codes: str
    scales: str
    block: tuple[int, int] | None = None
    shape: str | None = None


_SUFFIXES: Mapping[Form, tuple[tuple[str, str], ...]] = {
    "fp8": ((".weight", ".weight_scale_inv"), (".weight", ".weight_scale")),
    "int4": ((".weight_packed", ".weight_scale"),),
    "mxfp4": (("_blocks", "_scales"),),
}
_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale", "_scales")
# Suffixes of scales for activations, which say nothing about weights, and for codes, which change weights.
_ACTIVATION_SUFFIXES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
_UNSUPPORTED_SUFFIXES = (".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".qweight", ".qzeros")


def find_quantised(config: Mapping[str, Any], names: Iterable[str], origin: str) -> tuple[dict[str, Quantised], set[str]]:
    """Find the quantised weights among the tensors `names` of a checkpoint, and the names of all codes and scales.

    Raises UserError, naming `origin`, for an unsupported way to quantise, and for codes or scales without the other.
    """
    stored = set(names)
    form, block = _form(config.get("quantization_config"), origin)
    found: dict[str, Quantised] = {}
    for codes_suffix, scale_suffix in () if form is None else _SUFFIXES[form]:
        for scales in sorted(name for name in stored if name.endswith(scale_suffix)):
            base = scales.removesuffix(scale_suffix)
            codes, name = base + codes_suffix, base if form == "mxfp4" else f"{base}.weight"
            if codes in stored:
                shape = f"{base}.weight_shape" if form == "int4" and f"{base}.weight_shape" in stored else None
                assert form is not None
                found[name] = Quantised(name, form, codes, scales, block, shape)
    used = {part for weight in found.values() for part in (weight.codes, weight.scales, weight.shape) if part is not None}
    _check_orphans(stored - used, form, origin)
    # Scales of activations are for quantising kernels, too.
    return found, used | ({name for name in stored if name.endswith(_ACTIVATION_SUFFIXES)} if form is not None else set())


def _check_orphans(rest: set[str], form: Form | None, origin: str) -> None:
    def first(*suffixes: str) -> str | None:
        return min((name for name in rest if name.endswith(suffixes)), default=None)

    if name := first(*_UNSUPPORTED_SUFFIXES):
        raise UserError(f"{origin} has {name}, of a way to quantise that is not supported; give the weights in bfloat16")
    if name := first(*_SCALE_SUFFIXES):
        words = f"{origin} has the scale {name}"
        if form is None:
            words += ", but its config.json has no quantization_config"
            raise UserError(f"{words}; use the config.json of these weights, or give them in bfloat16")
        raise UserError(f"{words} without the tensor that it belongs to; download or convert the model again")
    if name := first("_blocks" if form == "mxfp4" else ".weight_packed"):
        raise UserError(f"{origin} has the quantised tensor {name} without its scale; download or convert the model again")


def _form(section: Any, origin: str) -> tuple[Form | None, tuple[int, int] | None]:
    if not section:
        return None, None
    if not isinstance(section, dict):
        raise UserError(f"config.json of {origin} has quantization_config = {section!r}, needs a JSON object; correct the file")
    method = section.get("quant_method")
    if method is None and "quant_algo" in section:
        # ModelOpt may use FP8, in another form than fp8 here.
        method = f"{section['quant_algo']} of ModelOpt"
    if method == "fp8":
        return "fp8", _block(section.get("weight_block_size"), origin)
    if method == "mxfp4":
        return "mxfp4", None
    if method == "compressed-tensors":
        return _compressed(section, origin)
    raise UserError(
        f"the weights of {origin} are quantised by method {method}, supported are fp8, mxfp4 and compressed-tensors; give them in bfloat16"
    )


def _block(value: Any, origin: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise UserError(f"quantization_config of {origin} has a block of {value!r}, needs two positive integers; correct the file")
    return value[0], value[1]


def _compressed(section: Mapping[str, Any], origin: str) -> tuple[Form, tuple[int, int] | None]:
    groups = section.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    kinds = {(entry.get("type"), entry.get("num_bits"), bool(entry.get("symmetric", True))) for entry in weights}
    form = section.get("format")
    if form == "pack-quantized" and kinds == {("int", 4, True)}:
        return "int4", None
    if form == "float-quantized" and kinds == {("float", 8, True)}:
        blocks = {tuple(entry.get("block_structure") or ()) for entry in weights}
        return "fp8", _block(list(blocks.pop()) or None, origin) if len(blocks) == 1 else None
    raise UserError(
        f"the weights of {origin} are compressed as {form} {sorted(kinds, key=str)}, supported are symmetric 4-bit pack-quantized and "
        "8-bit float-quantized; give them in bfloat16"
    )


def whole_shape(weight: Quantised, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the weight from the shapes of codes and scales. Raises UserError when the two do not fit."""
    if weight.form == "mxfp4":
        if len(codes) == 4 and codes[:3] == scales and codes[3] == _MXFP4_GROUP // 2:
            return codes[0], codes[2] * _MXFP4_GROUP, codes[1]
        raise _misfit(weight, codes, scales, "one byte of scale for 16 bytes of codes")
    if weight.form == "int4":
        if len(codes) == 2 and len(scales) == 2 and codes[0] == scales[0] and codes[1] * 8 % scales[1] == 0:
            return codes[0], codes[1] * 8
        raise _misfit(weight, codes, scales, "a scale for each group of columns of each row")
    _scale_block(weight, codes, scales)
    return codes


def _scale_block(weight: Quantised, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of one scale of float8 codes."""
    if len(codes) == 2:
        if math.prod(scales) == 1 and (weight.block is None or (codes[0] <= weight.block[0] and codes[1] <= weight.block[1])):
            return codes
        if weight.block is None and scales in ((codes[0], 1), (codes[0],)):
            return 1, codes[1]
        if weight.block is not None:
            rows, columns = weight.block
            if scales == (-(-codes[0] // rows), -(-codes[1] // columns)):
                return weight.block
    needed = "a scale for the tensor or for each row" if weight.block is None else f"a scale for each block of {weight.block}"
    raise _misfit(weight, codes, scales, needed)


def _misfit(weight: Quantised, codes: tuple[int, ...], scales: tuple[int, ...], needed: str) -> UserError:
    return UserError(
        f"{weight.codes} has shape {codes} and its scale {weight.scales} has shape {scales}, needs {needed}; "
        "use the config.json that belongs to these weights"
    )


def dequantise(weight: Quantised, codes: Tensor, scales: Tensor, *, dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """Return the weight [R, C], or [E, C, R] for mxfp4, in `dtype`, from its codes and scales; see the table above.

    Each number is made in float32 and rounded once. `columns` is the real number when the last codes are padding.
    """
    if weight.form == "mxfp4":
        # Seconds of imports, for gpt-oss alone.
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(codes, scales, dtype=dtype)
    rows = len(codes) if codes.dim() else 0
    width = whole_shape(weight, tuple(codes.shape), tuple(scales.shape))[1] if weight.form == "int4" else codes.shape[-1]
    result = torch.empty((rows, columns or width), dtype=dtype)
    if weight.form == "int4":
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            result[part] = _int4(codes[part], scales[part])[:, :columns]
        return result
    block_rows, block_columns = _scale_block(weight, tuple(codes.shape), tuple(scales.shape))
    spread = scales.float().reshape(-(-rows // block_rows), -1).repeat_interleave(block_columns, dim=1)[:, :width]
    at_once = _ROWS_AT_ONCE if block_rows == 1 else block_rows
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        # All rows of a block share the scales.
        result[part] = codes[part].float().mul_(spread[part] if block_rows == 1 else spread[start // block_rows])
    return result


def _int4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return [R, C] float32 from eight columns in each int32, the first in the lowest bits, stored with 8 added."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = (codes[..., None] >> shifts & 0xF).flatten(1).float() - 8
    return (values.unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]).flatten(1)
