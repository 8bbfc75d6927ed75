"""A checkpoint in which somebody has planted code: nothing of it runs, and the file is named as what it is."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.errors import UserError
from megatron_rl.files import MANIFEST
from megatron_rl.models.checkpoint_manifest import write_manifest
from megatron_rl.models.checkpoint_pickles import RecordsUnpickler

SUPERVISED = {"policy_loss": "sft"}


class Payload:
    """Pickled, it makes the file `trace` when it is loaded by an ordinary unpickler."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mknod, (str(self._trace),)


def plant(file: Path, trace: Path) -> None:
    """Put the payload where the file's reader finds it first."""
    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(Payload(trace)))
    elif file.name == "common.pt":
        torch.save(Payload(trace), file)
    else:
        plant_object(file, trace)


def plant_object(file: Path, trace: Path) -> None:
    """Replace the generator's state, an object in a .distcp file, as a forger would who also writes its place into .metadata."""
    metadata = FileSystemReader(file.parent).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn.startswith("rng"))
    content = io.BytesIO()
    torch.save(Payload(trace), content)
    place = metadata.storage_data[index]
    assert place.relative_path == file.name
    place.offset, place.length = file.stat().st_size, len(content.getvalue())
    with file.open("ab") as end:
        end.write(content.getvalue())
    (file.parent / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("unsafe", [False, True], ids=["", "with torch's unsafe switch"])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_planted_code_is_not_run(
    make_trainer: Callable[..., Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    unsafe: bool,
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    directory, trace = tmp_path / "checkpoint", tmp_path / "trace"
    trainer.save(directory)
    trainer.load(directory)
    if unsafe:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    plant(directory / name, trace)
    # A forger who can write there can write the manifest, too.
    (directory / MANIFEST).unlink()
    write_manifest(directory)
    with pytest.raises(UserError, match="holds more than the records of a checkpoint"):
        trainer.load(directory)
    assert not trace.exists()


def test_every_file_of_a_checkpoint_is_known(make_trainer: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A file that another release adds has to be looked at: it may be one more pickle."""
    make_trainer(tiny_model(), SUPERVISED).save(tmp_path / "checkpoint")
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {
        ".metadata",
        "common.pt",
        "metadata.json",
        "__0_0.distcp",
        MANIFEST,
    }


@pytest.mark.parametrize("name", ["torch.hub\nload", "os\nsystem", "builtins\neval", "torch.serialization\nload", "torch\nload"])
def test_no_function_is_found_by_its_name(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no record of a checkpoint"):
        RecordsUnpickler(io.BytesIO(f"c{name}\n.".encode())).load()


def test_the_format_of_the_checkpoint_is_ours(make_trainer: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    trainer.save(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "metadata.json"
    file.write_text(file.read_text().replace("torch_dist", "zarr"))
    (tmp_path / "checkpoint" / MANIFEST).unlink()
    write_manifest(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="has the format 'zarr', needs 'torch_dist'"):
        trainer.load(tmp_path / "checkpoint")
