"""`megatron-rl convert`: a source, what is changed on the way, and a target that appears as a whole or not at all."""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_rl.convert.changes import Adapter, Changes, quantization_config
from megatron_rl.convert.resumable import locked_partial, write_files
from megatron_rl.convert.sources import MegatronSource, Source, Unit, most_common_dtype, num_not_finite, open_source
from megatron_rl.convert.targets import Piece, hugging_face_jobs, megatron_jobs, not_finite, write_index, write_metadata
from megatron_rl.errors import UserError, counted
from megatron_rl.files import write_atomic
from megatron_rl.models.checkpoint_manifest import HASH, changed_texts, check_weights_alone, write_model_manifest
from megatron_rl.models.families.config_keys import MTP_KEYS
from megatron_rl.models.hf_files import MAX_SHARD_BYTES, copy_model_files
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import of_mtp

if TYPE_CHECKING:
    from megatron_rl.convert.comparison import Comparison
    from megatron_rl.convert.tensor_comparison import TensorComparison

Format = Literal["hf", "megatron"]
_REPORT_EVERY_S = 5.0
_RECORDS = 2
"""Version of what is recorded of a finished file: an attempt that recorded something else is not continued."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a conversion is asked for beyond source and target. `to` None: the other format than the source's."""

    to: Format | None = None
    dtype: torch.dtype | None = None
    quantise: bool = False
    adapter: Path | None = None
    config: Path | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    copy_code: bool = False
    drop_mtp: bool = False


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written: format, bytes of weights, seconds."""

    to: Format
    num_bytes: int
    seconds: float


def convert(path: Path, target: Path, options: Options, *, say: Callable[[str], None] = lambda words: None) -> Converted:
    """Convert the checkpoint at `path` into the directory `target`; `say` hears of progress. Raises UserError.

    What `say` gets with a newline at its end is there to stay. A second call after a kill goes on where the first one stopped.
    """
    started = time.monotonic()
    with closing(open_source(path, config=options.config, dequantised_dtype=options.dtype)) as source:
        to = _target_format(source, options)
        _check_apart(target, (path, source.path, source.directory))
        _check_files(source, say)
        units = _units(source, options)
        if any(map(source.config.get, MTP_KEYS)) and not options.drop_mtp and not any(_is_mtp(unit, source) for unit in units):
            say(f"{path} has no layers of multi-token prediction, and {target} promises none\n")
        changes = _changes(source, units, options)
        pieces = [_piece(source, unit, changes) for unit in units]
        num_bytes = sum(piece.num_bytes for piece in pieces)
        jobs = (
            hugging_face_jobs(pieces, options.max_shard_bytes)
            if to == "hf"
            else megatron_jobs(pieces, source.spec, options.max_shard_bytes)
        )
        with locked_partial(target, _identity(source, options, to)) as partial:
            progress = Progress(say, num_bytes)
            records = write_files(partial, jobs, report=progress.add, keep=progress.keep)
            _tell_wrong_numbers(units, not_finite(records), say)
            if to == "hf":
                write_index(partial, records, total_bytes=num_bytes)
            else:
                write_metadata(partial, pieces, source.spec, records, options.max_shard_bytes)
            copy_model_files(source.directory, partial, code=options.copy_code)
            _write_config(partial / "config.json", source, pieces, options)
            stale = [tensor.name for unit in units if _is_mtp(unit, source) for tensor in unit.tensors]
            weights = {name: record["file"] for name, record in records.items()}
            write_model_manifest(partial, weights, read_model_spec(partial), stale=stale)
    return Converted(to, num_bytes, time.monotonic() - started)


def _check_apart(target: Path, read: Iterable[Path]) -> None:
    """Raise UserError when `target` would be written into one of the directories that are read."""
    for place in read:
        if place.resolve() in target.resolve().parents:
            raise UserError(f"{target} is inside of {place}, which is converted and stays as it is; give a target elsewhere")


def _check_files(source: Source, say: Callable[[str], None]) -> None:
    """Raise UserError when weights are not those of their manifest, so that no target passes damage on as its own; name other changes."""
    for directory in source.weights:
        check_weights_alone(directory)
    for name in changed_texts(source.directory):
        say(f"{source.directory / name} is not the file of its manifest: it is converted as it is\n")


def _units(source: Source, options: Options) -> list[Unit]:
    """What is converted."""
    return [unit for unit in source.units() if not (options.drop_mtp and _is_mtp(unit, source))]


def _piece(source: Source, unit: Unit, changes: Changes) -> Piece:
    """`unit` on its way. Numbers of codes are looked at before they are codes."""
    wrong: dict[str, int] = {}

    def make() -> list[Tensor]:
        read = source.read(unit)
        made = changes.apply(unit, read)
        for told, tensor in zip(unit.tensors, read if changes.quantise else made, strict=True):
            if count := num_not_finite(tensor):
                wrong[told.name] = count
        return made

    return Piece(unit, changes.described(unit), make, wrong)


def _tell_wrong_numbers(units: list[Unit], wrong: dict[str, int], say: Callable[[str], None]) -> None:
    first = next((tensor for unit in units for tensor in unit.tensors if tensor.name in wrong), None)
    if first is not None:
        bad = f"{wrong[first.name]:,} of {math.prod(first.shape):,} numbers that are not finite"
        say(f"warning: {first.name} has {bad}, the first of {counted(len(wrong), 'such tensor')}; they are converted as they are\n")


def _target_format(source: Source, options: Options) -> Format:
    to: Format = options.to or ("hf" if isinstance(source, MegatronSource) or options.quantise else "megatron")
    if options.quantise and to != "hf":
        raise UserError("--quantize was given for a target in our own format, which holds no codes; use --to hf")
    return to


def _changes(source: Source, units: list[Unit], options: Options) -> Changes:
    names = {tensor.name for unit in units for tensor in unit.tensors}
    adapter = None if options.adapter is None else Adapter(options.adapter, names)
    return Changes(options.dtype, adapter, options.quantise)


def _is_mtp(unit: Unit, source: Source) -> bool:
    return unit.rule is None and of_mtp(unit.tensors[0].name, source.spec)


def _identity(source: Source, options: Options, to: Format) -> dict[str, Any]:
    """What has to be the same for a killed attempt to be continued: the files of the source, and what is made of them."""
    places = {source.path, source.directory, *([options.adapter] if options.adapter is not None else [])}
    files = [file for place in sorted(places) for file in sorted(place.rglob("*")) if file.is_file()]
    stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    asked = {
        "hash": HASH,
        "records": _RECORDS,
        "to": to,
        "dtype": str(options.dtype),
        "quantise": options.quantise,
        "max_shard_bytes": options.max_shard_bytes,
    }
    return asked | {"drop_mtp": options.drop_mtp, "copy_code": options.copy_code, "files": stats}


def _write_config(file: Path, source: Source, pieces: list[Piece], options: Options) -> None:
    """Let config.json say what was written. It stays byte for byte where that is what it says already."""
    original = json.loads(file.read_text(encoding="utf-8"))
    config = dict(original)
    config.pop("quantization_config", None)
    if options.quantise:
        config["quantization_config"] = quantization_config([piece.unit for piece in pieces])
    key = "dtype" if "dtype" in config else "torch_dtype"
    dtype = str(options.dtype).removeprefix("torch.") if options.dtype is not None else most_common_dtype(source)
    if config.get(key) is not None or options.dtype is not None:
        config[key] = dtype
    if not any(_is_mtp(piece.unit, source) for piece in pieces):
        config |= {key: 0 for key in MTP_KEYS if config.get(key)}
    if not options.copy_code:
        # It names code that is not there.
        config.pop("auto_map", None)
    if config != original:
        write_atomic(file, json.dumps(config, indent=2) + "\n")


class Progress:
    """Counts bytes, and says every few seconds how many there are, how fast they come and how long the rest takes."""

    def __init__(self, say: Callable[[str], None], total: int) -> None:
        self._say, self._total = say, total
        self._started = self._last = time.monotonic()
        self._kept = self._written = 0

    def keep(self, num_bytes: int) -> None:
        """An earlier attempt has written these: they are done, but say nothing about the speed."""
        self._kept += num_bytes

    def add(self, num_bytes: int) -> None:
        """These are written."""
        self._written += num_bytes
        now = time.monotonic()
        if now - self._last < _REPORT_EVERY_S and not sys.stderr.isatty():
            return
        self._last = now
        done, speed = self._kept + self._written, self._written / max(now - self._started, 1e-9)
        left_s = max(self._total - done, 0) / max(speed, 1.0)
        self._say(f"{size(done)} of {size(self._total)}, {size(speed)}/s, {left_s:,.0f} s left")


def size(num_bytes: float) -> str:
    """In MB below 1 GB."""
    return f"{num_bytes / 1e6:,.2f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.2f} GB"


def parse_options(*, max_shard_size: str, to: Format | None, dtype: str | None, quantize: str | None, **others: Any) -> Options:
    """The options of the command line. Raises UserError for a size that cannot be read."""
    found = re.fullmatch(r"([0-9.]+)\s*([KMG]i?)?B?", max_shard_size.strip(), re.IGNORECASE)
    num_bytes = 0.0
    if found is not None:
        unit = (found[2] or "").upper()
        num_bytes = float(found[1]) * (1024 if unit.endswith("I") else 1000) ** " KMG".index(unit[:1] or " ")
    if num_bytes < 1:
        raise UserError(f"--max-shard-size is {max_shard_size!r}, needs a size such as 500MB or 4GB")
    chosen = None if dtype is None else getattr(torch, dtype)
    return Options(to=to, dtype=chosen, quantise=quantize is not None, max_shard_bytes=int(num_bytes), **others)


def say_on_terminal(words: str) -> None:
    """Progress: one line that changes on a terminal, a line each elsewhere, as are words with a newline at their end."""
    changes = sys.stderr.isatty() and not words.endswith("\n")
    text = words.rstrip("\n")
    print(f"\r{text:<78}" if sys.stderr.isatty() else text, end="" if changes else "\n", file=sys.stderr, flush=True)


def check_verifiable(path: Path, options: Options) -> None:
    """Raise UserError where `verify_conversion` of the source `path` could not be done, which is to be known before the conversion."""
    from megatron_rl.convert.comparison import run_by_transformers, transformers_config

    if options.adapter is not None:
        raise UserError("--verify was given with --adapter, which is meant to change what the model computes; leave one of them out")
    with closing(open_source(path, config=options.config)) as source:
        if run_by_transformers(source) or (_target_format(source, options) == "hf" and not options.quantise):
            transformers_config(source)


def verify_conversion(path: Path, target: Path, options: Options) -> tuple["TensorComparison", "Comparison"]:
    """Compare `target` with what was asked for, tensor by tensor, and run both sides.

    The first is exact whatever the options. What rounding and codes do to outputs the second can only say: a router's tie has no bound.
    """
    from megatron_rl.convert.comparison import compare
    from megatron_rl.convert.tensor_comparison import compare_tensors

    with (
        closing(open_source(path, config=options.config, dequantised_dtype=options.dtype)) as source,
        closing(open_source(target, dequantised_dtype=torch.float32)) as written,
    ):
        units = _units(source, options)
        tensors = compare_tensors(source, written, _changes(source, units, options), units)
    rounded = options.quantise or options.dtype not in (None, torch.float32)
    tolerance = None if rounded else 1e-5
    return tensors, compare(path, target, config=options.config, tolerance=tolerance)
