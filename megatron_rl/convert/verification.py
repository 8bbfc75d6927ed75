"""What can be said of a checkpoint without running it: files, names, shapes, dtypes and numbers, and whether they fit its config.json."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.settings import TopologySettings
from megatron_rl.convert.sources import MegatronSource, Source, config_dtype, open_source
from megatron_rl.device import local_device, prepare_megatron
from megatron_rl.errors import UserError
from megatron_rl.files import MANIFEST
from megatron_rl.models.build import build_model
from megatron_rl.models.hf_weights import global_parameters, held_name
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import parameter_shape, rules
from megatron_rl.planning.meta import rank_without_memory
from megatron_rl.training.checkpoint_manifest import has_content
from megatron_rl.training.topology import Topology


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise of a checkpoint, and why it is broken, None where it holds."""

    promise: str
    problem: str | None = None


def verify(path: Path, *, config: Path | None = None) -> Iterator[Finding]:
    """Every promise of the checkpoint at `path`, one after the other; after a broken one that the others rest on there are no more."""
    yield _checked_manifest(path)
    try:
        source = open_source(path, config=config)
    except UserError as error:
        yield Finding("files, names and config.json belong together", str(error))
        return
    with closing(source):
        yield Finding("files, names and config.json belong together")
        yield _checked("config.json is the one that the weights were written with", lambda: check_written_spec(path, source.spec))
        yield _checked("the tokenizer's tokens are in the vocabulary", lambda: check_tokenizer(source))
        yield _checked("every parameter of the model is made of its tensors", lambda: check_parameters(source.spec))
        yield _checked("shapes fit and numbers are finite", lambda: check_numbers(source))


def _checked(promise: str, check: Callable[[], None]) -> Finding:
    try:
        check()
    except UserError as error:
        return Finding(promise, str(error))
    return Finding(promise)


def _checked_manifest(path: Path) -> Finding:
    """Of a converted directory or of a saved step, which has its manifest beside Megatron's files."""
    promise = "files are those of the manifest"
    try:
        # What a run exports has a manifest of what is stale in it, without hashes.
        places = [place for place in (path, path / "megatron") if "files" in _manifest_of(place)]
    except UserError as error:
        return Finding(promise, str(error))
    if not places:
        return Finding("there is no manifest whose hashes the files could be compared with")
    return _checked(promise, lambda: check_manifest(places[0]))


def check_manifest(path: Path) -> None:
    """Raise UserError when a file of the manifest in `path` is missing, cut off or changed."""
    for name, written in _manifest_of(path)["files"].items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{path} lacks the file {name}; copy the checkpoint again")
        if name == "config.json":
            # Compared field by field below.
            continue
        size = file.stat().st_size
        if size != written["bytes"]:
            cut = "is cut off: it has" if size < written["bytes"] else "was changed: it has"
            raise UserError(f"{file} {cut} {size:,} bytes, the manifest says {written['bytes']:,}; copy the checkpoint again")
        if not has_content(file, written):
            raise UserError(f"{file} was changed since it was written: its hash is not the manifest's; copy the checkpoint again")


def _manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of the directory `path`, empty where there is none. Raises UserError."""
    file = path / MANIFEST
    if not file.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}); copy the checkpoint again") from error
    return content


def check_written_spec(path: Path, spec: ModelSpec) -> None:
    """Raise UserError when config.json describes another model than the one that was written, also one of the same shapes."""
    written = _manifest_of(path).get("model")
    if written is None:
        return
    now = json.loads(json.dumps(dataclasses.asdict(spec)))
    for name in sorted(_flat(now).keys() | _flat(written).keys()):
        got, needed = _flat(now).get(name), _flat(written).get(name)
        if got != needed:
            raise UserError(f"config.json in {path} gives {name} = {got}, the weights were written with {needed}; restore the config.json")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def check_tokenizer(source: Source) -> None:
    """Raise UserError when the tokenizer has a token that the embedding has no row for."""
    file = source.directory / "tokenizer.json"
    if not file.exists():
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    ids += [token["id"] for token in content.get("added_tokens", [])]
    if ids and max(ids) >= source.spec.vocab_size:
        raise UserError(
            f"the tokenizer in {source.directory} has token {max(ids)}, config.json's vocabulary ends at "
            f"{source.spec.vocab_size - 1}; use the config.json and the tokenizer of these weights"
        )


def check_parameters(spec: ModelSpec) -> None:
    """Raise UserError when a parameter of the model, built without memory, is in no rule of the weight table, or the other way round."""
    settings = TopologySettings()
    prepare_megatron(local_device())
    with rank_without_memory(Topology.of(settings), rank=0, fused=False):
        config = transformer_config(spec, topology=settings, dtype=torch.float32, overrides={})
        parameters = global_parameters(build_model(spec, config, attention="torch"))
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    for rule in rules(spec):
        name = held_name(rule, shapes)
        if name not in shapes and not rule.exported:
            continue
        made = parameter_shape(rule)
        if shapes.pop(name, None) != made:
            raise UserError(f"the weight table makes {name} of shape {made}, which the model does not have; report this as a bug")
    if shapes:
        raise UserError(f"the weight table makes nothing of {next(iter(shapes))}, which the model has; report this as a bug")


def check_numbers(source: Source) -> None:
    """Raise UserError for a wrong shape, a number that is not finite, and a dtype that is not the one of config.json."""
    num_bytes: dict[str, int] = {}
    for unit in source.units():
        for told, tensor in zip(unit.tensors, source.read(unit), strict=True):
            if tuple(tensor.shape) != told.shape:
                raise UserError(f"{told.name} in {source.path} is {tuple(tensor.shape)}, needs {told.shape}; copy it again")
            _check_finite(told.name, tensor, source)
            num_bytes[told.dtype] = num_bytes.get(told.dtype, 0) + told.num_bytes
    most = max(num_bytes, key=num_bytes.__getitem__)
    named = str(config_dtype(source.config)).removeprefix("torch.")
    if most != named and ("dtype" in source.config or "torch_dtype" in source.config) and not isinstance(source, MegatronSource):
        raise UserError(f"config.json in {source.directory} says {named}, the weights in {source.path} are {most}; correct the file")


def _check_finite(name: str, tensor: Tensor, source: Source) -> None:
    if tensor.is_floating_point() and not math.isfinite(tensor.float().sum().item()):
        bad = int((~torch.isfinite(tensor.float())).sum())
        if bad:
            raise UserError(f"{name} in {source.path} has {bad:,} of {tensor.numel():,} numbers not finite; take another checkpoint")
