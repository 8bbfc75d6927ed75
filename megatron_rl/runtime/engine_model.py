"""The directory that engines are started on: model.path where they can read it, else one that is made for them in the run directory."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.settings import Settings
from megatron_rl.device import quiet_megatron_imports
from megatron_rl.errors import UserError
from megatron_rl.files import partial_path
from megatron_rl.leftovers import scratch_directory

with quiet_megatron_imports():
    from megatron_rl.convert.conversion import Options, convert
    from megatron_rl.models.checkpoint_manifest import check_weights_alone
    from megatron_rl.models.hf_files import describe_hf
    from megatron_rl.models.stored_weights import engines_read, names_code
    from megatron_rl.training.trained_model import DTYPES

DESCRIPTION, WEIGHTS = "engine-model", "engine-weights"
"""In the run directory: a model without weights or with links to them, and one with weights for the time of an evaluation."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What engines are started on: a Hugging Face directory, which has no weights where they come by the first sync."""

    path: Path
    has_weights: bool = True


def planned_model(settings: Settings) -> EngineModel:
    """What the engines of a training run are started on: model.path, unless they cannot read it or might run code that it names.

    Raises UserError when the user's own arguments of the server contradict it.
    """
    if engines_read(settings.model.path):
        return EngineModel(settings.run.directory / DESCRIPTION if names_code(settings.model.path) else settings.model.path)
    if "load_format" in settings.rollout.sglang:
        raise UserError(
            f"rollout.sglang.load_format is {settings.rollout.sglang['load_format']}, but engines cannot read the weights in "
            f"{settings.model.path}: they get the trainer's; remove it, or give model.path plain safetensors (`megatron-rl convert`)"
        )
    return EngineModel(settings.run.directory / DESCRIPTION, has_weights=False)


def make_model(settings: Settings, *, dtype: str, note: Callable[[str], None]) -> EngineModel:
    """What the engines of a training run are started on, with weights of `dtype`; made if need be, of which `note` is told.

    Where they cannot read model.path they start without weights. The run gives them the trainer's before anything is generated, and the
    parity probe shows one that was not replaced. Raises UserError.
    """
    model = planned_model(settings)
    if not model.has_weights:
        describe_hf(model.path, source=settings.model.path, dtype=DTYPES[dtype])
        note(f"engines cannot read the weights in {settings.model.path}: they start without, from {model.path}, and get the trainer's")
    elif model.path != settings.model.path:
        _link(settings, model.path, dtype=dtype, note=note)
    return model


def _link(settings: Settings, path: Path, *, dtype: str, note: Callable[[str], None]) -> None:
    """Make `path`, the model of model.path with links to its weights and without the code that its config.json names."""
    describe_hf(path, source=settings.model.path, dtype=DTYPES[dtype], linked=True)
    note(f"config.json in {settings.model.path} names code (auto_map), which is not run: engines start on {path}, the same without it")


@contextmanager
def evaluated_model(settings: Settings, *, dtype: str, note: Callable[[str], None]) -> Iterator[EngineModel]:
    """What engines without a trainer are started on: the weights that a run would start from. What was made for it goes at the end.

    Raises UserError when the disk of the run directory has no room for it, or when weights are not those of their manifest.
    """
    readable = engines_read(settings.model.path)
    if readable:
        # A conversion looks by itself.
        check_weights_alone(settings.model.path)
    if readable and not names_code(settings.model.path):
        yield EngineModel(settings.model.path)
        return
    # Another evaluation may go on in the same directory.
    path = settings.run.directory / f"{WEIGHTS}-{os.getpid()}"
    partial = partial_path(path)
    made = (path, partial, partial.with_name(f"{partial.name}.lock"))
    with scratch_directory() as scratch:
        # Where this process is killed the next start on this machine removes them.
        scratch.note(place.absolute() for place in made)
        try:
            if readable:
                _link(settings, path, dtype=dtype, note=note)
            else:
                note(f"engines cannot read the weights in {settings.model.path}: they are converted to {dtype} in {path}")
                convert(settings.model.path, path, Options(to="hf", dtype=DTYPES[dtype], drop_mtp=True))
            yield EngineModel(path)
        finally:
            for place in made[:2]:
                shutil.rmtree(place, ignore_errors=True)
            made[2].unlink(missing_ok=True)
