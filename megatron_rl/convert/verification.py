"""Checks of a checkpoint without running the model: files, names, shapes, dtypes, numbers, compared with config.json."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.check import Check
from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.megatron import MegatronWeights, is_torch_dist
from megatron_rl.checkpoints.model_files import config_dtype
from megatron_rl.checkpoints.stored_weights import (
    StoredWeights,
    check_names,
    check_place,
    in_order,
    load_parameter,
    may_be_left_out,
    num_not_finite,
    open_weights,
)
from megatron_rl.config.settings import TopologySettings
from megatron_rl.config.yaml_text import by_path
from megatron_rl.convert.conversion import most_common_dtype
from megatron_rl.convert.tensor_comparison import compare_tensors
from megatron_rl.errors import UserError
from megatron_rl.models.build import build_model
from megatron_rl.models.config_json import read_object
from megatron_rl.models.hf_weights import global_parameters, held_name
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Rule, Sharding, parameter_shape, rules
from megatron_rl.planning.meta import rank_without_memory
from megatron_rl.system.device import local_device, prepare_megatron
from megatron_rl.system.files import MANIFEST
from megatron_rl.training.topology import Topology
from megatron_rl.weights.changes import Changes

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


def verify(path: Path, *, config: Path | None = None, equal_to: Path | None = None) -> Iterator[Check]:
    """Yield a check of every promise of the checkpoint at `path`, the last being equality with that at `equal_to`.

    Raises UserError before the first promise when `path` has no checkpoint, and when the other cannot be read.
    """
    check_place(path)
    if equal_to is None:
        yield from _promises(path, config)
        return
    with closing(_open(equal_to, None)) as sound:
        for directory in sound.places:
            manifest.check(directory, "weights")
        broken = None
        for found in _promises(path, config):
            broken = broken or (found.promise if found.level == "broken" and found.promise in (TOGETHER, PARAMETERS) else None)
            yield found
        yield _checked(SAME, lambda: _check_equal(path, config, sound)) if broken is None else _resting_on(broken, SAME)


def _promises(path: Path, config: Path | None) -> Iterator[Check]:
    yield from _of_manifests(path, foreign=config is not None)
    try:
        source = _open(path, config)
    except UserError as error:
        yield Check(TOGETHER, "broken", str(error))
        yield from (_resting_on(TOGETHER, promise) for promise in (CONFIG, TOKENIZER, PARAMETERS, PADDING, NUMBERS))
        return
    with closing(source):
        yield Check(TOGETHER)
        yield _of_config(source)
        yield _of_tokenizer(source)
        tensors = WatchedTensors(source)
        parameters = _checked(PARAMETERS, lambda: check_parameters(tensors))
        yield parameters
        if parameters.level == "broken":
            yield from (_resting_on(PARAMETERS, promise) for promise in (PADDING, NUMBERS))
            return
        yield _checked(PADDING, lambda: check_padding(source))
        yield _checked(NUMBERS, lambda: check_numbers(tensors))


def _checked(promise: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except UserError as error:
        return Check(promise, "broken", str(error))
    return Check(promise)


def _resting_on(broken: str, promise: str) -> Check:
    return Check(promise, "skipped", f'because "{broken}" is broken')


def _open(path: Path, config: Path | None) -> StoredWeights:
    """Open the checkpoint at `path`, quantised tensors in the dtype of config.json. Raises UserError for another model's tensors."""
    weights = open_weights(path, config=config, dequantised_dtype=None)
    check_names(weights, weights.spec)
    return weights


def _check_equal(path: Path, config: Path | None, sound: StoredWeights) -> None:
    """Raise UserError unless the checkpoint at `path` has the model and the numbers of `sound`.

    Layers of multi-token prediction may be in one of the two alone. Without a manifest, only this check shows damage
    of fitting shape: a bit, a transposed square, a layer in the place of another, another rope base.
    """
    with closing(_open(path, config)) as source:
        spec = dataclasses.replace(source.spec, num_mtp_layers=sound.spec.num_mtp_layers)
        for name, got, needed in _differences(spec, json.loads(json.dumps(dataclasses.asdict(sound.spec)))):
            words = f"config.json in {source.directory} gives {name} = {got}, that in {sound.directory} {needed}"
            raise UserError(f"{words}; take the config.json that is meant")
        names = source.names()
        found = compare_tensors(sound, source, Changes(), {name: rule for name, rule in in_order(sound).items() if rule or name in names})
    if found.wrong:
        more = f"; {len(found.wrong) - 1:,} more differ" if len(found.wrong) > 1 else ""
        raise UserError(f"{found.wrong[0]}{more}; take the checkpoint that is meant")


