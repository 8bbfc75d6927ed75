"""The tensors in the safetensors of a directory, of one file or of many with an index; quantised ones as the numbers they mean."""

import json
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import read_config
from megatron_rl.models.quantised import CODE_DTYPES, STORED_DTYPES, Quantised, dequantise, find_quantised, whole_shape

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


class TensorFiles:
    """Tensors by name, read one at a time. A context manager.

    Quantised ones have the name of the weight, and come in `dequantised_dtype`.
    """

    def __init__(self, path: Path, *, dequantised_dtype: torch.dtype = torch.float32, only: Callable[[str], bool] | None = None) -> None:
        """Find the tensors of the directory, or of the one file, `path`, those with a name for which `only` is true.

        Raises UserError when there are none, and for codes without scales or scales without codes.
        """
        self.path, self.dequantised_dtype = path, dequantised_dtype
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self._files = _tensor_files(path) if path.is_dir() else _names_in(path)
        config = read_config(path) if (path / "config.json").exists() else {}
        self._quantised, held = find_quantised(config, self._files, str(path))
        self._names = (self._files.keys() - held) | self._quantised.keys()
        if only is not None:
            self._names = set(filter(only, self._names))

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._names)

    def check_files(self) -> None:
        """Raise UserError when a file is missing or cut off, or lacks a tensor that the index says it has. Reads headers alone."""
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
        """The file that holds the tensor, or its codes."""
        quantised = self._quantised.get(name)
        return self._files[name if quantised is None else quantised.codes]

    def shape(self, name: str) -> tuple[int, ...]:
        """Its whole shape [...], of a quantised one that of the weight. Raises UserError."""
        quantised = self._quantised.get(name)
        if quantised is None:
            return self._stored_shape(name)
        shape = whole_shape(quantised, self._stored_shape(quantised.codes), self._stored_shape(quantised.scales))
        if quantised.shape is None:
            return shape
        written = tuple(self._slice(quantised.shape)[:].tolist())
        if len(written) != 2 or written[0] != shape[0] or not shape[1] - 8 < written[1] <= shape[1]:
            raise UserError(f"{quantised.shape} says {written}, but {quantised.codes} holds {shape}; download or convert the model again")
        return written

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `read` gives it. Raises UserError for codes without their scale, and for either in a dtype of another form."""
        quantised = self._quantised.get(name)
        if quantised is not None:
            for stored, allowed in zip((quantised.codes, quantised.scales), STORED_DTYPES[quantised.form], strict=True):
                told = self._slice(stored).get_dtype()
                if DTYPES.get(told) not in allowed:
                    words = f"{stored} in {self._files[stored]} is stored as {told}, which {quantised.form} is not made of"
                    raise UserError(f"{words}; use the config.json that belongs to these weights, or give them in bfloat16")
            return self.dequantised_dtype
        dtype = DTYPES.get(self._slice(name).get_dtype())
        if dtype is None or dtype in CODE_DTYPES:
            raise UserError(
                f"{name} in {self.file(name)} is quantised ({self._slice(name).get_dtype()}) and has no scale beside it; download or "
                "convert the model again"
            )
        return dtype

    def read(self, name: str, *, expert: int | None = None, rows: slice | None = None) -> Tensor:
        """A tensor, of any shape, or of a stack of experts the `rows` of one, on the CPU. Raises UserError for a damaged file."""
        self.dtype(name)
        quantised = self._quantised.get(name)
        if quantised is None:
            return self._stored(name) if expert is None else self._stored_part(name, expert, rows)
        try:
            return self._dequantised(quantised, expert, rows)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, error) from error

    def _dequantised(self, weight: Quantised, expert: int | None, rows: slice | None) -> Tensor:
        if weight.form == "mxfp4" and expert is not None:
            one = slice(expert, expert + 1)
            whole = dequantise(weight, self._slice(weight.codes)[one], self._slice(weight.scales)[one], dtype=self.dequantised_dtype)[0]
        else:
            columns = self.shape(weight.name)[-1] if weight.form == "int4" else None
            codes, scales = self._stored(weight.codes), self._stored(weight.scales)
            whole = dequantise(weight, codes, scales, dtype=self.dequantised_dtype, columns=columns)
            whole = whole if expert is None else whole[expert]
        return whole if rows is None else whole[rows]

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._open[file]

    def _slice(self, name: str) -> Any:
        try:
            return self._handle(name).get_slice(name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, error) from error

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _stored(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._handle(name).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, error) from error
        return tensor

    def _stored_part(self, name: str, expert: int, rows: slice | None) -> Tensor:
        part = self._slice(name)
        one: Tensor = part[expert : expert + 1] if rows is None else part[expert : expert + 1, rows]
        return one.squeeze(0)

    def _damaged(self, name: str, error: Exception) -> UserError:
        file = self._files.get(name) or self.file(name)
        if not file.exists():
            return UserError(f"{self.path} lacks the file {file.name}, in which its index says that {name} is; download the model again")
        return UserError(f"cannot read {name} from {file}: {_words(error, file)}; download or save the model again")


def _words(error: Exception, file: Path) -> str:
    """What is wrong with a file: the library says of one that has not the size of its header that its metadata is not covered."""
    text = str(error)
    if "IncompleteBuffer" not in text and "not fully covered" not in text:
        return text
    size, needed = file.stat().st_size, _needed_bytes(file)
    what = "the file is cut off" if size < needed else "the file goes on behind its last tensor"
    return f"{what}: it has {size:,} bytes, its header needs {needed:,}"


def _needed_bytes(file: Path) -> int:
    """The size of a safetensors file whose header can be read, as that says it: of the header itself and of the tensors behind it."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return 8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)


def _names_in(file: Path) -> dict[str, Path]:
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


def _tensor_files(path: Path) -> dict[str, Path]:
    index = path / "model.safetensors.index.json"
    try:
        if not index.exists():
            return _names_in(path / "model.safetensors")
        found = {name: path / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    except FileNotFoundError as error:
        raise UserError(f"{path} has no model.safetensors; give a Hugging Face directory with safetensors weights") from error
    except (json.JSONDecodeError, KeyError, AttributeError, OSError, SafetensorError) as error:
        words = _words(error, path / "model.safetensors")
        raise UserError(f"the safetensors in {path} cannot be read ({words}); download or save the model again") from error
    single = path / "model.safetensors"
    if single.exists() and single not in found.values():
        raise UserError(
            f"{path} has {single.name}, which transformers reads, and {index.name}, which engines read and which names other files; remove "
            "the one that is not meant"
        )
    return found
