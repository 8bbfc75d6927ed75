"""What can be said of a checkpoint without running it: files, names, shapes, dtypes and numbers, and whether they fit its config.json."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.settings import TopologySettings
from megatron_rl.config.yaml_text import by_path
from megatron_rl.convert.changes import Changes
from megatron_rl.convert.sources import MegatronSource, Source, check_place, config_dtype, most_common_dtype, num_not_finite, open_source
from megatron_rl.convert.tensor_comparison import compare_tensors
from megatron_rl.device import local_device, prepare_megatron
from megatron_rl.errors import UserError
from megatron_rl.files import MANIFEST
from megatron_rl.models.build import build_model
from megatron_rl.models.checkpoint_manifest import check_manifest, check_model, check_weights_alone, hashed_files, in_threads, read_manifest
from megatron_rl.models.hf_weights import global_parameters, held_name, load_parameter, may_be_left_out
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.stored_weights import NamedTensors
from megatron_rl.models.torch_dist import is_torch_dist
from megatron_rl.models.weight_table import Rule, Sharding, parameter_shape, rules
from megatron_rl.planning.meta import rank_without_memory
from megatron_rl.training.topology import Topology

_UNWRITTEN = 0x7FBADBAD
"""The bits of a float32 that no arithmetic and no cast makes: one of many that are not a number."""


FILES = "files are those of the manifest"
TOGETHER = "files, names and config.json belong together"
CONFIG = "config.json is the one that the weights were written with"
TOKENIZER = "the tokenizer's tokens are in the vocabulary"
PARAMETERS = "every number of the model is written, and every tensor is read"
PADDING = "rows that pad the vocabulary are zero"
NUMBERS = "numbers are finite, of the dtype that config.json says"
SAME = "model and numbers are those of the checkpoint that is to be equal"
_NO_MANIFEST = "there is no manifest to compare with"


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise of a checkpoint that holds, or the `problem` that breaks it, or why it could not be looked at and so was `skipped`."""

    promise: str
    problem: str | None = None
    skipped: str | None = None

    def line(self) -> str:
        """In words."""
        if self.problem is not None:
            return f"BROKEN  {self.promise}: {self.problem}"
        return f"ok      {self.promise}" if self.skipped is None else f"skipped {self.promise}: {self.skipped}"


def verify(path: Path, *, config: Path | None = None, equal_to: Path | None = None) -> Iterator[Finding]:
    """Every promise of the checkpoint at `path`, one after the other, the last one that it has the numbers of the one at `equal_to`.

    Raises UserError before the first where there is none to look at, and where the other one cannot be read.
    """
    check_place(path)
    if equal_to is None:
        yield from _promises(path, config)
        return
    with closing(open_source(equal_to)) as sound:
        for directory in sound.weights:
            check_weights_alone(directory)
        broken = None
        for found in _promises(path, config):
            broken = broken or (found.promise if found.problem is not None and found.promise in (TOGETHER, PARAMETERS) else None)
            yield found
        yield _checked(SAME, lambda: check_equal(path, config, sound)) if broken is None else next(_resting_on(broken, SAME))


def _promises(path: Path, config: Path | None) -> Iterator[Finding]:
    yield from _of_manifests(path, foreign=config is not None)
    try:
        source = open_source(path, config=config)
    except UserError as error:
        yield Finding(TOGETHER, str(error))
        yield from _resting_on(TOGETHER, CONFIG, TOKENIZER, PARAMETERS, PADDING, NUMBERS)
        return
    with closing(source):
        yield Finding(TOGETHER)
        yield _of_config(source)
        yield _of_tokenizer(source)
        tensors = WatchedTensors(source)
        parameters = _checked(PARAMETERS, lambda: check_parameters(source, tensors))
        yield parameters
        if parameters.problem is not None:
            yield from _resting_on(PARAMETERS, PADDING, NUMBERS)
            return
        yield _checked(PADDING, lambda: check_padding(source))
        yield _checked(NUMBERS, lambda: check_numbers(source, tensors))


def check_equal(path: Path, config: Path | None, sound: Source) -> None:
    """Raise UserError unless the checkpoint at `path` has the model and the numbers of `sound`.

    Layers of multi-token prediction may be in one of them alone. Without a manifest this is what shows damage that fits: a bit, a
    transposed square, a layer in the place of another, another rope base.
    """
    with closing(open_source(path, config=config)) as source:
        spec = dataclasses.replace(source.spec, num_mtp_layers=sound.spec.num_mtp_layers)
        for name, got, needed in _differences(spec, json.loads(json.dumps(dataclasses.asdict(sound.spec)))):
            words = f"config.json in {source.directory} gives {name} = {got}, that in {sound.directory} {needed}"
            raise UserError(f"{words}; take the config.json that is meant")
        names = source.tensors.names()
        units = [unit for unit in sound.units() if unit.rule is not None or all(tensor.name in names for tensor in unit.tensors)]
        found = compare_tensors(sound, source, Changes(), units)
    if found.wrong:
        more = f"; {len(found.wrong) - 1:,} more differ" if len(found.wrong) > 1 else ""
        raise UserError(f"{found.wrong[0]}{more}; take the checkpoint that is meant")


