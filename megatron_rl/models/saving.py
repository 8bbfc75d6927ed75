"""Hugging Face directories as output: config.json, tokenizer and sharded safetensors that `from_pretrained` loads."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.files import atomic_directory
from megatron_rl.models.families import MTP_KEYS

MAX_SHARD_BYTES = 4 * 2**30

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
    Raises UserError when the disk is full or the place not writable, or when `source` has no config.json.
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
    """Write the weight files and return the dtype of the tensors."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and held_bytes + num_bytes > max_shard_bytes:
            shards.append(_write_shard(directory, len(shards), held))
            held, held_bytes = {}, 0
        # A copy: the exporter's tensors are views that share memory, which safetensors refuses.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held_bytes += num_bytes
        total_bytes += num_bytes
    assert held, "a model has tensors"
    dtype = next(iter(held.values())).dtype
    shards.append(_write_shard(directory, len(shards), held))
    _name_shards(directory, shards, total_bytes)
    return dtype


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
