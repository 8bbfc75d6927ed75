import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.observe.memory import PeakMemory

MIB = 2**20


@contextmanager
def child(script: str) -> Iterator[subprocess.Popen[str]]:
    """A Python child that prints `ready` when it has what it needs, and ends when its input is closed."""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()


HOLDER = "import sys; held = bytearray(b'x') * (64 * 2**20); print('ready', flush=True); sys.stdin.read()"


def test_grandchildren_count_and_the_peak_outlives_them() -> None:
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {HOLDER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline(); print('ready', flush=True); sys.stdin.read(); child.stdin.close(); child.wait()"
    )
    with child(parent) as process:
        memory = PeakMemory(process.pid)
        held = memory.sample()
        assert 64 * MIB < held < 200 * MIB
    assert memory.sample() == 0
    assert memory.peak_bytes == held


def test_shared_pages_are_counted_once() -> None:
    """A forked child shares 64 MiB with its parent: the tree has 64 MiB, not 128."""
    script = (
        "import mmap, os, sys\n"
        "held = mmap.mmap(-1, 64 * 2**20); held.write(b'x' * len(held))\n"
        "reader, writer = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(writer); held[::4096]; print('ready', flush=True); os.read(reader, 1); os._exit(0)\n"
        "sys.stdin.read(); os.close(writer); os.wait()"
    )
    with child(script) as process:
        assert 64 * MIB < PeakMemory(process.pid).sample() < 110 * MIB


def test_the_thread_samples_and_stops() -> None:
    with child(HOLDER) as process, PeakMemory(process.pid, interval_s=0.01) as memory:
        for _ in range(1000):
            if memory.peak_bytes:
                break
            memory._stop.wait(0.01)
    assert memory.peak_bytes > 64 * MIB
    assert not memory._thread.is_alive()
