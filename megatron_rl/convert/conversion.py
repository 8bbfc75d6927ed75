"""`megatron-rl convert`: a source, optional changes, and a target that is complete or absent."""

import fcntl
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.hugging_face import MAX_SHARD_BYTES, write_safetensors
from megatron_rl.checkpoints.megatron import KEPT, MegatronWeights, write_megatron
from megatron_rl.checkpoints.model_files import copy_model_files, state_what_is_written, write_model_manifest
from megatron_rl.checkpoints.stored_weights import StoredWeights, check_names, in_order, num_not_finite, open_weights
from megatron_rl.convert.tensor_comparison import TensorComparison, compare_tensors
from megatron_rl.errors import UserError, counted
from megatron_rl.models.families.family import MTP_KEYS
from megatron_rl.models.weight_table import Rule, as_stored, combine, of_mtp
from megatron_rl.system.files import atomic_directory, check_room, disk_errors, partial_path
from megatron_rl.weights.changes import Adapter, Changes, quantization_config

Format = Literal["hf", "megatron"]
_REPORT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """The request of a conversion beyond source and target. `to` None: the other format than the source's."""

    to: Format | None = None
    dtype: torch.dtype | None = None
    quantise: bool = False
    adapter: Path | None = None
    config: Path | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    copy_code: bool = False
    drop_mtp: bool = False


def convert(path: Path, target: Path, options: Options, *, say: Callable[[str], None] = lambda words: None) -> str:
    """Convert the checkpoint at `path` into the directory `target`, with `options.max_shard_bytes` of tensors at once.

    Returns format, size and speed in words. `say` hears of progress; words with a newline at their
    end are there to stay. Raises UserError.
    """
    started = time.monotonic()
    with closing(open_weights(path, config=options.config, dequantised_dtype=options.dtype)) as source:
        to = _target_format(source, options)
        _check_source(source, target, (path, source.path, source.directory), say)
        conversion = _Conversion(source, options, say)
        if any(map(source.config.get, MTP_KEYS)) and not options.drop_mtp and not conversion.mtp:
            say(f"{path} has no layers of multi-token prediction, and {target} promises none\n")
        with _target_directory(target, conversion.progress.total) as partial:
            copy_model_files(source.directory, partial, code=options.copy_code)
            entries = conversion.write_hf(partial) if to == "hf" else conversion.write_megatron(partial)
            conversion.tell_wrong_numbers()
            conversion.state_in_config(partial)
            write_model_manifest(partial, entries, stale=conversion.mtp)
    num_bytes, seconds = conversion.progress.num_bytes, time.monotonic() - started
    return f"{to}, {size(num_bytes)} in {seconds:.1f} s ({size(num_bytes / seconds)}/s)"


def _check_source(source: StoredWeights, target: Path, read: Iterable[Path], say: Callable[[str], None]) -> None:
    """Raise UserError for a damaged source, which no target may pass on as sound, and for a `target` inside of `read`.

    Other changes of the source's files are named through `say`.
    """
    for place in read:
        # Path.resolve fails for a link to itself.
        if Path(os.path.realpath(place)) in Path(os.path.realpath(target)).parents:
            raise UserError(f"{target} is inside of {place}, which is converted and stays as it is; give a target elsewhere")
    check_names(source, source.spec)
    for directory in source.places:
        manifest.check(directory, "weights")
    for name in manifest.changed_texts(source.directory):
        say(f"{source.directory / name} is not the file of its manifest: it is converted as it is\n")


@contextmanager
def _target_directory(path: Path, num_bytes: int) -> Iterator[Path]:
    """Give the directory for writing `path`, for this process alone; see `atomic_directory`.

    Raises UserError when `path` exists, another process writes it, or the disk has too little room.
    """
    if (path.exists() or path.is_symlink()) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already; remove it or give another target")
    partial = partial_path(path)
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = (partial.parent / f"{partial.name}.lock").open("w")
        except FileNotFoundError as error:
            # The kernel's own file systems, such as /proc, have no place for a directory.
            raise UserError(f"cannot write {path}: no directory can be made there; give another target") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is writing {path}; wait for it or give another target") from error
        try:
            check_room(path, num_bytes)
            with atomic_directory(path) as directory:
                yield directory
        finally:
            Path(lock.name).unlink()