def _checked(promise: str, check: Callable[[], None]) -> Finding:
    try:
        check()
    except UserError as error:
        return Finding(promise, str(error))
    return Finding(promise)


def _resting_on(broken: str, *promises: str) -> Iterator[Finding]:
    return (Finding(promise, skipped=f'because "{broken}" is broken') for promise in promises)


def _of_manifests(path: Path, *, foreign: bool) -> Iterator[Finding]:
    """Of the directory, or of both in a saved step; one that is `foreign` is another program's, which writes no manifest."""
    if not is_torch_dist(path / "megatron"):
        yield _of_manifest(FILES, path, foreign=foreign)
        return
    yield _of_manifest(f"{FILES} in megatron", path / "megatron", foreign=foreign)
    if (path / "hf").is_dir():
        yield _of_manifest(f"{FILES} in hf", path / "hf", foreign=foreign)


def _of_manifest(promise: str, place: Path, *, foreign: bool) -> Finding:
    try:
        has_hashes = bool(hashed_files(place))
    except UserError as error:
        return Finding(promise, str(error))
    of_run = place.name == "megatron" and (place.parent / "hf" / "config.json").exists()
    ours = is_torch_dist(place) and (of_run or (place / "config.json").exists()) and not foreign
    if not has_hashes:
        missing = f"{place} has no {MANIFEST} with hashes, which our own format always has; copy the checkpoint again"
        return Finding(promise, missing) if ours else Finding(promise, skipped=_NO_MANIFEST)
    return _checked(promise, lambda: in_threads(partial(check_manifest, place)) if of_run else check_model(place))


def _of_config(source: Source) -> Finding:
    try:
        written = read_manifest(source.directory).get("model")
    except UserError:
        return next(_resting_on(FILES, CONFIG))
    if written is None:
        return Finding(CONFIG, skipped=_NO_MANIFEST)
    return _checked(CONFIG, lambda: check_written_spec(source.directory, source.spec, written))


def check_written_spec(path: Path, spec: ModelSpec, written: dict[str, Any]) -> None:
    """Raise UserError when config.json describes another model than the one that was `written`, also one of the same shapes."""
    for name, got, needed in _differences(spec, written):
        raise UserError(f"config.json in {path} gives {name} = {got}, the weights were written with {needed}; restore the config.json")


