"""What conversions and loading cost against `cp` of the same bytes, and the memory that they take.

    python tools/bench/convert.py [--layers 20] [--turns 5] [--directory DIR]

A random Qwen3 checkpoint (bfloat16, 2.5 GB with 20 layers) is converted into our format and back, and loaded into a model as a run loads
it. Each piece of work is measured right behind a `cp` of the same bytes: before either, what was written is brought to the disk, and
the source is read once, so that both find it in memory. Conversions bring their files to the disk, so their `cp` is followed by
`sync` of its files; loading writes nothing, so its `cp` leaves them in memory. The share is that of the pair, and the median of the turns
counts, so that a load that comes and goes does not; the range says how much it came and went. The speed at which a thread hashes the same
bytes (BLAKE3) is shown as well: conversions hash what they write, cp does not.

Memory is what a process allocates beyond what it has after its imports, at its peak; pages of files are not counted; the largest of the
turns counts. Goals are half of the speed of `cp`, and three times the largest tensor and 1 GiB. CPU seconds are those of all threads, of
the process beside those of `cp`: they depend least on what else the machine does.

mbridge is not beside it: 0.15.1 installs, but builds its model of TransformerEngine's layers (`TENorm` is not defined without them) and
moves each tensor that it exports to `torch.cuda.current_device()`, so that it neither loads nor saves without a GPU.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.system.device import local_device, prepare_megatron, quiet_megatron_imports

with quiet_megatron_imports():
    from megatron_rl.checkpoints.hugging_face import save_hf
    from megatron_rl.checkpoints.manifest import entry_of
    from megatron_rl.checkpoints.stored_weights import load_hf_weights
    from megatron_rl.config.settings import TopologySettings
    from megatron_rl.convert.conversion import Options, convert
    from megatron_rl.models.build import build_model
    from megatron_rl.models.megatron_config import transformer_config
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.models.weight_table import tensor_shapes
    from megatron_rl.training.topology import Topology, initialize, shutdown

GOAL_SHARE, GIB = 0.5, 2**30
WORK = ("to ours", "to Hugging Face", "load at start")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LARGE = {"vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}


def make_checkpoint(path: Path, *, layers: int, small: bool) -> int:
    """A Hugging Face directory of random weights; bytes of its largest Megatron parameter."""
    source = path.with_name("config")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG | (SMALL if small else LARGE) | {"num_hidden_layers": layers}))
    spec = read_model_spec(source)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2**22, generator=generator).bfloat16()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in tensor_shapes(spec):
            numel = torch.Size(shape).numel()
            yield name, noise.repeat(-(-numel // noise.numel()))[:numel].view(shape)

    save_hf(path, tensors(), source=source, max_shard_bytes=2**30)
    return 2 * max(spec.vocab_size * spec.hidden_size, 2 * spec.ffn_hidden_size * spec.hidden_size)


def settle(source: Path) -> None:
    """Bring everything that was written to the disk, and the weights of `source` into memory."""
    os.sync()
    for file in weight_files(source):
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def weight_files(path: Path) -> list[Path]:
    """The files of `path` with weights, of either format."""
    return sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])


def copy(source: Path, target: Path, *, to_disk: bool) -> tuple[float, float]:
    """Seconds and CPU seconds of `cp` of the weights, with `to_disk` until they are there."""
    target.mkdir()
    before, started = os.times(), time.perf_counter()
    subprocess.run(["cp", *map(str, weight_files(source)), str(target)], check=True)
    if to_disk:
        subprocess.run(["sync", *(str(file) for file in target.iterdir())], check=True)
    seconds, after = time.perf_counter() - started, os.times()
    shutil.rmtree(target)
    return seconds, sum(after[2:4]) - sum(before[2:4])


def anonymous_bytes() -> int:
    """Memory that this process has allocated, without the pages of files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """A function that says how many bytes were allocated beyond those of the start, at the peak."""
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(peak, anonymous_bytes()) - before
    finally:
        done.set()
        thread.join()


def load(source: Path) -> tuple[float, float, int]:
    """Seconds and CPU seconds to fill a model that is there from `source`, and the memory for it."""
    torch.set_num_threads(1)
    settings = TopologySettings()
    device = local_device()
    prepare_megatron(device)
    initialize(Topology.of(settings), rank=0, init_method=None, device=device, timeout_s=60.0)
    spec = read_model_spec(source)
    chunks = build_model(spec, transformer_config(spec, topology=settings, dtype=torch.bfloat16, overrides={}), attention="torch")
    for parameter in chunks[0].parameters():
        parameter.data.fill_(0)
    with peak_memory() as peak:
        started, cpu_started = time.perf_counter(), time.process_time()
        load_hf_weights(chunks, spec, source)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        allocated = peak()
    shutdown()
    return seconds, cpu_s, allocated


