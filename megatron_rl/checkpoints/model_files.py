"""The files of a model directory beside its weights: config.json, tokenizer, chat templates, manifest."""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoints import manifest
from megatron_rl.models.config_json import read_config
from megatron_rl.models.families.family import MTP_KEYS
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.system.files import atomic_directory

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


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype named by a config.json, bfloat16 when none is named."""
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return {"float32": torch.float32, "float16": torch.float16}.get(named, torch.bfloat16)


def copy_model_files(source: Path, directory: Path, *, code: bool = False) -> None:
    """Copy configuration, tokenizer and chat templates of a model directory byte for byte, with `code` also Python."""
    for name in (*_COPIED_FILES, *(file.name for file in source.glob("*.py") if code)):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def state_what_is_written(
    directory: Path,
    *,
    dtype: torch.dtype | None,
    keeps_mtp: bool,
    quantization: Mapping[str, Any] | None = None,
    keeps_code: bool = False,
) -> None:
    """Make config.json in `directory` name the written `dtype` (None: as it is), MTP layers, codes and Python code.

    transformers casts to this dtype, so a stale one would round the weights. Loaders with permission to run code
    look in the directory for the code of `auto_map` and fail; SGLang imports it without permission when running a
    model by transformers' classes. A file with the right values already stays byte for byte.
    """
    file = directory / "config.json"
    original = json.loads(file.read_text(encoding="utf-8"))
    config = {key: value for key, value in original.items() if key != "quantization_config" and (keeps_code or key != "auto_map")}
    if quantization is not None:
        config["quantization_config"] = quantization
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    if not keeps_mtp:
        config |= {key: 0 for key in MTP_KEYS if config.get(key)}
    if config != original:
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model_manifest(directory: Path, entries: Mapping[str, manifest.Entry], *, stale: Iterable[str]) -> None:
    """Write the manifest of a model directory: `entries` of the weights, names of `stale` tensors. Raises UserError."""
    spec = parse_model_spec(read_config(directory), origin=str(directory / "config.json"))
    manifest.write(directory, known=entries, model=asdict(spec), **{manifest.STALE: sorted(stale)})


def describe_hf(path: Path, *, source: Path, dtype: torch.dtype, linked: bool = False) -> None:
    """Write `path` as `save_hf`, for weights of `dtype`: none, or `linked` ones of `source`. Raises UserError."""
    with atomic_directory(path) as directory:
        copy_model_files(source, directory)
        state_what_is_written(directory, dtype=dtype, keeps_mtp=linked)
        for file in (*source.glob("*.safetensors"), *source.glob("*.safetensors.index.json")) if linked else ():
            (directory / file.name).symlink_to(file.resolve())