def _differences(spec: ModelSpec, written: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Fields of `spec` that are others in `written`, with both values."""
    now, then = by_path(json.loads(json.dumps(dataclasses.asdict(spec)))), by_path(written)
    return ((name, now.get(name), then.get(name)) for name in sorted(now.keys() | then.keys()) if now.get(name) != then.get(name))


def _of_tokenizer(source: Source) -> Finding:
    file = source.directory / "tokenizer.json"
    if not file.exists():
        return Finding(TOKENIZER, skipped=f"there is no {file.name}")
    return _checked(TOKENIZER, lambda: check_tokenizer(file, source))


def check_tokenizer(file: Path, source: Source) -> None:
    """Raise UserError when the tokenizer of `file` has a token that the embedding has no row for."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    ids += [token["id"] for token in content.get("added_tokens", [])]
    if ids and max(ids) >= source.spec.vocab_size:
        raise UserError(
            f"the tokenizer in {source.directory} has token {max(ids)}, config.json's vocabulary ends at "
            f"{source.spec.vocab_size - 1}; use the config.json and the tokenizer of these weights"
        )


class WatchedTensors:
    """The tensors of `source` on their way into a model: which were read, and the first that holds numbers that are not finite."""

    def __init__(self, source: Source) -> None:
        self.path, self._source = source.path, source
        self.read_names: set[str] = set()
        self.problem: str | None = None

    def names(self) -> set[str]:
        """Names of all tensors."""
        return self._source.tensors.names()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor [...] of `shape`. Raises UserError for one of another shape."""
        tensor = self._source.tensors.read(name, shape)
        self.read_names.add(name)
        self.problem = self.problem or _not_finite(name, tensor, self._source)
        return tensor


def check_parameters(source: Source, tensors: WatchedTensors) -> None:
    """Raise UserError unless each number of the model comes from one of `tensors`, and each of those goes into the model or is left out.

    The model is built without memory. Its parameters are made one at a time, filled with a mark that no checkpoint has, and loaded as a run
    loads them: what nothing wrote keeps the mark.
    """
    spec, shapes = source.spec, model_shapes(source.spec)
    for rule in rules(spec):
        name = held_name(rule, shapes)
        if name not in shapes and not rule.exported:
            continue
        shape = shapes.pop(name, None)
        if shape != parameter_shape(rule):
            words = f"{name} of shape {parameter_shape(rule)}"
            raise UserError(f"the weight table makes {words}, which the model does not have; report this as a bug")
        _loaded_over_marks(shape, rule, spec, tensors, tp_rank=0, tp=1)
    if shapes:
        raise UserError(f"the weight table makes nothing of {next(iter(shapes))}, which the model has; report this as a bug")
    unread = sorted(name for name in tensors.names() - tensors.read_names if not may_be_left_out(name, spec))
    if unread:
        raise UserError(f"{unread[0]} in {source.path} goes into no parameter of the model; report this as a bug")


def _loaded_over_marks(shape: tuple[int, ...], rule: Rule, spec: ModelSpec, tensors: NamedTensors, *, tp_rank: int, tp: int) -> Tensor:
    """What rank `tp_rank` of `tp` has of the parameter of `rule`, [...] of `shape`, in float32. Raises UserError for unwritten numbers."""
    marks = torch.full(shape, _UNWRITTEN, dtype=torch.int32)
    parameter = marks.view(torch.float32)
    load_parameter(parameter, rule, spec, tensors, tp_rank=tp_rank, tp=tp)
    unwritten = int((marks == _UNWRITTEN).sum())
    if unwritten:
        words = f"{unwritten:,} of {marks.numel():,} numbers of {rule.megatron}"
        raise UserError(f"nothing in {tensors.path} wrote {words}; report this as a bug")
    return parameter


def check_padding(source: Source) -> None:
    """Raise UserError unless the rows that pad a vocabulary to a multiple of the tensor parallel ranks are zero.

    They are looked at as ranks load them, of as many ranks as it takes to have such rows, and in a run's checkpoint, where they stay zero
    because no loss depends on them. Another program's checkpoint, which has no manifest, holds numbers there that nothing reads.
    """
    spec = source.spec
    tp = next(size for size in itertools.count(2) if spec.vocab_size % size)
    rows = spec.padded_vocab_size(tp) // tp
    for rule in (rule for rule in rules(spec) if rule.sharding is Sharding.VOCABULARY and rule.exported):
        shape = (rows, *rule.tensors[0].shape[1:])
        *_, last = (_loaded_over_marks(shape, rule, spec, source.tensors, tp_rank=rank, tp=tp) for rank in range(tp))
        if last[spec.vocab_size - tp * rows :].count_nonzero():
            raise UserError(f"{rule.megatron} is loaded with padded rows that are not zero by rank {tp - 1} of {tp}; report this as a bug")
        if isinstance(source, MegatronSource) and (source.path / MANIFEST).is_file():
            padding = source.tensors.padding(rule)
            if wrong := int(padding.count_nonzero()):
                raise UserError(
                    f"{rule.megatron} of checkpoint {source.path} has {wrong:,} numbers that are not zero in its {len(padding):,} rows "
                    f"behind the vocabulary of {spec.vocab_size:,} tokens; use the config.json of these weights, or take another checkpoint"
                )


def model_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the whole model by its name, from a model that is built without memory."""
    settings = TopologySettings()
    prepare_megatron(local_device())
    with rank_without_memory(Topology.of(settings), rank=0, fused=False):
        config = transformer_config(spec, topology=settings, dtype=torch.float32, overrides={})
        parameters = global_parameters(build_model(spec, config, attention="torch"))
    return {name: tuple(tensor.shape) for name, tensor in parameters.items()}


def check_numbers(source: Source, tensors: WatchedTensors) -> None:
    """Raise UserError for a number that is not finite, also in what the model leaves out, and for a dtype that config.json does not say."""
    for unit in source.units():
        for told in unit.tensors:
            if told.name not in tensors.read_names:
                tensors.read(told.name, told.shape)
    if tensors.problem is not None:
        raise UserError(tensors.problem)
    most = most_common_dtype(source)
    named = str(config_dtype(source.config)).removeprefix("torch.")
    if most != named and ("dtype" in source.config or "torch_dtype" in source.config) and not isinstance(source, MegatronSource):
        raise UserError(f"config.json in {source.directory} says {named}, the weights in {source.path} are {most}; correct the file")


def _not_finite(name: str, tensor: Tensor, source: Source) -> str | None:
    bad = num_not_finite(tensor)
    return f"{name} in {source.path} has {bad:,} of {tensor.numel():,} numbers not finite; take another checkpoint" if bad else None