def measure(work: str, source: Path, target: Path) -> tuple[float, float, int]:
    """Seconds, CPU seconds and bytes of memory of one piece of work, in this process."""
    started, before = time.perf_counter(), time.process_time()
    if work == "load at start":
        return load(source)
    with peak_memory() as peak:
        convert(source, target, Options(to="megatron" if work == "to ours" else "hf", max_shard_bytes=2**30))
        return time.perf_counter() - started, time.process_time() - before, peak()


def in_a_process(work: str, source: Path, target: Path) -> tuple[float, float, int]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--work", work, str(source), str(target)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, cpu_s, allocated = answer.splitlines()[-1].split()
    return float(seconds), float(cpu_s), int(allocated)


@dataclass(frozen=True, slots=True)
class Pair:
    """A `cp` (seconds, CPU seconds) and the work right behind it (seconds, CPU seconds, bytes of memory)."""

    copied: tuple[float, float]
    done: tuple[float, float, int]

    @property
    def share(self) -> float:
        """Speed of the work as a share of that of `cp`."""
        return self.copied[0] / self.done[0]


def said(met: bool) -> str:
    """Whether a goal is met, in a word."""
    return "met" if met else "MISSED"


def compare(directory: Path, *, layers: int, turns: int, small: bool) -> None:
    """Print the table."""
    source, ours = directory / "source", directory / "ours"
    largest = make_checkpoint(source, layers=layers, small=small)
    num_bytes = sum(file.stat().st_size for file in weight_files(source))
    in_a_process("to ours", source, ours)
    places = {"to ours": (source, "again"), "to Hugging Face": (ours, "back"), "load at start": (source, "none")}
    pairs: dict[str, list[Pair]] = {work: [] for work in WORK}
    for turn in range(turns):
        for work, (start, end) in places.items():
            settle(start)
            copied = copy(start, directory / "copy", to_disk=work != "load at start")
            settle(start)
            pairs[work].append(Pair(copied, in_a_process(work, start, directory / end)))
            shutil.rmtree(directory / end, ignore_errors=True)
            print(f"turn {turn + 1}: {work}, {pairs[work][-1].share:.2f} of cp", file=sys.stderr, flush=True)
    started = time.perf_counter()
    for file in weight_files(source):
        entry_of(file)
    hashed = num_bytes / 1e9 / (time.perf_counter() - started)
    bound = 3 * largest + GIB
    print(f"{num_bytes / 1e9:.2f} GB, largest parameter {largest / 1e9:.2f} GB, median of {turns} turns; a thread hashes {hashed:.2f} GB/s")
    for work, turned in pairs.items():
        print(row(work, turned, num_bytes=num_bytes, bound=bound))


def row(work: str, turned: list[Pair], *, num_bytes: int, bound: int) -> str:
    """The line of the table about one piece of work."""
    shares = sorted(pair.share for pair in turned)
    share, allocated = statistics.median(shares), max(pair.done[2] for pair in turned)
    seconds, cpu_s = (statistics.median(pair.done[index] for pair in turned) for index in (0, 1))
    copied_s, copied_cpu_s = (statistics.median(pair.copied[index] for pair in turned) for index in (0, 1))
    speeds = f"{num_bytes / 1e9 / seconds:6.2f} GB/s, cp {num_bytes / 1e9 / copied_s:.2f}"
    goal = f"({shares[0]:.2f} to {shares[-1]:.2f}; goal {GOAL_SHARE}) {said(share >= GOAL_SHARE)}"
    memory = f"memory {allocated / 1e9:.2f} GB (goal {bound / 1e9:.2f}) {said(allocated <= bound)}"
    return f"{work:<16}{speeds}: {share:5.2f} of cp {goal}; CPU {cpu_s:.1f} s, cp {copied_cpu_s:.1f} s; {memory}"


def main() -> int:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a model of a few MB, to try the benchmark itself")
    parser.add_argument("--directory", type=Path, help="where to write; the temporary directory when not given")
    parser.add_argument("--work", nargs=3, metavar=("WORK", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        print(*measure(options.work[0], Path(options.work[1]), Path(options.work[2])))
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        compare(Path(directory), layers=options.layers, turns=options.turns, small=options.small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
