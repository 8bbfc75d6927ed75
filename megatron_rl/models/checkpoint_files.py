"""The safetensors of a Hugging Face directory, read tensor by tensor under one set of names."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import read_config

# transformers can write all experts of a layer as one tensor [experts, ...]: its suffix, and the tensors of one expert in it, row by row.
_FUSED_EXPERTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is: a whole tensor `name` of `file`, or part `part` of `num_parts` of the rows of one `expert` in it."""

    file: Path
    name: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1


class Checkpoint:
    """The safetensors of a directory, one file or sharded with an index, read tensor by tensor. A context manager.

    Experts have their own names, also where the file holds those of a layer in one tensor.
    """

    def __init__(self, path: Path) -> None:
        """Find the tensors. Raises UserError when there are none, or quantised ones."""
        self.path = path
        _refuse_quantised(path)
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self._places: dict[str, _Place] = {}
        for name, file in _tensor_files(path).items():
            suffix = next((suffix for suffix in _FUSED_EXPERTS if name.endswith(suffix)), None)
            self._places |= {name: _Place(file, name)} if suffix is None else self._experts(file, name, suffix)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._places)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, on the CPU. Raises UserError when its shape is not `shape` or its file is damaged."""
        place = self._places[name]
        try:
            tensor = self._read(place)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {name} from {place.file}: {error}; download or save the model again") from error
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"tensor {name} in {place.file} has shape {tuple(tensor.shape)}, config.json needs {shape}; "
                "use the config.json that belongs to these weights"
            )
        return tensor

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._open[file]

    def _read(self, place: _Place) -> Tensor:
        handle = self._handle(place.file)
        if place.expert is None:
            whole: Tensor = handle.get_tensor(place.name)
            return whole
        experts = handle.get_slice(place.name)
        rows = experts.get_shape()[1] // place.num_parts
        one: Tensor = experts[place.expert : place.expert + 1, place.part * rows : (place.part + 1) * rows]
        return one.squeeze(0)

    def _experts(self, file: Path, name: str, suffix: str) -> dict[str, _Place]:
        """Each expert's tensors in the tensor `name` of all experts of a layer."""
        parts = _FUSED_EXPERTS[suffix]
        prefix = name.removesuffix(suffix)
        try:
            num_experts = self._handle(file).get_slice(name).get_shape()[0]
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {name} from {file}: {error}; download or save the model again") from error
        return {
            f"{prefix}.mlp.experts.{expert}.{part}.weight": _Place(file, name, expert, index, len(parts))
            for expert in range(num_experts)
            for index, part in enumerate(parts)
        }


def _refuse_quantised(path: Path) -> None:
    quantization = read_config(path).get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UserError(
            f"the weights in {path} are quantised (quantization_config in config.json, method {method}), which cannot be trained; "
            "convert them to bfloat16 first and give that directory"
        )


def _tensor_files(path: Path) -> dict[str, Path]:
    index = path / "model.safetensors.index.json"
    try:
        if index.exists():
            return {name: path / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        single = path / "model.safetensors"
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except FileNotFoundError as error:
        raise UserError(f"{path} has no model.safetensors; give a Hugging Face directory with safetensors weights") from error
    except (json.JSONDecodeError, KeyError, AttributeError, OSError, SafetensorError) as error:
        raise UserError(f"the safetensors in {path} cannot be read ({error}); download or save the model again") from error
