"""What a weight sync costs against copying the same bytes: seconds, CPU seconds and memory, of each transport and each of its ends.

    python tools/bench/weights.py [--layers 8] [--bucket-mb 160] [--turns 3] [--engine]

A rank trains a model made by code (about 0.6 GB in float32 with 8 layers) and sends it with the classes of a run. Without --engine
a process that only receives stands for the engine: it takes bucket after bucket from the gloo group, opens the memory that it shares with
the rank, or reads the files, and copies every tensor into weights of its own. With --engine it is the real SGLang server on a CPU.
Broadcast and disk come a second time with weights.delta, where the rank has changed one element in a hundred before each sync.

Memory is what an end needs during a sync beyond what it had before, at its peak, in buckets; pages of files are not counted, memory that
both share counts at both. Goals are 5 times the CPU seconds of memcpy, 2 buckets, and with delta 0.3 of the CPU seconds without. All
take turns in one call, so that other load hits all alike; of the turns the fastest counts, and the largest memory. A line says what
gloo alone takes to broadcast the same bytes, which the goal has to leave room for.
"""

import argparse
import asyncio
import base64
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from remote import Remote, free_address
from safetensors import safe_open
from torch.distributed import distributed_c10d as c10d
from training import MODELS, make_model, make_settings

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.received_weights import follow, order
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.system.device import quiet_megatron_imports
from megatron_rl.system.rendezvous import join_store
from megatron_rl.weights.sync import TRANSPORTS, WeightSync
from megatron_rl.weights.transport import SenderPlan, Sent, Surroundings, WeightSender, WeightSpec, WeightTransport

with quiet_megatron_imports():
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.weights.transport import exported_specs

