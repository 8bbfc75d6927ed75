"""What a killed process leaves is removed by the next one; what belongs to anybody else stays."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.system import leftovers
from megatron_rl.system.leftovers import Scratch, remove_leftovers, scratch_directory, shared_memory_of

KILLED = """
import os, sys
from pathlib import Path
from megatron_rl.system.leftovers import Scratch
scratch = Scratch.make()
scratch.note([Path(name) for name in sys.argv[1:]])
print(scratch.path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of the test's own."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def kill_one(temporary: Path, *noted: Path) -> Path:
    """The scratch directory of a process that was killed."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, noted)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    return Path(done.stdout.strip())


def test_what_a_killed_process_left_is_removed_and_named(temporary: Path, tmp_path: Path) -> None:
    session, memory = tmp_path / "session", tmp_path / "memory"
    (session / "logs").mkdir(parents=True)
    session.chmod(0o777)
    memory.touch()
    scratch = kill_one(temporary, session, memory, tmp_path / "gone already")
    assert sorted(remove_leftovers()) == sorted(map(str, (scratch, session, memory)))
    assert not scratch.exists() and not session.exists() and not memory.exists()
    assert remove_leftovers() == []


def test_what_a_living_process_has_stays(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with scratch_directory() as scratch:
        scratch.note([tmp_path / "mine"])
        assert remove_leftovers() == []
        assert scratch.path.exists()
    assert not scratch.path.exists() and (tmp_path / "mine").exists()


@pytest.mark.parametrize("field", ["boot", "namespace"])
def test_what_another_container_or_an_earlier_boot_has_stays(temporary: Path, field: str) -> None:
    """A number of a process means something on its own machine only."""
    scratch = kill_one(temporary)
    owner = scratch / "owner.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), field: "another"}))
    assert remove_leftovers() == [] and scratch.exists()


def test_a_number_that_a_later_process_has_got_is_not_the_owner(temporary: Path) -> None:
    scratch = Scratch.make().path
    owner = json.loads((scratch / "owner.json").read_text())
    (scratch / "owner.json").write_text(json.dumps({**owner, "started": owner["started"] - 1}))
    assert remove_leftovers() == [str(scratch)]


def test_what_others_could_have_written_is_not_believed(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").touch()
    scratch = kill_one(temporary, tmp_path / "precious")
    scratch.chmod(0o777)
    assert remove_leftovers() == []
    scratch.chmod(0o700)
    monkeypatch.setattr(leftovers.os, "geteuid", lambda: os.getuid() + 1)
    assert remove_leftovers() == []
    assert (tmp_path / "precious").exists() and scratch.exists()


def test_a_link_is_not_followed(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    scratch = kill_one(temporary, tmp_path / "link")
    assert remove_leftovers() == [str(scratch)]
    assert (tmp_path / "precious").exists() and (tmp_path / "link").is_symlink()


def test_shared_memory_is_found_by_who_maps_it() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"x" * 4096)
        file.flush()
        program = (
            f"import mmap, os, time; m = mmap.mmap(os.open({file.name!r}, os.O_RDWR), 4096); print('ready', flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-IS", "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            assert shared_memory_of([process.pid]) == [Path(file.name)]
            process.kill()
        assert shared_memory_of([process.pid]) == []
