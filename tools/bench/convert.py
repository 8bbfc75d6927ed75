"""What conversions and loading cost against `cp` of the same bytes, and the memory that they take.

    python tools/bench/convert.py [--layers 20] [--turns 2] [--directory DIR]

A random Qwen3 checkpoint (bfloat16, 2.2 GB with 20 layers) is copied by `cp`, with the disk's own write counted as conversions count it
(`sync`), then converted into our format and back, and loaded into a model as a run loads it. All take turns in one call, so that other
load hits all alike; of the turns the fastest counts, and the largest memory. Memory is what a process allocates beyond what it has after
its imports, at its peak; pages of files are not counted. Goals are half of the speed of `cp`, and three times the largest tensor and 1 GiB.
CPU seconds are those of all threads: on a machine that is busy with other things they say what the seconds would be without them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_rl.device import local_device, prepare_megatron, quiet_megatron_imports

with quiet_megatron_imports():
    from megatron_rl.config.settings import TopologySettings
    from megatron_rl.convert.conversion import Options, convert
    from megatron_rl.models.build import build_model
    from megatron_rl.models.hf_files import save_hf
    from megatron_rl.models.hf_weights import load_hf_weights
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


def copy(source: Path, target: Path) -> float:
    """Seconds of `cp` of the weights, until they are on the disk."""
    target.mkdir()
    started = time.perf_counter()
    files = [str(file) for file in source.glob("*.safetensors")]
    subprocess.run(["cp", *files, str(target)], check=True)
    subprocess.run(["sync", *(str(file) for file in target.iterdir())], check=True)
    return time.perf_counter() - started


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
    before = time.process_time()
    if work == "load at start":
        return load(source)
    with peak_memory() as peak:
        done = convert(source, target, Options(to="megatron" if work == "to ours" else "hf", max_shard_bytes=2**30))
        return done.seconds, time.process_time() - before, peak()


def in_a_process(work: str, source: Path, target: Path) -> tuple[float, float, int]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--work", work, str(source), str(target)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, cpu_s, allocated = answer.splitlines()[-1].split()
    return float(seconds), float(cpu_s), int(allocated)


def said(met: bool) -> str:
    """Whether a goal is met, in a word."""
    return "met" if met else "MISSED"


def compare(directory: Path, *, layers: int, turns: int, small: bool) -> None:
    """Print the table."""
    source = directory / "source"
    largest = make_checkpoint(source, layers=layers, small=small)
    num_bytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    copies, found = [], {work: [] for work in WORK}
    places = {"to ours": (source, "ours"), "to Hugging Face": (directory / "ours", "back"), "load at start": (source, "none")}
    for _ in range(turns):
        copies.append(copy(source, directory / "copy"))
        for work, (start, end) in places.items():
            found[work].append(in_a_process(work, start, directory / end))
        for name in ("copy", "ours", "back"):
            shutil.rmtree(directory / name)
    fastest = min(copies)
    bound = 3 * largest + GIB
    print(f"{num_bytes / 1e9:.2f} GB, largest parameter {largest / 1e9:.2f} GB, {turns} turns")
    print(f"{'cp and sync':<18}{num_bytes / 1e9 / fastest:7.2f} GB/s")
    for work, turned in found.items():
        seconds, cpu_s, allocated = min(turn[0] for turn in turned), min(turn[1] for turn in turned), max(turn[2] for turn in turned)
        share = fastest / seconds
        print(
            f"{work:<18}{num_bytes / 1e9 / seconds:7.2f} GB/s  {share:5.2f} of cp (goal {GOAL_SHARE}): {said(share >= GOAL_SHARE)}"
            f"  {cpu_s:5.1f} CPU s  {allocated / 1e9:6.2f} GB of memory (goal {bound / 1e9:.2f}): {said(allocated <= bound)}"
        )


def main() -> int:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
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
