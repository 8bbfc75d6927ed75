"""The manifest of a checkpoint: size and SHA-256 of each of its files, looked at before any of them is read.

Every rank hashes what it writes, while it writes it, and reads a share of the files for the check, so that a large checkpoint takes no
longer than its bytes on one rank do.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.files import MANIFEST, sync_file

_PART = "manifest-part-{rank}.json"
_CHUNK_BYTES = 2**22
_ADVICE = "resume from another one, or copy it again from where it came"


def sha256(path: Path) -> str:
    """The hash of a file's content, in hexadecimal digits."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def write_part(directory: Path, hashes: Mapping[str, str], *, rank: int) -> None:
    """Note the hashes, by name, of the files of `directory` that `rank` has written."""
    entries = {name: _entry(directory / name, hashed) for name, hashed in hashes.items()}
    (directory / _PART.format(rank=rank)).write_text(json.dumps(entries))


def _entry(path: Path, hashed: str) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": hashed}


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files in `directory`: those of the parts, which go, and the others, which are hashed now."""
    known: dict[str, dict[str, Any]] = {}
    for part in directory.glob(_PART.format(rank="*")):
        known |= json.loads(part.read_text())
        part.unlink()
    known |= {path.name: _entry(path, sha256(path)) for path in directory.iterdir() if path.name not in known}
    (directory / MANIFEST).write_text(json.dumps({"files": dict(sorted(known.items()))}, indent=1))
    sync_file(directory / MANIFEST)


def check_manifest(directory: Path, *, share: int, num_shares: int) -> None:
    """Raise UserError when a file is missing, too many or has another size, or when one of this `share` of them has other content."""
    files = _read(directory)
    present = {path.name for path in directory.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() ^ present):
        what = "is in its manifest, but not there" if name in files else "is there, but not in its manifest"
        raise UserError(f"checkpoint {directory} is not as it was saved: {name} {what}; {_ADVICE}")
    for name, entry in files.items():
        size = (directory / name).stat().st_size
        if size != entry["bytes"]:
            raise UserError(f"checkpoint {directory} is damaged: {name} has {size} bytes, its manifest says {entry['bytes']}; {_ADVICE}")
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name))[share::num_shares]:
        if sha256(directory / name) != files[name]["sha256"]:
            raise UserError(f"checkpoint {directory} is damaged: the content of {name} is not that of its manifest; {_ADVICE}")


def _read(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        files: Mapping[str, Mapping[str, Any]] = json.loads((directory / MANIFEST).read_text())["files"]
        if all(Path(name).name == name and isinstance(entry["bytes"], int) for name, entry in files.items()):
            return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{directory} is not a complete checkpoint: its {MANIFEST} cannot be read ({error}); {_ADVICE}") from error
    raise UserError(f"{directory} is not a complete checkpoint: its {MANIFEST} names files elsewhere; {_ADVICE}")