class _Conversion:
    """The tensors of `source` on their way into a target; `say` hears of progress."""

    def __init__(self, source: StoredWeights, options: Options, say: Callable[[str], None] = lambda words: None) -> None:
        self._source, self._options, self._say = source, options, say
        self.rules = in_order(source)
        self.mtp = [name for name, rule in self.rules.items() if rule is None and of_mtp(name, source.spec)]
        if options.drop_mtp:
            self.rules = {name: rule for name, rule in self.rules.items() if name not in set(self.mtp)}
            self.mtp = []
        self._shapes = {name: source.shape(name) for name in self.rules}
        adapter = None if options.adapter is None else Adapter(options.adapter, set(self.rules))
        self.changes = Changes(options.dtype, adapter, options.quantise)
        self._wrong: dict[str, int] = {}
        # Codes count as if not quantised.
        self.progress = Progress(say, sum(math.prod(shape) * self._dtype(name).itemsize for name, shape in self._shapes.items()))

    def _dtype(self, name: str) -> torch.dtype:
        return self.changes.dtype_of(name, self._source.dtype(name), self.rules[name])

    def _changed(self, name: str) -> list[tuple[str, Tensor]]:
        """Return the tensors made from `name`. Numbers are checked before the conversion to codes."""
        read = self._source.read(name)
        made = self.changes.apply(name, read, self.rules[name])
        if count := num_not_finite(read if self.changes.quantise else made[0][1]):
            self._wrong[name] = count
        for _, tensor in made:
            self.progress.add(tensor.nbytes)
        return made

    def write_hf(self, partial: Path) -> Mapping[str, manifest.Entry]:
        """Write all tensors in the form of a Hugging Face directory."""
        tensors = as_stored(made for name in self.rules for made in self._changed(name))
        return write_safetensors(partial, tensors, max_shard_bytes=self._options.max_shard_bytes)[0]

    def write_megatron(self, partial: Path) -> Mapping[str, manifest.Entry]:
        """Write our own format, with the tensors outside the built model beside."""
        spec, max_bytes = self._source.spec, self._options.max_shard_bytes
        built = {rule.megatron: rule for rule in self.rules.values() if rule is not None}.values()
        dtypes = [(rule, reduce(torch.promote_types, map(self._dtype, rule.hugging_face))) for rule in built]

        def make(rule: Rule) -> Tensor:
            return combine(rule.sharding, [self._changed(name)[0][1] for name in rule.hugging_face], spec, tp=1)

        entries: dict[str, manifest.Entry] = {}
        kept = [name for name, rule in self.rules.items() if rule is None]
        if kept:
            (partial / KEPT).mkdir()
            tensors = ((name, self._changed(name)[0][1]) for name in kept)
            beside, _ = write_safetensors(partial / KEPT, tensors, max_shard_bytes=max_bytes)
            entries |= {f"{KEPT}/{name}": entry for name, entry in beside.items()}
        return entries | write_megatron(partial, dtypes, make, spec, max_file_bytes=max_bytes)

    def tell_wrong_numbers(self) -> None:
        """Name the first tensor with non-finite numbers."""
        first = next((name for name in self.rules if name in self._wrong), None)
        if first is not None:
            bad = f"{self._wrong[first]:,} of {math.prod(self._shapes[first]):,} numbers that are not finite"
            self._say(
                f"warning: {first} has {bad}, the first of {counted(len(self._wrong), 'such tensor')}; they are converted as they are\n"
            )

    def state_in_config(self, partial: Path) -> None:
        """Update config.json to the written tensors."""
        config = self._source.config
        named = config.get("dtype" if "dtype" in config else "torch_dtype") is not None
        state_what_is_written(
            partial,
            dtype=self._options.dtype or (most_common_dtype(self._source) if named else None),
            keeps_mtp=bool(self.mtp),
            quantization=quantization_config(self._shapes, self.rules) if self._options.quantise else None,
            keeps_code=self._options.copy_code,
        )


def most_common_dtype(source: StoredWeights) -> torch.dtype:
    """Return the dtype of most bytes of `source`."""
    num_bytes = Counter[torch.dtype]()
    for name in source.names():
        num_bytes[source.dtype(name)] += math.prod(source.shape(name)) * source.dtype(name).itemsize
    return num_bytes.most_common(1)[0][0]


def _target_format(source: StoredWeights, options: Options) -> Format:
    to: Format = options.to or ("hf" if isinstance(source, MegatronWeights) or options.quantise else "megatron")
    if options.quantise and to != "hf":
        raise UserError("--quantize was given for a target in our own format, which holds no codes; use --to hf")
    return to


class Progress:
    """Count bytes, and report every few seconds the count, the rate and the remaining time."""

    def __init__(self, say: Callable[[str], None], total: int) -> None:
        self._say, self.total = say, total
        self._started = self._last = time.monotonic()
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes on their way."""
        self.num_bytes += num_bytes
        now = time.monotonic()
        if now - self._last < _REPORT_EVERY_S and not sys.stderr.isatty():
            return
        self._last = now
        speed = self.num_bytes / max(now - self._started, 1e-9)
        left_s = max(self.total - self.num_bytes, 0) / max(speed, 1.0)
        self._say(f"{size(self.num_bytes)} of {size(self.total)}, {size(speed)}/s, {left_s:,.0f} s left")


def size(num_bytes: float) -> str:
    """Return a number of bytes in words, in MB below 1 GB."""
    return f"{num_bytes / 1e6:,.2f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.2f} GB"


def parse_options(*, max_shard_size: str, to: Format | None, dtype: str | None, quantize: str | None, **others: Any) -> Options:
    """Return the options of the command line. Raises UserError for an unreadable size."""
    found = re.fullmatch(r"([0-9]+|[0-9]*\.[0-9]+)\s*([KMG]i?)?B?", max_shard_size.strip(), re.IGNORECASE)
    num_bytes = 0.0
    if found is not None:
        unit = (found[2] or "").upper()
        num_bytes = float(found[1]) * (1024 if unit.endswith("I") else 1000) ** " KMG".index(unit[:1] or " ")
    if not 1 <= num_bytes < math.inf:
        raise UserError(f"--max-shard-size is {max_shard_size!r}, needs a size such as 500MB or 4GB")
    chosen = None if dtype is None else getattr(torch, dtype)
    return Options(to=to, dtype=chosen, quantise=quantize is not None, max_shard_bytes=int(num_bytes), **others)


def say_on_terminal(words: str) -> None:
    """Print progress: one changing line on a terminal, a line of its own elsewhere and for words with a newline at the end."""
    changes = sys.stderr.isatty() and not words.endswith("\n")
    text = words.rstrip("\n")
    print(f"\r{text:<78}" if sys.stderr.isatty() else text, end="" if changes else "\n", file=sys.stderr, flush=True)


def verify_conversion(path: Path, target: Path, options: Options) -> TensorComparison:
    """Compare `target` with the request, tensor by tensor and exactly. Raises UserError."""
    with (
        closing(open_weights(path, config=options.config, dequantised_dtype=options.dtype)) as source,
        closing(open_weights(target)) as written,
    ):
        conversion = _Conversion(source, options)
        return compare_tensors(source, written, conversion.changes, conversion.rules)
