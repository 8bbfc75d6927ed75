"""Hugging Face directories as files: their safetensors read tensor by tensor under one set of names, and whole directories written."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.files import atomic_directory
from megatron_rl.models.checkpoint_manifest import HashedFile, write_model_manifest
from megatron_rl.models.expert_stacks import part_name
from megatron_rl.models.families.config_keys import MTP_KEYS
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.tensor_files import TensorFiles
from megatron_rl.models.tensor_writing import raw_bytes, safetensors_header

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
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where a tensor is stored: a whole tensor `name`, or part `part` of `num_parts` of the rows of one `expert` in it."""

    name: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1


class Checkpoint:
    """The safetensors of a directory, one file or sharded with an index, read tensor by tensor. A context manager.

    Experts have their own names, also where the file holds those of a layer in one tensor. Quantised tensors are given as the numbers
    they mean, in `dequantised_dtype`.
    """

    def __init__(self, path: Path, *, dequantised_dtype: torch.dtype = torch.float32) -> None:
        """Find the tensors. Raises UserError when there are none, and for codes without scales or scales without codes."""
        self.path = path
        self._files = TensorFiles(path, dequantised_dtype=dequantised_dtype)
        self._stored: dict[str, _StoredTensor] = {}
        for name in self._files.names():
            suffix = next((suffix for suffix in _FUSED_EXPERTS if name.removesuffix("_bias").endswith(suffix)), None)
            self._stored |= {name: _StoredTensor(name)} if suffix is None else self._experts(name, suffix)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.__exit__(*exception)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._stored)

    def check_files(self) -> None:
        """Raise UserError when a file is missing or cut off, or lacks a tensor that the index says it has. Reads headers alone."""
        self._files.check_files()

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape [...], from the header of its file. Raises UserError when that is damaged."""
        stored = self._stored[name]
        shape = self._files.shape(stored.name)
        return shape if stored.expert is None else (shape[1] // stored.num_parts, *shape[2:])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `read` gives it. Raises UserError for codes without their scale."""
        return self._files.dtype(self._stored[name].name)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, on the CPU. Raises UserError when its shape is not `shape` or its file is damaged."""
        stored = self._stored[name]
        if self.shape(name) != shape:
            raise UserError(
                f"tensor {name} in {self._files.file(stored.name)} has shape {self.shape(name)}, config.json needs {shape}; "
                "use the config.json that belongs to these weights"
            )
        if stored.expert is None:
            return self._files.read(stored.name)
        rows = shape[0]
        return self._files.read(stored.name, expert=stored.expert, rows=slice(stored.part * rows, (stored.part + 1) * rows))

    def _experts(self, name: str, suffix: str) -> dict[str, _StoredTensor]:
        """Each expert's tensors in the tensor `name` of all experts of a layer.

        Biases are written beside the stacks of gpt-oss alone, which have rows and columns the other way round.
        """
        if f"{name.removesuffix('_bias')}_bias" in self._files.names():
            return {part_name(name, expert): _StoredTensor(name, expert) for expert in range(self._files.shape(name)[0])}
        parts = _FUSED_EXPERTS[suffix]
        prefix = name.removesuffix(suffix)
        return {
            f"{prefix}.mlp.experts.{expert}.{part}.weight": _StoredTensor(name, expert, index, len(parts))
            for expert in range(self._files.shape(name)[0])
            for index, part in enumerate(parts)
        }


def save_hf(
    path: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    stale: Iterable[tuple[str, Tensor]] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    durable: bool = True,
) -> None:
    """Write the model directory `path` from named whole tensors, with configuration and tokenizer of the directory `source`.

    `stale` are layers of multi-token prediction as they were before the training; config.json promises none where there are none.
    `tensors` are taken one at a time and at most `max_shard_bytes` of them are held. The directory appears only when it is complete. One
    that is to be `durable` is on the disk itself then, and has a manifest as a conversion writes it, hashed on the way to the files.
    Raises UserError when the disk is full or `path` is not writable, or when `source` has no config.json.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"model directory {source} has no config.json, which a saved model needs; give a Hugging Face model directory")
    with atomic_directory(path, durable=durable) as directory:
        copy_model_files(source, directory)
        old: list[str] = []
        written = chain(tensors.items() if isinstance(tensors, Mapping) else tensors, _noting(stale, old))
        dtype, entries = _write_shards(directory, written, max_shard_bytes, hashed=durable)
        _state_what_is_written(directory / "config.json", dtype, keeps_mtp=bool(old))
        if durable:
            write_model_manifest(directory, entries, read_model_spec(directory), stale=old)