TIMEOUT_S = 60.0
GOAL_CPU, GOAL_BUCKETS = 5.0, 2.0
CHANGED = 100  # elements of which one changes before a sync with deltas
DELTA = " with delta"
SHAPE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one sync: seconds from its start to its end, and CPU seconds and bytes of memory of each end."""

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float
    sender_bytes: int
    receiver_bytes: int


# Processes


class Rank:
    """The trainer's end: one Megatron rank."""

    def __init__(self, model: Path) -> None:
        with quiet_megatron_imports():
            from megatron_rl.training.trainer import Trainer
        settings = make_settings(model, num_ranks=1, max_tokens=64)
        self._trainer = Trainer.of(settings, rank=0, init_method=f"file://{model.parent}/rendezvous")
        self._sender: WeightSender

    def open_sender(self, plan: SenderPlan) -> None:
        """Open the end of the transport."""
        self._sender = plan.open(self._trainer, rank=0)

    def close_sender(self) -> None:
        """Close the end of the transport."""
        self._sender.close()

    def send(self, version: int, checked: bool) -> Sent:
        """Send the weights."""
        return self._sender.send(version=version, checked=checked)

    def change(self) -> None:
        """Change one element in a hundred."""
        with torch.no_grad():
            for _, tensor in self._trainer.weights():
                places = torch.randint(tensor.numel(), (max(1, tensor.numel() // CHANGED),))
                tensor.view(-1)[places] *= 1.25

    def memcpy(self) -> tuple[float, float]:
        """Seconds and CPU seconds of copying all weights once into memory that has been written before."""
        sources = [tensor.detach().contiguous() for _, tensor in self._trainer.weights()]
        targets = [source.clone() for source in sources]
        start, cpu = time.perf_counter(), time.process_time()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return time.perf_counter() - start, time.process_time() - cpu


class Receiver:
    """What stands for an engine: it has weights of its own and copies what comes into them."""

    def __init__(self, manifest: Sequence[WeightSpec]) -> None:
        self._weights = {spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in manifest}
        self._group: dist.ProcessGroup
        self.load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] = self._load

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._weights[name].copy_(tensor)

    def order(self, content: bytes) -> None:
        """Follow an order as an engine does."""
        follow(self, pickle.loads(content))

    def join_group(self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> None:
        """Join as SGLang does."""
        store = join_store(address, port=port, num_clients=world_size, timeout_s=TIMEOUT_S)
        self._group, _ = c10d._new_process_group_helper(
            world_size,
            rank_offset,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

    def receive(self, bucket: Sequence[WeightSpec]) -> None:
        """Take one bucket, in fresh memory as SGLang does."""
        flat = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self._group)
        parts = zip(bucket, flat.split([spec.num_bytes for spec in bucket]), strict=True)
        self.load_weights([(spec.name, part.view(spec.torch_dtype).view(spec.shape)) for spec, part in parts])

    def take(self, handle: str) -> None:
        """Copy what another process shares, as SGLang does."""
        payload = ForkingPickler.loads(base64.b64decode(handle))
        for place in payload["metadata"]:
            part = payload["flattened_tensor"][place.start_idx : place.end_idx]
            self._weights[place.name].copy_(part.view(place.dtype).reshape(place.shape))

    def load(self, path: Path) -> None:
        """Read all files of a Hugging Face directory."""
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                self.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


class Peer:
    """One end of a group that only broadcasts, with nothing to pack or to unpack: the least that a broadcast of gloo costs."""

    def broadcast(self, *, store: Path, rank: int, num_bytes: int, bucket_bytes: int) -> float:
        """CPU seconds of this end, `rank` 0 or 1, of `num_bytes` in buckets, from and into memory that has been written before."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        group = dist.ProcessGroupGloo(dist.FileStore(str(store), 2), rank, 2, options)
        buckets = torch.ones(num_bytes, dtype=torch.uint8).split(bucket_bytes)
        cpu = time.process_time()
        for bucket in buckets:
            group.broadcast(bucket, 0).wait()
        return time.process_time() - cpu


async def broadcast_alone(peers: Sequence[Remote], *, store: Path, num_bytes: int, bucket_bytes: int) -> float:
    """CPU seconds of both ends together."""
    calls = [
        peer.call("broadcast", store=store, rank=rank, num_bytes=num_bytes, bucket_bytes=bucket_bytes) for rank, peer in enumerate(peers)
    ]
    return sum(await asyncio.gather(*map(asyncio.wrap_future, calls)))


class StandInClient:
    """The calls of an engine's client that a sync makes, for a `Receiver`."""

    address = SimpleNamespace(url="http://127.0.0.1")

    def __init__(self, receiver: Remote) -> None:
        self._receiver, self._version = receiver, 0

    async def _ask(self, method: str, **arguments: Any) -> None:
        await asyncio.wrap_future(self._receiver.call(method, **arguments))

    async def join_group(self, **arguments: Any) -> None:
        """Join the rank's group."""
        await self._ask("join_group", **arguments)

    async def receive_bucket(
        self, names: Sequence[str], *, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], group: str, version: int | None = None
    ) -> None:
        """Take a bucket."""
        await self._ask("receive", bucket=[WeightSpec(*parts) for parts in zip(names, dtypes, shapes, strict=True)])
        self._version = self._version if version is None else version

    async def take_bucket(self, handles: Sequence[str], *, version: int | None) -> None:
        """Take a bucket."""
        (handle,) = handles
        await self._ask("take", handle=handle)
        self._version = self._version if version is None else version

    async def order(self, step: Any, *, num_ranks: int, version: int | None = None, **given: Any) -> None:
        """Give an order."""
        await self._ask("order", content=order(step, **given))
        self._version = self._version if version is None else version

    async def load_weights(self, path: Path, *, version: int) -> None:
        """Read files."""
        await self._ask("load", path=path)
        self._version = version

    async def weight_version(self) -> int:
        """The version that came last."""
        return self._version

    async def pause(self, mode: str) -> None:
        """Nothing generates."""

    async def resume(self) -> None:
        """Nothing generates."""

    async def begin_weight_update(self) -> None:
        """Nothing to prepare."""

    async def end_weight_update(self) -> None:
        """Nothing to finish."""


class RankAlone:
    """The trainer's ranks as a sync sees them, of one process."""

    has_died = False

    def __init__(self, rank: Remote) -> None:
        self._rank = rank

    def begin_open_sender(self, plan: SenderPlan) -> "list[Future[Any]]":
        """Open the end of the transport."""
        return [self._rank.call("open_sender", plan=plan)]

    def begin_close_sender(self) -> "list[Future[Any]]":
        """Close the end of the transport."""
        return [self._rank.call("close_sender")]

    def begin_send(self, *, version: int, checked: bool) -> "list[Future[Any]]":
        """Send."""
        return [self._rank.call("send", version=version, checked=checked)]


# Measuring


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds so far, of user and kernel."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def memory_bytes(processes: Sequence[psutil.Process]) -> int:
    """Memory that is no file's on a disk."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


class Peak:
    """The largest of each of some `readings` of memory in bytes within a `with` block, beyond that at its start; read every 5 ms."""

    def __init__(self, *readings: Callable[[], int]) -> None:
        self._readings, self.bytes = readings, [0] * len(readings)
        self._before = [reading() for reading in readings]
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            now = [reading() - before for reading, before in zip(self._readings, self._before, strict=True)]
            self.bytes = list(map(max, self.bytes, now))

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


async def measure(sync: WeightSync, *, version: int, sender: Sequence[psutil.Process], receiver: Sequence[psutil.Process]) -> Cost:
    """One sync."""
    before = cpu_seconds(sender), cpu_seconds(receiver)
    with Peak(partial(memory_bytes, sender), partial(memory_bytes, receiver)) as peak:
        start = time.perf_counter()
        await sync.run(version=version)
        seconds = time.perf_counter() - start
    return Cost(seconds, cpu_seconds(sender) - before[0], cpu_seconds(receiver) - before[1], *peak.bytes)


@contextmanager
def running_engine(model: Path) -> Iterator[tuple[Engine, Any]]:
    """The real server, which needs no cache of keys and values worth the name."""
    arguments = server_arguments({"max_total_tokens": 2048}, model_path=model, device_kind="cpu", dtype="float32", seed=0)
    engine = Engine(arguments, log_path=model.parent / "engine.log")
    try:
        yield engine, engine.start()
    finally:
        engine.stop()


def _made(transport: Callable[[Surroundings], WeightTransport], surroundings: Surroundings, _: Sequence[str]) -> WeightTransport:
    return transport(surroundings)


async def bench(model: Path, *, bucket_bytes: int, turns: int, with_engine: bool) -> None:
    """Print the costs of every transport beside memcpy's."""
    manifest = exported_specs(read_model_spec(model), dtype="float32")
    total = sum(spec.num_bytes for spec in manifest)
    async with AsyncExitStack() as stack:
        rank = Remote(partial(Rank, model))
        stack.callback(rank.close)
        if with_engine:
            _, address = stack.enter_context(running_engine(model))
            client: Any = await stack.enter_async_context(EngineClient(address, request_timeout_s=60, control_timeout_s=TIMEOUT_S))
            receiving = [process for process in psutil.Process().children(recursive=True) if process not in rank.processes]
        else:
            receiver = Remote(partial(Receiver, manifest))
            stack.callback(receiver.close)
            client, receiving = StandInClient(receiver), receiver.processes
        surroundings = Surroundings(
            manifest=manifest,
            directory=model.parent / "weights",
            free_address=free_address,
            backend="gloo",
            num_engines=1,
            ranks_per_engine=1,
            timeout_s=TIMEOUT_S,
            ranks_beside={client.address.url: (0,)},
            bucket_bytes=bucket_bytes,
        )
        peers = [Remote(Peer), Remote(Peer)]
        for peer in peers:
            stack.callback(peer.close)
        copies, floors, costs = [], [], dict[str, list[Cost]]()
        version = 0
        for name in (*TRANSPORTS, *(f"{name}{DELTA}" for name in ("broadcast", "disk"))):
            pool, transport = EnginePool([client], max_requests=1), TRANSPORTS[name.removesuffix(DELTA)]
            given = replace(surroundings, deltas=name.endswith(DELTA))
            sync = WeightSync(partial(_made, transport, given), ranks=RankAlone(rank), pool=pool, timeout_s=TIMEOUT_S)
            await sync.connect()
            costs[name] = []
            for _ in range(turns + 1):
                copies.append(await asyncio.wrap_future(rank.call("memcpy")))
                version += 1
                if given.deltas:
                    await asyncio.wrap_future(rank.call("change"))
                else:
                    store = model.parent / f"floor{version}"
                    floors.append(await broadcast_alone(peers, store=store, num_bytes=total, bucket_bytes=bucket_bytes))
                costs[name].append(await measure(sync, version=version, sender=rank.processes, receiver=receiving))
    _print(total, copies, floors, costs, bucket_bytes=bucket_bytes, receiver="engine" if with_engine else "receiver")


def _print(
    total: int,
    copies: Sequence[tuple[float, float]],
    floors: Sequence[float],
    costs: dict[str, list[Cost]],
    *,
    bucket_bytes: int,
    receiver: str,
) -> None:
    gigabytes, memcpy_cpu = total / 1e9, min(cpu for _, cpu in copies)
    memcpy_s = min(seconds for seconds, _ in copies)
    print(
        f"{gigabytes:.2f} GB of weights, buckets of {bucket_bytes / 1e6:.0f} MB; goals: {GOAL_CPU:.0f} x memcpy, {GOAL_BUCKETS:.0f} buckets"
    )
    print(f"  {'memcpy':<22}{memcpy_s / gigabytes:>7.2f} s/GB, {memcpy_cpu / gigabytes:>6.2f} CPU s/GB")
    print(
        f"  {'bare gloo, both ends':<22}{'':>12}  {min(floors) / gigabytes:>6.2f} CPU s/GB, {min(floors) / memcpy_cpu:>5.1f} x memcpy,"
        " the least for a broadcast"
    )
    for name, turns in costs.items():
        # The first turn makes files and memory that later ones find.
        measured = turns[1:]
        cpu = {each: min(cost.sender_cpu_s + cost.receiver_cpu_s for cost in costs[each][1:]) for each in (name, name.removesuffix(DELTA))}
        share = f", {cpu[name] / cpu[name.removesuffix(DELTA)]:.2f} of the CPU seconds without" if name.endswith(DELTA) else ""
        print(f"  {name:<22}{min(cost.seconds for cost in measured) / gigabytes:>7.2f} s/GB{share}")
        ends = {
            "sender": (min(cost.sender_cpu_s for cost in measured), max(cost.sender_bytes for cost in measured)),
            receiver: (min(cost.receiver_cpu_s for cost in measured), max(cost.receiver_bytes for cost in measured)),
        }
        for end, (cpu_s, num_bytes) in ends.items():
            print(
                f"    {end:<20}{'':>12}  {cpu_s / gigabytes:>6.2f} CPU s/GB, {cpu_s / memcpy_cpu:>5.1f} x memcpy,"
                f" {num_bytes / bucket_bytes:>5.2f} buckets of memory"
            )


def main() -> int:
    """Make the model and measure."""
    parser = argparse.ArgumentParser(description="Benchmark weight syncs against memcpy.")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model, 54 MB each")
    parser.add_argument("--vocab", type=int, default=32_768, help="rows of the embedding and of the head, 4 KB each")
    parser.add_argument("--bucket-mb", type=float, default=160, help="size of a bucket, and of a file, in 10^6 bytes; runs have 537")
    parser.add_argument("--turns", type=int, default=3, help="measured syncs of each transport")
    parser.add_argument("--engine", action="store_true", help="send to the real SGLang server")
    arguments = parser.parse_args()
    MODELS["synced"] = {**SHAPE, "num_hidden_layers": arguments.layers, "vocab_size": arguments.vocab, "tie_word_embeddings": False}
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), "synced", dtype=torch.float32)
        bucket_bytes = round(arguments.bucket_mb * 1e6)
        asyncio.run(bench(model, bucket_bytes=bucket_bytes, turns=arguments.turns, with_engine=arguments.engine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