def _of_manifests(path: Path, *, foreign: bool) -> Iterator[Check]:
    """Yield a check of the manifest of the directory, or of both of a saved step; a `foreign` checkpoint has none."""
    if not is_torch_dist(path / "megatron"):
        yield _of_manifest(FILES, path, foreign=foreign)
        return
    for name in ("megatron", "hf"):
        if (path / name).is_dir():
            yield _of_manifest(f"{FILES} in {name}", path / name, foreign=foreign)


def _of_manifest(promise: str, place: Path, *, foreign: bool) -> Check:
    try:
        has_hashes = bool(manifest.read(place).get("files"))
    except UserError as error:
        return Check(promise, "broken", str(error))
    of_run = place.name == "megatron" and (place.parent / "hf" / "config.json").exists()
    if has_hashes:
        return _checked(promise, lambda: manifest.check(place, "state" if of_run else "model"))
    if is_torch_dist(place) and (of_run or (place / "config.json").exists()) and not foreign:
        missing = f"{place} has no {MANIFEST} with hashes, which our own format always has; copy the checkpoint again"
        return Check(promise, "broken", missing)
    return Check(promise, "skipped", _NO_MANIFEST)


def _of_config(source: StoredWeights) -> Check:
    try:
        written = manifest.read(source.directory).get("model")
    except UserError:
        return _resting_on(FILES, CONFIG)
    if written is None:
        return Check(CONFIG, "skipped", _NO_MANIFEST)
    for name, got, needed in _differences(source.spec, written):
        words = f"config.json in {source.directory} gives {name} = {got}, the weights were written with {needed}"
        return Check(CONFIG, "broken", f"{words}; restore the config.json")
    return Check(CONFIG)


