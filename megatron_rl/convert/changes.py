"""What is done to tensors on their way: another dtype, an adapter merged into them, codes and scales in their place.

Legend: R rows, C columns of a weight, r rank of an adapter.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.convert.sources import Unit
from megatron_rl.errors import UserError
from megatron_rl.models.expert_stacks import stored_name
from megatron_rl.models.tensor_files import TensorFiles
from megatron_rl.models.weight_table import Sharding
from megatron_rl.weights.bucket import WeightSpec

FP8_BLOCK = 128
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Changes:
    """In this order: `adapter` is merged, then everything is cast to `dtype`, then weights are quantised."""

    dtype: torch.dtype | None = None
    adapter: "Adapter | None" = None
    quantise: bool = False

    def described(self, unit: Unit) -> tuple[WeightSpec, ...]:
        """The tensors that `apply` makes of those of `unit`."""
        made: list[WeightSpec] = []
        for tensor in unit.tensors:
            dtype = str(self._dtype(unit, tensor)).removeprefix("torch.")
            if self.quantise and is_quantised(unit, tensor):
                rows, columns = (-(-size // FP8_BLOCK) for size in tensor.shape)
                made.append(WeightSpec(tensor.name, "float8_e4m3fn", tensor.shape))
                made.append(WeightSpec(f"{tensor.name}_scale_inv", "float32", (rows, columns)))
            else:
                made.append(WeightSpec(tensor.name, dtype, tensor.shape))
        return tuple(made)

    def apply(self, unit: Unit, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors [...] of `unit` as they are to be written."""
        made: list[Tensor] = []
        for told, tensor in zip(unit.tensors, tensors, strict=True):
            if self.adapter is not None:
                tensor = self.adapter.merged(told.name, tensor)
            tensor = tensor.to(self._dtype(unit, told))
            made += quantise_blocks(tensor) if self.quantise and is_quantised(unit, told) else [tensor]
        return made

    def _dtype(self, unit: Unit, tensor: WeightSpec) -> torch.dtype:
        # What the model does not build stays byte for byte, and what is float32 in any model stays float32. A head that is stored although
        # it is tied has to stay equal to the embedding.
        keep = unit.rule.float32 if unit.rule is not None else tensor.name != "lm_head.weight"
        return tensor.torch_dtype if keep or self.dtype is None else self.dtype


def is_quantised(unit: Unit, tensor: WeightSpec) -> bool:
    """Whether a weight is one that engines multiply in float8: not embeddings, head, norms, routers and stacks of experts."""
    rule = unit.rule
    if rule is None or rule.sharding is Sharding.VOCABULARY or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
        return False
    return not rule.megatron.endswith((".router.weight", ".shared_experts.gate_weight"))


def quantise_blocks(weight: Tensor) -> list[Tensor]:
    """Codes [R, C] float8 and scales [R/128, C/128] float32 of a weight [R, C], as DeepSeek-V3 stores them.

    A block's largest number becomes float8's largest. A block of zeros has scale 1: its codes are zeros, not 0/0.
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
        scale[largest > 0] = largest[largest > 0] / limit
        spread = scale.repeat_interleave(FP8_BLOCK)[:columns]
        codes[part] = (block / spread).clamp_(-limit, limit).to(_FP8)
    return [codes, scales]


def quantization_config(units: Sequence[Unit]) -> dict[str, Any]:
    """What config.json says of weights that `quantise_blocks` has made; modules whose weights were left alone are named."""
    left = [tensor.name for unit in units for tensor in unit.tensors if len(tensor.shape) == 2 and not is_quantised(unit, tensor)]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted({_module(name) for name in left} | {"lm_head"}),
    }


def _module(name: str) -> str:
    """The module of a weight; of a part of a stack that of the stack."""
    stored = stored_name(name)
    return name.removesuffix(".weight") if stored == name else stored.rpartition(".")[0]


class Adapter:
    """A LoRA adapter as PEFT saves it: each weight W becomes W + s B A with s = alpha / r, or alpha / sqrt(r) with rsLoRA."""

    def __init__(self, path: Path, names: set[str]) -> None:
        """Read the adapter of a model with the tensors `names`. Raises UserError for what is not plain LoRA or not of this model."""
        file = path / "adapter_config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}); give a directory that PEFT saved") from error
        _check_plain(config, file)
        self._config, self._file = config, file
        if not (path / "adapter_model.safetensors").is_file():
            raise UserError(f"{path} has no adapter_model.safetensors; give a directory that PEFT saved")
        with TensorFiles(path / "adapter_model.safetensors") as tensors:
            self._pairs = self._read_pairs(tensors)
        strangers = sorted(self._pairs.keys() - names)
        if strangers:
            raise UserError(f"adapter {path} changes {strangers[0]}, which the model does not have; give the adapter of this model")

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """`weight` [R, C] with the adapter in it, computed in float32 and rounded once; other tensors as they are."""
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

    def _read_pairs(self, tensors: TensorFiles) -> dict[str, tuple[Tensor, Tensor, float]]:
        downs = {name for name in tensors.names() if name.endswith(".lora_A.weight")}
        ups = {name.replace(".lora_A.", ".lora_B.") for name in downs}
        strange = sorted(tensors.names() ^ (downs | ups))
        if strange or not downs:
            raise UserError(f"{self._file.parent} has or lacks {strange[:1] or 'every tensor'}, needs pairs of lora_A and lora_B alone")
        pairs = {}
        for down in downs:
            module = down.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
            pair = tensors.read(down), tensors.read(down.replace(".lora_A.", ".lora_B."))
            pairs[f"{module}.weight"] = (*pair, self._scale(module, rank=len(pair[0])))
        return pairs

    def _scale(self, module: str, *, rank: int) -> float:
        configured = _pattern(self._config, "rank_pattern", module, self._config.get("r"))
        if rank != configured:
            raise UserError(f"{self._file} gives {module} rank {configured}, its tensors have {rank}; give files that belong together")
        alpha = _pattern(self._config, "alpha_pattern", module, self._config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise UserError(f"{self._file} has lora_alpha = {alpha!r}, needs a number; give a directory that PEFT saved")
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _pattern(config: dict[str, Any], key: str, module: str, default: Any) -> Any:
    """The value of the first pattern at `key` that matches the end of `module`, as PEFT looks it up."""
    patterns = (config.get(key) or {}).items()
    return next((value for pattern, value in patterns if re.fullmatch(rf"(.*\.)?({pattern})", module)), default)


def _check_plain(config: dict[str, Any], file: Path) -> None:
    plain = {"peft_type": "LORA", "use_dora": False, "bias": "none", "fan_in_fan_out": False, "modules_to_save": None, "lora_bias": False}
    plain["layer_replication"] = None
    for key, needed in plain.items():
        value = config.get(key, needed)
        if value != needed and (value or needed):
            raise UserError(f"{file} has {key} = {value!r}, only {needed!r} can be merged; merge this adapter with PEFT")
    begun = config.get("init_lora_weights", True)
    if begun not in (True, False, None, "gaussian"):
        raise UserError(
            f"{file} has init_lora_weights = {begun!r}, which changes the base when PEFT loads it: the adapter does not fit the base that "
            "is stored; merge this adapter with PEFT"
        )
