"""What checkpoints cost against copying the same bytes: GB/s of save, load and export, how long the ranks pause, and memory.

    python tools/bench/checkpoint.py [--layers 8] [--turns 3] [--only dp2|ep2]

Two ranks train a model made by code, dense and data parallel with the distributed optimizer, then a mixture of experts under expert
parallelism, and write float32 weights with Adam's moments. `cp` copies the files of a save, one process for each rank, to the same
disk; for what writes, it brings them to the disk itself as a save does. A share above 1 is faster than cp. The pause is how long the ranks
stand still for a save that is written while they go on: the call that begins it, and what the next change of the state has to wait for its
copies, after a rollout of ROLLOUT_S, which leaves the ranks' cores to them, and without any. Its share is that of a save that they wait
for. What putting a save in its place takes, once it is written, is told apart.

Floors are what nothing can be faster than that keeps the same promises: of a save that the ranks' bytes are written from memory to the
disk, of a load that the files are read once and hashed (BLAKE3) and then read into memory that is there, of a pause that the bytes are
copied into memory that is there.

Memory is what a rank needs at its peak beyond what it had before, pages of files not counted. CPU time is that of all threads of both
ranks for a gigabyte. All take turns in one call, so that other load hits all alike; of the turns the fastest counts. Memory is measured
in a turn before them.
"""

import argparse
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import distributed
from training import make_settings

from megatron_rl.checkpoints.manifest import entry_of
from megatron_rl.config.settings import Settings
from megatron_rl.system.device import quiet_megatron_imports

GOAL_SHARE, GOAL_PAUSE = 0.9, 0.1
ROLLOUT_S = 1.0
"""Seconds between the beginning of a save and the next change of the state."""
NUM_RANKS = 2
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"optimizer": {"lr": 1e-5, "use_distributed_optimizer": True}},
    "ep2": {"topology": {"num_ranks": NUM_RANKS, "ep": 2}},
}
Row = tuple[str, float, float, int]
"""What was done, its seconds, those of the CPU, and the bytes of memory that it took."""


def make_model(directory: Path, *, layout: str, layers: int) -> Path:
    """A model directory with random weights."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    if layout == "ep2":
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**SHAPE, **sizes, num_hidden_layers=layers, tie_word_embeddings=True)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    else:
        config = transformers.Qwen3Config(**SHAPE, intermediate_size=3072, num_hidden_layers=layers, tie_word_embeddings=True)
        transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def settings_of(model: Path, layout: str) -> Settings:
    """Supervised training under the layout."""
    settings = make_settings(model, num_ranks=NUM_RANKS, max_tokens=64).model_dump()
    settings["training"] |= LAYOUTS[layout]
    return Settings.model_validate(settings)


class Peak:
    """The most memory that this process has of its own while it is measured, beyond what it had at the start."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._largest = self._process.memory_full_info().uss
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends.wait(0.02):
            self._largest = max(self._largest, self._process.memory_full_info().uss)

    def close(self) -> int:
        """End; the bytes."""
        self._ends.set()
        self._thread.join()
        return self._largest - self._before


def copy_share(source: Path, target: Path, *, rank: int, durable: bool) -> None:
    """Copy this rank's files of a checkpoint as cp does, and with `durable` bring them to the disk itself."""
    for path in sorted(
        source.rglob(f"__{rank}_*.distcp") if rank else (path for path in source.rglob("*") if not path.name.startswith("__1_"))
    ):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            if durable:
                with copy.open("rb") as file:
                    os.fsync(file.fileno())


class Floors:
    """The least that a save, a load and a pause of this rank's share of a checkpoint can take."""

    def __init__(self, source: Path, *, rank: int) -> None:
        self._files = [path for path in source.rglob("*") if path.is_file() and path.name.startswith("__1_") == bool(rank)]
        num_bytes = sum(path.stat().st_size for path in self._files)
        # Filled, so that the kernel has provided them.
        self._memory, self._other = (torch.full((num_bytes,), value, dtype=torch.uint8) for value in (1, 2))

    def write(self, path: Path) -> None:
        """Write as many bytes from memory to the disk itself."""
        with path.open("wb", buffering=0) as file:
            left = memoryview(self._memory.numpy())
            while left:
                left = left[file.write(left[: 2**20]) :]
            os.fsync(file.fileno())

    def hash_and_read(self) -> None:
        """Hash the files, then read them into memory."""
        for path in self._files:
            entry_of(path)
        left = memoryview(self._memory.numpy())
        for path in self._files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(left):
                    left = left[count:]

    def copy(self) -> None:
        """Copy as many bytes in memory."""
        self._other.copy_(self._memory)