def describe_hf(path: Path, *, source: Path, dtype: torch.dtype, linked: bool = False) -> None:
    """Write the model directory `path` as `save_hf` does for weights of `dtype`, but with no weights, or with those of `source` `linked`.

    Raises UserError as `save_hf`.
    """
    with atomic_directory(path) as directory:
        copy_model_files(source, directory)
        _state_what_is_written(directory / "config.json", dtype, keeps_mtp=linked)
        for file in (*source.glob("*.safetensors"), *source.glob("*.safetensors.index.json")) if linked else ():
            (directory / file.name).symlink_to(file.resolve())


def _noting(tensors: Iterable[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        names.append(name)
        yield name, tensor


def copy_model_files(source: Path, directory: Path, *, code: bool = False) -> None:
    """Copy configuration, tokenizer and chat templates of a model directory byte for byte, and its Python files when asked for `code`."""
    for name in _COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    for file in sorted(source.glob("*.py")) if code else ():
        shutil.copyfile(file, directory / file.name)


def _state_what_is_written(file: Path, dtype: torch.dtype, *, keeps_mtp: bool) -> None:
    """Let config.json name the dtype that was written, and layers of multi-token prediction where they are, but neither codes nor code.

    transformers casts to the dtype that it finds there, so a stale one would round the weights. Loaders that may run code look for that of
    `auto_map` in the directory and fail; SGLang imports it without being allowed to where it runs a model by transformers' classes.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"
    for absent in ("quantization_config", "auto_map"):
        config.pop(absent, None)
    config |= {key: str(dtype).removeprefix("torch.")} | ({} if keeps_mtp else {key: 0 for key in MTP_KEYS if config.get(key)})
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int, *, hashed: bool
) -> tuple[torch.dtype, dict[str, dict[str, Any]]]:
    """Write the weight files and return the dtype of most of their bytes, as biases of routers are float32 in any model, and, if they are
    to be `hashed`, what a manifest says of each file by its name.
    """
    shards: list[_Shard] = []
    held: dict[str, Tensor] = {}
    held_bytes, dtype_bytes = 0, Counter[torch.dtype]()
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and held_bytes + num_bytes > max_shard_bytes:
            shards.append(_write_shard(directory, len(shards), held, hashed=hashed))
            held, held_bytes = {}, 0
        held[name] = tensor.detach().cpu()
        held_bytes += num_bytes
        dtype_bytes[tensor.dtype] += num_bytes
    assert held, "a model has tensors"
    shards.append(_write_shard(directory, len(shards), held, hashed=hashed))
    files = _name_shards(directory, shards, dtype_bytes.total())
    entries = {file: shard.entry for file, shard in zip(files, shards, strict=True) if shard.entry is not None}
    return dtype_bytes.most_common(1)[0][0], entries


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file that was written: the tensors in it, and what a manifest says of it, None where it was not hashed."""

    names: list[str]
    entry: dict[str, Any] | None


def _write_shard(directory: Path, index: int, tensors: dict[str, Tensor], *, hashed: bool) -> _Shard:
    # So that each starts at a multiple of the size of its numbers.
    ordered = sorted(tensors.items(), key=lambda named: -named[1].element_size())
    with _unnamed(directory, index).open("wb", buffering=0 if hashed else -1) as stream:
        file = HashedFile(stream) if hashed else stream
        file.write(safetensors_header((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered))
        for _, tensor in ordered:
            file.write(raw_bytes(tensor))
    return _Shard(list(tensors), file.entry if isinstance(file, HashedFile) else None)


def _unnamed(directory: Path, index: int) -> Path:
    return directory / f"shard-{index}.safetensors"


def _name_shards(directory: Path, shards: list[_Shard], total_bytes: int) -> list[str]:
    """Give the files their final names, which say how many there are and are returned, and write the index for more than one."""
    if len(shards) == 1:
        _unnamed(directory, 0).rename(directory / "model.safetensors")
        return ["model.safetensors"]
    files = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    weight_map: dict[str, str] = {}
    for index, (file, shard) in enumerate(zip(files, shards, strict=True)):
        _unnamed(directory, index).rename(directory / file)
        weight_map |= dict.fromkeys(shard.names, file)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    return files
