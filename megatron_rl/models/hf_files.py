"""Hugging Face directories as files: their safetensors read tensor by tensor under one set of names, and whole directories written."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.files import atomic_directory
from megatron_rl.models.config_json import read_config
from megatron_rl.models.families import MTP_KEYS

MAX_SHARD_BYTES = 4 * 2**30

# transformers can write all experts of a layer as one tensor [experts, ...]: its suffix, and the tensors of one expert in it, row by row.
_FUSED_EXPERTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}
# Everything a model directory holds besides weights. Code files are left behind: nothing here runs code from a checkpoint.
_COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where a tensor is stored: a whole tensor `name` of `file`, or part `part` of `num_parts` of the rows of one `expert` in it."""

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
        self._stored: dict[str, _StoredTensor] = {}
        for name, file in _tensor_files(path).items():
            suffix = next((suffix for suffix in _FUSED_EXPERTS if name.endswith(suffix)), None)
            self._stored |= {name: _StoredTensor(file, name)} if suffix is None else self._experts(file, name, suffix)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._stored)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, on the CPU. Raises UserError when its shape is not `shape` or its file is damaged."""
        stored = self._stored[name]
        try:
            tensor = self._read(stored)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {name} from {stored.file}: {error}; download or save the model again") from error
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"tensor {name} in {stored.file} has shape {tuple(tensor.shape)}, config.json needs {shape}; "
                "use the config.json that belongs to these weights"
            )
        return tensor

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._open[file]

    def _read(self, stored: _StoredTensor) -> Tensor:
        handle = self._handle(stored.file)
        if stored.expert is None:
            whole: Tensor = handle.get_tensor(stored.name)
            return whole
        experts = handle.get_slice(stored.name)
        rows = experts.get_shape()[1] // stored.num_parts
        one: Tensor = experts[stored.expert : stored.expert + 1, stored.part * rows : (stored.part + 1) * rows]
        return one.squeeze(0)

    def _experts(self, file: Path, name: str, suffix: str) -> dict[str, _StoredTensor]:
        """Each expert's tensors in the tensor `name` of all experts of a layer."""
        parts = _FUSED_EXPERTS[suffix]
        prefix = name.removesuffix(suffix)
        try:
            num_experts = self._handle(file).get_slice(name).get_shape()[0]
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {name} from {file}: {error}; download or save the model again") from error
        return {
            f"{prefix}.mlp.experts.{expert}.{part}.weight": _StoredTensor(file, name, expert, index, len(parts))
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


def save_hf(
    path: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    durable: bool = True,
) -> None:
    """Write the model directory `path` from named whole tensors, with configuration and tokenizer of the directory `source`.

    `tensors` are taken one at a time and at most `max_shard_bytes` of them are held. The directory appears only when it is complete,
    and on the disk itself when it is to be `durable`.
    Raises UserError when the disk is full or `path` is not writable, or when `source` has no config.json.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"model directory {source} has no config.json, which a saved model needs; give a Hugging Face model directory")
    with atomic_directory(path, durable=durable) as directory:
        for name in _COPIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        dtype = _write_shards(directory, tensors.items() if isinstance(tensors, Mapping) else tensors, max_shard_bytes)
        _state_what_is_written(directory / "config.json", dtype)


def _state_what_is_written(file: Path, dtype: torch.dtype) -> None:
    """Let config.json name the dtype that was written, and no layers of multi-token prediction, which are not.

    transformers casts to the dtype that it finds there, so a stale one would round the weights.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"
    config |= {key: str(dtype).removeprefix("torch.")} | {key: 0 for key in MTP_KEYS if config.get(key)}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> torch.dtype:
    """Write the weight files and return the dtype of most of their bytes: biases of routers are float32 in any model."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes, dtype_bytes = 0, Counter[torch.dtype]()
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and held_bytes + num_bytes > max_shard_bytes:
            shards.append(_write_shard(directory, len(shards), held))
            held, held_bytes = {}, 0
        # A copy: the exporter's tensors are views that share memory, which safetensors refuses.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held_bytes += num_bytes
        dtype_bytes[tensor.dtype] += num_bytes
    assert held, "a model has tensors"
    shards.append(_write_shard(directory, len(shards), held))
    _name_shards(directory, shards, dtype_bytes.total())
    return dtype_bytes.most_common(1)[0][0]


def _write_shard(directory: Path, index: int, tensors: dict[str, Tensor]) -> list[str]:
    path = _unnamed(directory, index)
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors writes 0600 whatever the umask says. What the umask says is seen at the file beside it.
    shutil.copymode(directory / "config.json", path)
    return list(tensors)


def _unnamed(directory: Path, index: int) -> Path:
    return directory / f"shard-{index}.safetensors"


def _name_shards(directory: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the files their final names, which say how many there are, and write the index when there is more than one."""
    if len(shards) == 1:
        _unnamed(directory, 0).rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        _unnamed(directory, index).rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