def measure(rank: int, model: Path, layout: str, turns: int, results: Any) -> None:
    """Body of a rank."""
    torch.set_num_threads(1)
    with quiet_megatron_imports():
        from megatron_rl.training.trainer import Trainer
    rows: list[Row] = []
    measures_memory = True

    def timed(name: str, action: Callable[[], object]) -> None:
        distributed.barrier()
        # In the first turn alone: asking for memory all the time takes more CPU time than what is measured.
        peak = Peak() if measures_memory else None
        start, cpu_start = time.perf_counter(), time.process_time()
        action()
        cpu_seconds = time.process_time() - cpu_start
        distributed.barrier()
        seconds = time.perf_counter() - start
        rows.append((name, seconds, cpu_seconds, 0) if peak is None else (name, math.inf, math.inf, peak.close()))

    def pauses(what: str, begin_in: Callable[[Path], None]) -> None:
        # Putting nothing away waits as every change of the state does.
        def wait() -> None:
            trainer.put_away(())

        for name, rollout_s in ((f"pause of {what}", ROLLOUT_S), (f"pause of {what}, no rollout", 0.0)):
            # Not the same one for both: replacing a directory would be measured with the end of the second.
            begin = partial(begin_in, directory / name)
            if measures_memory:
                timed(name, lambda begin=begin: (begin(), wait()))
            else:
                timed(f"{name}: call", begin)
                time.sleep(rollout_s)
                timed(f"{name}: wait", wait)
                rows.append((name, rows[-2][1] + rows[-1][1], rows[-2][2] + rows[-1][2], 0))
            while not trainer.save_is_written:
                time.sleep(0.01)
            timed(f"{name}: end", trainer.finish_save)

    directory = model.parent
    saved, exported = directory / "saved", directory / "exported"
    with Trainer.of(settings_of(model, layout), rank=rank, init_method=f"file://{directory}/rendezvous-{layout}") as trainer:
        trainer.save(saved)
        floors = Floors(saved, rank=rank)
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(saved)
        distributed.barrier()
        for _ in range(turns + 1):
            timed("save", lambda: trainer.save(saved))
            timed("floor of save", lambda: floors.write(directory / f"floor-{rank}"))
            timed("cp", lambda: copy_share(saved, directory / "copy", rank=rank, durable=True))
            timed("cp, not to the disk", lambda: copy_share(saved, directory / "copy-2", rank=rank, durable=False))
            pauses("a save", trainer.begin_save)
            timed("floor of pause of a save", floors.copy)
            timed("load", lambda: trainer.load(saved))
            timed("floor of load", floors.hash_and_read)
            timed("export", lambda: trainer.save_hf(exported))
            timed("cp of an export", lambda: rank or copy_share(exported, directory / "copy-3", rank=0, durable=True))
            pauses("an export", lambda path: trainer.begin_save(hf=path))
            if rank == 0:
                sizes = [sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in (saved, exported)]
                for path in (
                    *directory.glob("pause of *"),
                    *(directory / name for name in ("saved", "exported", "copy", "copy-2", "copy-3")),
                ):
                    shutil.rmtree(path)
            (directory / f"floor-{rank}").unlink()
            measures_memory = False
            distributed.barrier()
    results.put((rank, rows, sizes if rank == 0 else []))


@contextmanager
def ranks(model: Path, layout: str, turns: int) -> Iterator[list[Any]]:
    """What the ranks report, rank 0 first."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=measure, args=(rank, model, layout, turns, results), daemon=True) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    try:
        yield sorted((results.get(timeout=900) for _ in processes), key=lambda result: result[0])
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


def report(layout: str, found: list[Any]) -> None:
    """Print the table of one layout."""
    saved_bytes, exported_bytes = found[0][2]
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    for turn in zip(*(rows for _, rows, _ in found), strict=True):
        name, taken = turn[0][0], turn[0][1]
        seconds[name] = min(seconds.get(name, taken), taken)
        cpu = sum(row[2] for row in turn)
        cpu_seconds[name] = min(cpu_seconds.get(name, cpu), cpu)
        memory[name] = max(memory.get(name, 0), *(row[3] for row in turn))
    print(f"\n{layout}: a checkpoint of {saved_bytes / 1e9:.2f} GB, an export of {exported_bytes / 1e9:.2f} GB")
    for name, against, num_bytes in (
        ("save", "cp", saved_bytes),
        ("load", "cp, not to the disk", saved_bytes),
        ("export", "cp of an export", exported_bytes),
    ):
        share = seconds[against] / seconds[name]
        print(
            f"{name:20}{seconds[name]:8.2f} s {num_bytes / seconds[name] / 1e9:6.2f} GB/s, {share:5.2f} of cp"
            f" ({num_bytes / seconds[against] / 1e9:.2f} GB/s; goal {GOAL_SHARE}), {memory[name] / 2**20:7.0f} MiB, CPU "
            f"{cpu_seconds[name] / num_bytes * 1e9:.2f} s/GB, cp {cpu_seconds[against] / num_bytes * 1e9:.2f}"
        )
        print_floor(name, seconds, against)
    for name, whole in (("pause of a save", "save"), ("pause of an export", "export")):
        for kind in (name, f"{name}, no rollout"):
            print(
                f"{kind:32}{seconds[kind]:5.2f} s, {seconds[kind] / seconds[whole]:.2f} of one that is waited for (goal {GOAL_PAUSE}): "
                f"call {seconds[f'{kind}: call']:.2f}, wait {seconds[f'{kind}: wait']:.2f}; put in its place in "
                f"{seconds[f'{kind}: end']:.2f} s; {memory[kind] / 2**20:.0f} MiB"
            )
        print_floor(name, seconds, whole)


def print_floor(name: str, seconds: dict[str, float], against: str) -> None:
    """The line of the floor of what was done, where there is one, as a share of the same as that."""
    floor = seconds.get(f"floor of {name}")
    if floor is not None:
        share = floor / seconds[against] if name.startswith("pause") else seconds[against] / floor
        print(f"{'  its floor':20}{floor:8.2f} s, {share:5.2f}")


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers of the models")
    parser.add_argument("--turns", type=int, default=3, help="how often each is measured")
    parser.add_argument("--only", choices=LAYOUTS, help="one layout alone")
    arguments = parser.parse_args()
    print(f"{NUM_RANKS} ranks on {os.cpu_count()} cores, {arguments.layers} layers, fastest of {arguments.turns} turns")
    for layout in [arguments.only] if arguments.only else LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
            model = make_model(Path(folder) / "model", layout=layout, layers=arguments.layers)
            with ranks(model, layout, arguments.turns) as found:
                report(layout, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
