"""Hugging Face directories: their safetensors read tensor by tensor under one set of names, and whole directories written."""

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.model_files import config_dtype, copy_model_files, state_what_is_written, write_model_manifest
from megatron_rl.checkpoints.quantised import CODE_DTYPES, STORED_DTYPES, Quantised, dequantise, find_quantised, whole_shape
from megatron_rl.errors import UserError
from megatron_rl.models.config_json import read_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.models.weight_table import part_name
from megatron_rl.system.files import atomic_directory, runs_of_bytes

MAX_SHARD_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of dtypes, as its headers have them."""
_FUSED_EXPERTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}
"""Tensors of one expert, row by row, in a tensor [experts, ...] of this suffix, as transformers can write a layer's."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor in the files: all of `stored`, or part number `part` of `num_parts` of the rows of one `expert`."""

    stored: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1


class HuggingFaceWeights:
    """The safetensors of a directory, read tensor by tensor: one file, or shards with an index. Call `close` when done.

    Experts have their own names, also where a file holds all experts of a layer in one tensor. Quantised weights
    are read as the numbers meant by the codes.
    """

    def __init__(
        self, path: Path, *, dequantised_dtype: torch.dtype | None = torch.float32, only: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Find the tensors whose names pass `only`; quantised ones come in `dequantised_dtype`, None for config.json's.

        Raises UserError when no tensor is found, and for codes without scales or scales without codes.
        """
        self.path = self.directory = path
        self.places: tuple[Path, ...] = (path,)
        """The directories whose tensors are read."""
        self.config = read_config(path) if (path / "config.json").exists() else {}
        self._dequantised_dtype = dequantised_dtype or config_dtype(self.config)
        self._stack, self._open = ExitStack(), dict[Path, Any]()
        self.close = self._stack.close
        self._files = _tensor_files(path)
        self._quantised, held = find_quantised(self.config, self._files, str(path))
        self._parts: dict[str, _Part] = {}
        for name in filter(only, (self._files.keys() - held) | self._quantised.keys()):
            self._parts |= self._parts_in(name)

    def _parts_in(self, name: str) -> dict[str, _Part]:
        suffix = next((suffix for suffix in _FUSED_EXPERTS if name.removesuffix("_bias").endswith(suffix)), None)
        if suffix is None:
            return {name: _Part(name)}
        experts = range(self._whole_shape(name)[0])
        # Only gpt-oss has biases beside the stacks. Rows and columns of its stacks are swapped.
        if f"{name.removesuffix('_bias')}_bias" in self._files:
            return {part_name(name, expert): _Part(name, expert) for expert in experts}
        prefix, parts = name.removesuffix(suffix), _FUSED_EXPERTS[suffix]
        return {
            f"{prefix}.mlp.experts.{expert}.{part}.weight": _Part(name, expert, index, len(parts))
            for expert in experts
            for index, part in enumerate(parts)
        }

    @cached_property
    def spec(self) -> ModelSpec:
        """The architecture described by config.json. Raises UserError."""
        return parse_model_spec(self.config, origin=str(self.directory / "config.json"))

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._parts)

    def check_files(self) -> None:
        """Raise UserError when a file is missing or cut off, or lacks a tensor of the index. Reads headers alone."""
        of_file: dict[Path, list[str]] = {}
        for name, file in self._files.items():
            of_file.setdefault(file, []).append(name)
        for file, names in sorted(of_file.items()):
            try:
                lacking = sorted(set(names).difference(self._handle(names[0]).keys()))
            except (OSError, SafetensorError) as error:
                raise self._damaged(min(names), error) from error
            if lacking:
                raise UserError(
                    f"{file} lacks tensors that the index of {self.path} says it has ({len(lacking)}), the first is {lacking[0]}; "
                    "download or save the model again"
                )

    def file(self, name: str) -> Path:
        """Return the file with the tensor, or with the codes of a quantised tensor."""
        stored = self._parts[name].stored
        return self._files[self._quantised[stored].codes if stored in self._quantised else stored]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape [...] of the tensor, of codes that of the weight. Raises UserError for a damaged file."""
        part = self._parts[name]
        shape = self._whole_shape(part.stored)
        return shape if part.expert is None else (shape[1] // part.num_parts, *shape[2:])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of what `read` returns. Raises UserError for codes without scale, or of another form."""
        stored = self._parts[name].stored
        quantised = self._quantised.get(stored)
        if quantised is None:
            told = self._slice(stored).get_dtype()
            if DTYPES.get(told, torch.int8) in CODE_DTYPES:
                words = f"{name} in {self.file(name)} is quantised ({told}) and has no scale beside it"
                raise UserError(f"{words}; download or convert the model again")
            return DTYPES[told]
        for part, allowed in zip((quantised.codes, quantised.scales), STORED_DTYPES[quantised.form], strict=True):
            told = self._slice(part).get_dtype()
            if DTYPES.get(told) not in allowed:
                words = f"{part} in {self._files[part]} is stored as {told}, which {quantised.form} is not made of"
                raise UserError(f"{words}; use the config.json that belongs to these weights, or give them in bfloat16")
        return self._dequantised_dtype

    def read(self, name: str) -> Tensor:
        """Return one tensor, of any shape, on the CPU. Raises UserError as `dtype` does, and for a damaged file."""
        self.dtype(name)
        part = self._parts[name]
        num_rows = 0 if part.expert is None else self.shape(name)[0]
        rows = slice(part.part * num_rows, (part.part + 1) * num_rows)
        try:
            if part.stored in self._quantised:
                return self._dequantised(self._quantised[part.stored], part.expert, rows)
            if part.expert is None:
                return self._handle(part.stored).get_tensor(part.stored)
            one: Tensor = self._slice(part.stored)[part.expert : part.expert + 1, rows]
            return one.squeeze(0)
        except (OSError, SafetensorError) as error:
            raise self._damaged(part.stored, error) from error

    def _dequantised(self, weight: Quantised, expert: int | None, rows: slice) -> Tensor:
        if weight.form == "mxfp4" and expert is not None:
            codes, scales = (self._slice(part)[expert : expert + 1] for part in (weight.codes, weight.scales))
            return dequantise(weight, codes, scales, dtype=self._dequantised_dtype)[0][rows]
        columns = self._whole_shape(weight.name)[-1] if weight.form == "int4" else None
        codes, scales = (self._handle(part).get_tensor(part) for part in (weight.codes, weight.scales))
        whole = dequantise(weight, codes, scales, dtype=self._dequantised_dtype, columns=columns)
        return whole if expert is None else whole[expert][rows]

    def _whole_shape(self, stored: str) -> tuple[int, ...]:
        quantised = self._quantised.get(stored)
        if quantised is None:
            return tuple(self._slice(stored).get_shape())
        shape = whole_shape(quantised, *(tuple(self._slice(part).get_shape()) for part in (quantised.codes, quantised.scales)))
        if quantised.shape is None:
            return shape
        written = tuple(self._slice(quantised.shape)[:].tolist())
        if len(written) != 2 or written[0] != shape[0] or not shape[1] - 8 < written[1] <= shape[1]:
            words = f"{quantised.shape} says {written}, but {quantised.codes} holds {shape}"
            raise UserError(f"{words}; download or convert the model again")
        return written

    def _handle(self, stored: str) -> Any:
        file = self._files[stored]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._open[file]

    def _slice(self, stored: str) -> Any:
        try:
            return self._handle(stored).get_slice(stored)
        except (OSError, SafetensorError) as error:
            raise self._damaged(stored, error) from error

    def _damaged(self, stored: str, error: Exception) -> UserError:
        file = self._files.get(stored) or self._files[self._quantised[stored].codes]
        if not file.exists():
            return UserError(f"{self.path} lacks the file {file.name}, in which its index says that {stored} is; download the model again")
        return UserError(f"cannot read {stored} from {file}: {_words(error, file)}; download or save the model again")


def _words(error: Exception, file: Path) -> str:
    """Describe the fault of a file; of a truncated one the library says that metadata is "not covered"."""
    if "IncompleteBuffer" not in str(error) and "not fully covered" not in str(error):
        return str(error)
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    size, needed = file.stat().st_size, 8 + length + max(ends, default=0)
    what = "the file is cut off" if size < needed else "the file goes on behind its last tensor"
    return f"{what}: it has {size:,} bytes, its header needs {needed:,}"


def _tensor_files(path: Path) -> dict[str, Path]:
    """Return the file of each stored tensor. Raises UserError when there are none or two sets."""
    index, single = path / INDEX, path / "model.safetensors"
    try:
        if not index.exists():
            with safe_open(single, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), single)
        found = {name: path / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    except FileNotFoundError as error:
        raise UserError(f"{path} has no model.safetensors; give a Hugging Face directory with safetensors weights") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError, SafetensorError) as error:
        raise UserError(f"the safetensors in {path} cannot be read ({_words(error, single)}); download or save the model again") from error
    if single.exists() and single not in found.values():
        raise UserError(
            f"{path} has {single.name}, which transformers reads, and {index.name}, which engines read and which names other files; remove "
            "the one that is not meant"
        )
    return found


def write_safetensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int, hashed: bool = True
) -> tuple[dict[str, manifest.Entry], Counter[torch.dtype]]:
    """Write `tensors` as safetensors files of at most `max_shard_bytes`, one at a time in memory.

    Returns the manifest's entries of the files if `hashed`, and the bytes of each dtype.
    """
    names: list[list[str]] = []
    dtype_bytes = Counter[torch.dtype]()

    def shards() -> Iterator[Path]:
        on_cpu = ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors)
        for shard in runs_of_bytes(on_cpu, lambda item: item[1].nbytes, max_bytes=max_shard_bytes):
            file = directory / f"shard-{len(names)}.safetensors"
            save_file(dict(shard), file, metadata={"format": "pt"})
            # The library's files are readable by their owner only.
            file.chmod(directory.stat().st_mode & 0o666)
            names.append([name for name, _ in shard])
            for _, tensor in shard:
                dtype_bytes[tensor.dtype] += tensor.nbytes
            # Before the next one is gathered.
            shard.clear()
            yield file

    entries = manifest.entries_of(shards()) if hashed else dict.fromkeys(file.name for file in shards())
    files = [f"model-{index + 1:05d}-of-{len(names):05d}.safetensors" for index in range(len(names))]
    files = files if len(files) > 1 else ["model.safetensors"]
    for written, final in zip(entries, files, strict=True):
        (directory / written).rename(directory / final)
    if len(files) > 1:
        weight_map = {name: file for file, inside in zip(files, names, strict=True) for name in inside}
        content = {"metadata": {"total_size": dtype_bytes.total()}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    return {final: entry for final, entry in zip(files, entries.values(), strict=True) if entry}, dtype_bytes


def save_hf(
    path: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    stale: Iterable[tuple[str, Tensor]] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    durable: bool = True,
) -> None:
    """Write the model directory `path` from named whole tensors, with configuration and tokenizer of `source`.

    `stale` are layers of multi-token prediction from before the training; without them config.json promises
    none. The directory appears when complete. With `durable` it is flushed to the disk and has a manifest.
    Raises UserError when the disk is full or `path` is not writable, or when `source` has no config.json.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"model directory {source} has no config.json, which a saved model needs; give a Hugging Face model directory")
    with atomic_directory(path, durable=durable) as directory:
        copy_model_files(source, directory)
        old: list[str] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stale:
                old.append(name)
                yield name, tensor

        written = chain(tensors.items() if isinstance(tensors, Mapping) else tensors, noted())
        entries, dtype_bytes = write_safetensors(directory, written, max_shard_bytes=max_shard_bytes, hashed=durable)
        # Of most bytes: biases of routers are float32 in any model.
        state_what_is_written(directory, dtype=dtype_bytes.most_common(1)[0][0], keeps_mtp=bool(old))
        if durable:
            write_model_manifest(directory, entries, stale=old)
