"""The model directory of the engines: model.path where readable, else made in the run."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.hugging_face import save_hf
from megatron_rl.checkpoints.model_files import describe_hf
from megatron_rl.checkpoints.stored_weights import check_names, engines_read, in_order, names_code, open_weights
from megatron_rl.errors import UserError
from megatron_rl.models.weight_table import as_stored
from megatron_rl.system.files import check_room, partial_path
from megatron_rl.system.leftovers import scratch_directory
from megatron_rl.training.trained_model import DTYPES
from megatron_rl.weights.changes import Changes

DESCRIPTION, WEIGHTS = "engine-model", "engine-weights"
"""In the run directory: a model without weights or with links to them, and one with weights for the time of an evaluation."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The Hugging Face directory of the engines, with weights to load unless `has_weights` is False."""

    path: Path
    has_weights: bool = True


def planned_model(model: Path, *, directory: Path, sglang: Mapping[str, Any]) -> EngineModel:
    """Return the model of a training run's engines: model.path, or a description in place of it.

    A description is needed where engines cannot read model.path, or might run code named there.
    Engines start without weights, because the first sync replaces all weights. Reading a large
    model in every engine would take as long as the ranks' start at the same time.

    Raises UserError when the user's own server arguments contradict the choice.
    """
    if "load_format" in sglang:
        raise UserError(
            f"rollout.sglang.load_format is {sglang['load_format']}, but the engines of a training run load no weights: "
            "the first sync gives them the trainer's; remove it"
        )
    plain = engines_read(model) and not names_code(model)
    return EngineModel(model if plain else directory / DESCRIPTION, has_weights=False)


def make_model(path: Path, *, directory: Path, sglang: Mapping[str, Any], dtype: str, note: Callable[[str], None]) -> EngineModel:
    """Make what `planned_model` plans, for weights of `dtype`, and report it to `note`. Raises UserError."""
    model = planned_model(path, directory=directory, sglang=sglang)
    if model.path != path:
        describe_hf(model.path, source=path, dtype=DTYPES[dtype])
        cause = "run no code (auto_map) of" if engines_read(path) else "cannot read the weights in"
        note(f"engines {cause} {path}: they start without, from {model.path}, and get the trainer's")
    return model


@contextmanager
def evaluated_model(path: Path, *, directory: Path, dtype: str, note: Callable[[str], None]) -> Iterator[EngineModel]:
    """Give engines without a trainer the start weights of a run. A copy is removed at the end.

    Raises UserError when the disk of the run directory has too little room, or when weights differ
    from their manifest.
    """
    readable = engines_read(path)
    manifest.check(path, "weights")
    if readable and not names_code(path):
        yield EngineModel(path)
        return
    # Another evaluation may go on in the same directory.
    copy = directory / f"{WEIGHTS}-{os.getpid()}"
    made = (copy, partial_path(copy))
    with scratch_directory() as scratch:
        # After a kill of this process the next start on this machine removes the copy.
        scratch.note(place.absolute() for place in made)
        try:
            if readable:
                describe_hf(copy, source=path, dtype=DTYPES[dtype], linked=True)
                note(f"config.json in {path} names code (auto_map), which is not run: engines start on {copy}, the same without it")
            else:
                note(f"engines cannot read the weights in {path}: they are converted to {dtype} in {copy}")
                _write_plain(copy, path, dtype=DTYPES[dtype])
            yield EngineModel(copy)
        finally:
            for place in made:
                shutil.rmtree(place, ignore_errors=True)


def _write_plain(path: Path, model: Path, *, dtype: torch.dtype) -> None:
    """Write the weights of `model`, without layers of multi-token prediction, as plain safetensors of `dtype` in the directory `path`."""
    with closing(open_weights(model, dequantised_dtype=dtype)) as weights:
        check_names(weights, weights.spec)
        built = {name: rule for name, rule in in_order(weights).items() if rule is not None}
        check_room(path, sum(math.prod(weights.shape(name)) for name in built) * dtype.itemsize)
        changed = (made for name, rule in built.items() for made in Changes(dtype).apply(name, weights.read(name), rule))
        save_hf(path, as_stored(changed), source=model, durable=False)