def _differences(spec: ModelSpec, written: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield fields of `spec` with another value in `written`, with both values; lists, which follow from others, last."""
    now, then = by_path(json.loads(json.dumps(dataclasses.asdict(spec)))), by_path(written)
    names = sorted(now.keys() | then.keys(), key=lambda name: (isinstance(now.get(name), list), name))
    return ((name, now.get(name), then.get(name)) for name in names if now.get(name) != then.get(name))


def _of_tokenizer(source: StoredWeights) -> Check:
    file = source.directory / "tokenizer.json"
    if not file.exists():
        return Check(TOKENIZER, "skipped", f"there is no {file.name}")
    return _checked(TOKENIZER, lambda: check_tokenizer(file, source))


def check_tokenizer(file: Path, source: StoredWeights) -> None:
    """Raise UserError when the tokenizer of `file` has a token without a row in the embedding."""
    content = read_object(file, fix="take the tokenizer.json of these weights")
    try:
        vocabulary = content.get("model", {}).get("vocab", {})
        ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
        ids += [token["id"] for token in content.get("added_tokens", [])]
        beyond = bool(ids) and max(ids) >= source.spec.vocab_size
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no tokenizer of the tokenizers library ({error}); take the tokenizer.json of these weights") from error
    if beyond:
        raise UserError(
            f"the tokenizer in {source.directory} has token {max(ids)}, config.json's vocabulary ends at "
            f"{source.spec.vocab_size - 1}; use the config.json and the tokenizer of these weights"
        )


class WatchedTensors:
    """The tensors of `source` on their way into a model, the names read so far and the first non-finite tensor."""

    def __init__(self, source: StoredWeights) -> None:
        self.source = source
        self.read_names: set[str] = set()
        self.problem: str | None = None

    def read(self, name: str) -> Tensor:
        """Return one tensor, of any shape. Raises UserError for a damaged file."""
        tensor = self.source.read(name)
        self.read_names.add(name)
        bad = num_not_finite(tensor)
        if bad and self.problem is None:
            self.problem = f"{name} in {self.source.path} has {bad:,} of {tensor.numel():,} numbers not finite; take another checkpoint"
        return tensor


def check_parameters(tensors: WatchedTensors) -> None:
    """Raise UserError unless `tensors` fill each number of the model, and each is used or left out by rule.

    The model is built without memory. Parameters are made one at a time, filled with a mark absent from all
    checkpoints, and loaded in the same way as in a run. Unwritten numbers keep the mark.
    """
    source, spec = tensors.source, tensors.source.spec
    shapes = model_shapes(spec)
    for rule in rules(spec):
        name = held_name(rule, shapes)
        if name not in shapes and not rule.exported:
            continue
        shape = shapes.pop(name, None)
        if shape != parameter_shape(rule):
            words = f"{name} of shape {parameter_shape(rule)}"
            raise UserError(f"the weight table makes {words}, which the model does not have; report this as a bug")
        _loaded_over_marks(shape, rule, source, tensors.read, tp_rank=0, tp=1)
    if shapes:
        raise UserError(f"the weight table makes nothing of {next(iter(shapes))}, which the model has; report this as a bug")
    unread = sorted(name for name in source.names() - tensors.read_names if not may_be_left_out(name, spec))
    if unread:
        raise UserError(f"{unread[0]} in {source.path} goes into no parameter of the model; report this as a bug")


def _loaded_over_marks(
    shape: tuple[int, ...], rule: Rule, source: StoredWeights, read: Callable[[str], Tensor], *, tp_rank: int, tp: int
) -> Tensor:
    """Return the share [...] of rank `tp_rank` of `tp` of a parameter. Raises UserError for unwritten numbers."""
    marks = torch.full(shape, _UNWRITTEN, dtype=torch.int32)
    parameter = marks.view(torch.float32)
    load_parameter(parameter, rule, source.spec, read, tp_rank=tp_rank, tp=tp)
    unwritten = int((marks == _UNWRITTEN).sum())
    if unwritten:
        words = f"{unwritten:,} of {marks.numel():,} numbers of {rule.megatron}"
        raise UserError(f"nothing in {source.path} wrote {words}; report this as a bug")
    return parameter


def check_padding(source: StoredWeights) -> None:
    """Raise UserError unless the rows padding a vocabulary for tensor parallel ranks are zero.

    Rows are checked as loaded by as many ranks as needed to have padding, and as stored in a run's checkpoint, where
    they stay zero because no loss depends on them. Another program's, without a manifest, may hold any numbers.
    """
    spec = source.spec
    tp = next(size for size in itertools.count(2) if spec.vocab_size % size)
    rows = spec.padded_vocab_size(tp) // tp
    for rule in (rule for rule in rules(spec) if rule.sharding is Sharding.VOCABULARY and rule.exported):
        shape = (rows, *rule.tensors[0].shape[1:])
        *_, last = (_loaded_over_marks(shape, rule, source, source.read, tp_rank=rank, tp=tp) for rank in range(tp))
        if last[spec.vocab_size - tp * rows :].count_nonzero():
            raise UserError(f"{rule.megatron} is loaded with padded rows that are not zero by rank {tp - 1} of {tp}; report this as a bug")
        if isinstance(source, MegatronWeights) and (source.path / MANIFEST).is_file():
            padding = source.padding(rule)
            if wrong := int(padding.count_nonzero()):
                raise UserError(
                    f"{rule.megatron} of checkpoint {source.path} has {wrong:,} numbers that are not zero in its {len(padding):,} rows "
                    f"behind the vocabulary of {spec.vocab_size:,} tokens; use the config.json of these weights, or take another checkpoint"
                )


def model_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model by name, from a model without memory."""
    settings = TopologySettings()
    prepare_megatron(local_device())
    with rank_without_memory(Topology.of(settings), rank=0, fused=False):
        config = transformer_config(spec, topology=settings, dtype=torch.float32, overrides={})
        parameters = global_parameters(build_model(spec, config, attention="torch"))
    return {name: tuple(tensor.shape) for name, tensor in parameters.items()}


def check_numbers(tensors: WatchedTensors) -> None:
    """Raise UserError for a non-finite number, also outside of the model, and for another dtype than config.json's."""
    source = tensors.source
    for name in sorted(source.names() - tensors.read_names):
        tensors.read(name)
    if tensors.problem is not None:
        raise UserError(tensors.problem)
    most, named = (str(dtype).removeprefix("torch.") for dtype in (most_common_dtype(source), config_dtype(source.config)))
    if most != named and ("dtype" in source.config or "torch_dtype" in source.config) and not isinstance(source, MegatronWeights):
        raise UserError(f"config.json in {source.directory} says {named}, the weights in {source.path} are {most}; correct the file")
