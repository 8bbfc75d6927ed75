"""Changes of tensors on the way: another dtype, a merged adapter, codes and scales in their place.

Legend: R rows, C columns of a weight, r rank of an adapter.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import JsonObject, read_object
from megatron_rl.models.weight_table import Rule, Sharding, stored_name

FP8_BLOCK = 128
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Changes:
    """In this order: `adapter` is merged, then everything is cast to `dtype`, then weights are quantised."""

    dtype: torch.dtype | None = None
    adapter: "Adapter | None" = None
    quantise: bool = False

    def apply(self, name: str, tensor: Tensor, rule: Rule | None) -> list[tuple[str, Tensor]]:
        """Return by name what becomes of the `tensor`, of any shape, called `name`, of the parameter of `rule`."""
        if self.adapter is not None:
            tensor = self.adapter.merged(name, tensor)
        tensor = tensor.to(self.dtype_of(name, tensor.dtype, rule))
        if not (self.quantise and is_quantised(name, tensor.dim(), rule)):
            return [(name, tensor)]
        return list(zip((name, f"{name}_scale_inv"), quantise_blocks(tensor), strict=True))

    def dtype_of(self, name: str, dtype: torch.dtype, rule: Rule | None) -> torch.dtype:
        """Return the dtype of a tensor of `dtype` behind the cast."""
        # Parts not built by the model stay byte for byte, and float32 in any model stays float32. A stored head
        # stays equal to the embedding also when tied.
        keep = rule.float32 if rule is not None else name != "lm_head.weight"
        return dtype if keep or self.dtype is None else self.dtype


def is_quantised(name: str, num_dimensions: int, rule: Rule | None) -> bool:
    """Return true for a weight that engines multiply in float8: no embedding, head, norm, router or stack of experts."""
    if rule is None or rule.sharding is Sharding.VOCABULARY or num_dimensions != 2 or not name.endswith(".weight"):
        return False
    return not rule.megatron.endswith((".router.weight", ".shared_experts.gate_weight"))


def quantise_blocks(weight: Tensor) -> list[Tensor]:
    """Return codes [R, C] float8 and scales [R/128, C/128] float32 of a weight [R, C], as DeepSeek-V3 stores them.

    A block's largest number becomes float8's largest. A block of zeros has scale 1. Other scales are
    normal float32 numbers: the quotient of a smaller one would be inexact, or 0/0.
    """
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=_FP8)
    scales = torch.ones((-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))
    limit = torch.finfo(_FP8).max
    for index, scale in enumerate(scales):
        part = slice(index * FP8_BLOCK, (index + 1) * FP8_BLOCK)
        block = weight[part].float()
        padded = torch.nn.functional.pad(block.abs().amax(dim=0), (0, len(scale) * FP8_BLOCK - columns))
        largest = padded.unflatten(0, (-1, FP8_BLOCK)).amax(dim=1)
        scale[largest > 0] = (largest[largest > 0] / limit).clamp_min(torch.finfo(scale.dtype).tiny)
        spread = scale.repeat_interleave(FP8_BLOCK)[:columns]
        codes[part] = (block / spread).clamp_(-limit, limit).to(_FP8)
    return [codes, scales]


def quantization_config(shapes: Mapping[str, tuple[int, ...]], tensor_rules: Mapping[str, Rule | None]) -> dict[str, Any]:
    """Return the section of config.json for weights of `quantise_blocks`; modules whose weights were left alone are named."""
    left = [name for name, shape in shapes.items() if len(shape) == 2 and not is_quantised(name, 2, tensor_rules[name])]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted({_module(name) for name in left} | {"lm_head"}),
    }


def _module(name: str) -> str:
    """Return the module of a weight; of a part of a stack the module of the stack."""
    stored = stored_name(name)
    return name.removesuffix(".weight") if stored == name else stored.rpartition(".")[0]


class Adapter:
    """A LoRA adapter as PEFT saves it: each weight W becomes W + s B A with s = alpha / r, or alpha / sqrt(r) with rsLoRA."""

    def __init__(self, path: Path, names: set[str]) -> None:
        """Read the adapter of a model with the tensors `names`. Raises UserError for what is not plain LoRA or not of this model."""
        file = path / "adapter_config.json"
        config = read_object(file, fix="give a directory that PEFT saved")
        _check_plain(config, file)
        self._config, self._file = config, file
        try:
            self._pairs = self._read_pairs(load_file(path / "adapter_model.safetensors"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path / 'adapter_model.safetensors'} cannot be read ({error}); give a directory that PEFT saved") from error
        strangers = sorted(self._pairs.keys() - names)
        if strangers:
            raise UserError(f"adapter {path} changes {strangers[0]}, which the model does not have; give the adapter of this model")

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return `weight` [R, C] with the adapter, computed in float32 and rounded once; others unchanged."""
        pair = self._pairs.get(name)
        if pair is None:
            return weight
        down, up, scale = pair
        if (len(up), down.shape[1]) != tuple(weight.shape):
            raise UserError(
                f"the adapter of {self._file} changes a {name} of shape {(len(up), down.shape[1])}, the model's is {tuple(weight.shape)}; "
                "give the adapter of this model"
            )
        return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale).to(weight.dtype)

    def _read_pairs(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, float]]:
        downs = {name for name in tensors if name.endswith(".lora_A.weight")}
        ups = {name.replace(".lora_A.", ".lora_B.") for name in downs}
        strange = sorted(tensors.keys() ^ (downs | ups))
        if strange or not downs:
            raise UserError(f"{self._file.parent} has or lacks {strange[:1] or 'every tensor'}, needs pairs of lora_A and lora_B alone")
        pairs = {}
        for down in sorted(downs):
            module = down.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
            pair = tensors[down], tensors[down.replace(".lora_A.", ".lora_B.")]
            shapes = [tuple(tensor.shape) for tensor in pair]
            if [len(shape) for shape in shapes] != [2, 2] or not shapes[0][0] or shapes[0][0] != shapes[1][1]:
                raise UserError(
                    f"{self._file.parent} has {down} of shape {shapes[0]} with lora_B of {shapes[1]}, needs (rank, columns) with "
                    "(rows, rank); give a directory that PEFT saved"
                )
            pairs[f"{module}.weight"] = (*pair, self._scale(module, rank=len(pair[0])))
        return pairs

    def _scale(self, module: str, *, rank: int) -> float:
        configured = self._pattern("rank_pattern", module, self._config.get("r"))
        if rank != configured:
            raise UserError(f"{self._file} gives {module} rank {configured}, its tensors have {rank}; give files that belong together")
        alpha = self._pattern("alpha_pattern", module, self._config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
            raise UserError(f"{self._file} has lora_alpha = {alpha!r}, needs a number that is finite; give a directory that PEFT saved")
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        """Return the value of PEFT's first pattern at `key` that matches the end of `module`."""
        patterns = JsonObject(self._config, str(self._file)).section(key).values
        try:
            return next((value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)), default)
        except re.error as error:
            words = f"{self._file} has a pattern in {key} that is no regular expression ({error})"
            raise UserError(f"{words}; give a directory that PEFT saved") from error


def _check_plain(config: dict[str, Any], file: Path) -> None:
    plain = {"peft_type": "LORA", "use_dora": False, "bias": "none", "fan_in_fan_out": False, "modules_to_save": None, "lora_bias": False}
    for key, needed in (plain | {"layer_replication": None}).items():
        value = config.get(key, needed)
        if value != needed and (value or needed):
            raise UserError(f"{file} has {key} = {value!r}, only {needed!r} can be merged; merge this adapter with PEFT")
    begun = config.get("init_lora_weights", True)
    if begun not in (True, False, None, "gaussian"):
        raise UserError(
            f"{file} has init_lora_weights = {begun!r}, which changes the base when PEFT loads it: the adapter does not fit the base that "
            "is stored; merge this adapter with PEFT"
        )
