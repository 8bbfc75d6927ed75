"""The manifest of a checkpoint: size and BLAKE3 of each file, checked before any read.

BLAKE3 is as strong as SHA-256 and four to five times as fast on one core. `b3sum` prints the same digits.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal

from blake3 import blake3

from megatron_rl.errors import DamagedCheckpointError, UserError
from megatron_rl.system.files import MANIFEST, sync, write_atomic

Entry = Mapping[str, Any]
"""Facts about a file: its `bytes`, and its hash in hexadecimal digits as `blake3`."""
Kind = Literal["state", "sizes", "model", "weights", "index"]
STALE: Final = "stale_once_trained"
"""Key of a manifest: names of tensors that training leaves alone, so that they fit the others less and less."""
_INDEX = (".metadata", "metadata.json")
_ONLY_WEIGHTS = (".safetensors", ".safetensors.index.json", ".distcp", ".metadata")
"""Endings of files that only weights have: some programs would read one beside those of the manifest."""
_WEIGHTS = (*_ONLY_WEIGHTS, "metadata.json", "common.pt")
"""Endings of the files that weights are read from. A model's other files may be changed on purpose."""
_NUM_THREADS = 2


def entry_of(path: Path) -> Entry:
    """Return the entry of the file at `path`."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, blake3)  # type: ignore[arg-type]  # by pieces that stay in the cache, 256 KiB
    return {"bytes": path.stat().st_size, "blake3": digest.hexdigest()}


def entries_of(files: Iterable[Path]) -> dict[str, Entry]:
    """Return the entries of `files` by name. Each is hashed and synced to the disk while the iterator writes the next one."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        started = [(file.name, pool.submit(sync, file), pool.submit(entry_of, file)) for file in files]
        for _, synced, _ in started:
            synced.result()
        return {name: hashed.result() for name, _, hashed in started}


def write(directory: Path, *, known: Mapping[str, Entry] | None = None, **facts: Any) -> None:
    """Write the manifest of all files below `directory`, with `facts` beside; files of `known` entries are not read.

    Raises UserError when a known file is missing or the manifest cannot be written.
    """
    known = known or {}
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {name: known.get(name) or entry_of(directory / name) for name in names}
    missing = sorted(known.keys() - files.keys())
    if missing:
        raise UserError(
            f"{directory / missing[0]}, which a rank has written, is not there for rank 0; give a directory that all nodes share"
        )
    write_atomic(directory / MANIFEST, json.dumps({**facts, "files": files}, indent=1) + "\n")


def read(directory: Path) -> dict[str, Any]:
    """Return the manifest of `directory`, empty without one or with one of another program. Raises UserError."""
    file = directory / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for name, entry in content["files"].items() if isinstance(content, dict) and "files" in content else ():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names {name}, a file elsewhere")
            if not isinstance(entry["bytes"], int) or not isinstance(entry["blake3"], str):
                raise ValueError(f"it has no size and hash of {name}")
        if isinstance(content, dict) and not isinstance(content.get("model", {}), dict):
            raise ValueError("its model is no JSON object")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        words = f"{directory} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
        raise DamagedCheckpointError(f"{words}; {_advice('weights')}") from error
    return content if isinstance(content, dict) else {}


def check(directory: Path, kind: Kind, *, share: tuple[int, int] = (0, 1)) -> None:
    """Raise DamagedCheckpointError when a file of `kind` differs from the manifest; only a `share` (index, number) is hashed.

    "state" is every file, and the manifest is required; "sizes" is the same without hashes. "model" is a model's
    files except config.json, "weights" the files with weights, "index" the files with the places of tensors. A
    model without a manifest passes.
    """
    files: Mapping[str, Entry] | None = read(directory).get("files")
    whole = kind in ("state", "sizes")
    if files is None:
        if whole:
            raise DamagedCheckpointError(f"{directory} is not a complete checkpoint: its {MANIFEST} has no files; {_advice(kind)}")
        return
    if kind != "index":
        _check_strangers(directory, files, whole=whole)
    if kind == "model":
        files = {name: entry for name, entry in files.items() if name != "config.json"}
    elif not whole:
        files = {name: entry for name, entry in files.items() if name.endswith(_INDEX if kind == "index" else _WEIGHTS)}
    for name, entry in sorted(files.items()):
        if not (directory / name).is_file():
            raise _damaged(directory, f"{name} is in its manifest, but not there", kind)
        size = (directory / name).stat().st_size
        if size != entry["bytes"]:
            raise _damaged(directory, f"{name} has {size:,} bytes, its manifest says {entry['bytes']:,}", kind)
    hashed = () if kind == "sizes" else sorted(files, key=lambda name: (-files[name]["bytes"], name))[share[0] :: share[1]]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for name, entry in zip(hashed, pool.map(entry_of, (directory / name for name in hashed)), strict=True):
            if entry != files[name]:
                raise _damaged(directory, f"the content of {name} is not that of its manifest", kind)


def weight_hashes(directory: Path, *, share: tuple[int, int]) -> list[str]:
    """Return the BLAKE3 of a share (index, number) of the files with weights, from the manifest where there is one."""
    known = read(directory).get("files", {})
    names = [name for name in known or map(attrgetter("name"), directory.iterdir()) if name.endswith((".safetensors", ".distcp"))]
    return [(known.get(name) or entry_of(directory / name))["blake3"] for name in sorted(names)[share[0] :: share[1]]]


def _damaged(directory: Path, words: str, kind: Kind) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {directory} is damaged: {words}; {_advice(kind)}")


def _advice(kind: Kind) -> str:
    advice = "copy it again from where it came"
    return advice if kind in ("state", "sizes") else f"{advice}, or remove its {MANIFEST} if the change is yours"


def _check_strangers(directory: Path, files: Mapping[str, Entry], *, whole: bool) -> None:
    """Raise DamagedCheckpointError for a file, of a model a file of weights, that is absent from the manifest."""
    places = {directory, *((directory / name).parent for name in files)}
    for file in sorted(file for place in places for file in place.iterdir() if file != directory / MANIFEST):
        name = str(file.relative_to(directory))
        if name in files:
            continue
        changed = f"checkpoint {directory} is not as it was saved: {name} is there, but not in its"
        if whole:
            raise DamagedCheckpointError(f"{changed} manifest; remove it, or {_advice('state')}")
        # Programs read no other hidden file, and macOS leaves one beside every file on disks of other systems.
        if name.endswith(_ONLY_WEIGHTS) and not (file.name.startswith(".") and file.name != ".metadata"):
            raise DamagedCheckpointError(
                f"{changed} {MANIFEST}, and programs differ in whether they read it; remove it, or {MANIFEST} if the change is yours"
            )


def changed_texts(directory: Path) -> list[str]:
    """Return the names of files beside the weights with another content than in the manifest. Raises UserError."""
    files = read(directory).get("files", {})
    present = (name for name in files if not name.endswith(_WEIGHTS) and (directory / name).is_file())
    return sorted(name for name in present if entry_of(directory / name) != files[name])
