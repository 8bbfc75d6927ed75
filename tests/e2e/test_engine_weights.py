"""Weights of every family, by every transport in tiny buckets, from the trainer into the real SGLang server.

What the server then holds is what a server holds that was started on the trainer's own checkpoint: a tensor that a bucket cut off from
its counterpart, or that the loader dropped without a word, shows. Where SGLang can generate on a CPU, both also give the same log-probs.
"""

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from layout_table import GENERATING
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.algorithms.rounding_limits import DENSE, FLOAT32, Limits
from megatron_rl.config.settings import Settings
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine, EngineAddress, free_port
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.errors import EngineError, ParityError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.observe.metrics import metric_values
from megatron_rl.system.leftovers import SHARED_MEMORY
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Floats, Prompt, TrainBatch
from megatron_rl.weights import broadcast, ipc
from megatron_rl.weights.diagnosis import likeliest, weights_apart
from megatron_rl.weights.ipc import allocate_shared
from megatron_rl.weights.parity import (
    Checksums,
    check_probe,
    check_read,
    check_replaced,
    fixed_tokens,
    sample_probe,
    score,
    weight_checksums,
)
from megatron_rl.weights.sync import TRANSPORTS, WeightSync
from megatron_rl.weights.transport import SenderPlan, Sent, Surroundings, WeightSender, exported_specs

PARITY = Limits.of(dtype="float32", mixture=False, replays=False, median=1e-5)
TINY_BUCKET = 20_000
"""Bytes: some buckets begin and end among the experts of a layer."""
LET_GO_S = 10.0
ONLY_DEEPSEEK = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0},
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""What SGLang reads without a default, and the only rotary embedding with which it builds latent attention on a CPU."""


def make_trainer(model: Path, directory: Path) -> Trainer:
    settings = Settings.model_validate(
        {
            "run": {"directory": directory / "run"},
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": "unused.jsonl"},
            "objective": {"policy_loss": {"kind": "sft"}, "aggregation": "token_mean"},
            "training": {"max_tokens_per_micro_batch": 200},
        }
    )
    return Trainer.of(settings, rank=0, init_method=f"file://{directory}/rendezvous")


class OneRank:
    """A trainer of one rank in this process, whose calls run beside the event loop."""

    has_died = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._thread = trainer, ThreadPoolExecutor(1)
        self._sender: WeightSender

    def begin_open_sender(self, plan: SenderPlan) -> list[Future[None]]:
        def work() -> None:
            self._sender = plan.open(self._trainer, rank=0)

        return [self._thread.submit(work)]

    def begin_close_sender(self) -> list[Future[None]]:
        return [self._thread.submit(self._sender.close)]

    def begin_send(self, *, version: int, checked: bool) -> list[Future[Sent]]:
        return [self._thread.submit(self._sender.send, version=version, checked=checked)]


class Without:
    """A trainer that leaves weights out."""

    def __init__(self, trainer: Trainer, left_out: str) -> None:
        self._trainer, self._left_out = trainer, left_out

    def weights(self, *, receivers: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._trainer.weights(receivers=receivers) if self._left_out not in name)


async def sync(
    trainer: Trainer, client: EngineClient, *, version: int, model: Path, directory: Path, transport: str = "broadcast", tp: int = 1,
    left_out: str = "none",
) -> None:  # fmt: skip
    """Give the engine the trainer's weights but those `left_out`, over a transport that is opened for this alone."""
    surroundings = Surroundings(
        manifest=[spec for spec in exported_specs(read_model_spec(model), dtype="float32") if left_out not in spec.name],
        directory=directory / "weights",
        free_address=lambda: ("127.0.0.1", free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX))),
        backend="gloo",
        num_engines=1,
        ranks_per_engine=tp,
        timeout_s=60.0,
        ranks_beside={client.address.url: (0,)},
        bucket_bytes=TINY_BUCKET,
    )
    pool = EnginePool([client], max_requests=8)
    source: Any = trainer if left_out == "none" else Without(trainer, left_out)
    ranks = OneRank(source)
    opened = WeightSync(lambda urls: TRANSPORTS[transport](surroundings), ranks=ranks, pool=pool, timeout_s=60, check_interval=1)
    metrics = metric_values(await opened.run(version=version))
    assert metrics["engine/compared_weights"] == len(surroundings.manifest)
    await opened.disconnect()


class SharedBuckets:
    """The files of /dev/shm in which a rank of this process shares its buckets, watched from before its first sync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_buckets, self.most_files = 0, 0
        self._before = self._files()
        monkeypatch.setattr(ipc, "allocate_shared", self._allocate)

    def _files(self) -> set[Path]:
        return set(SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"))

    def _allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        flat = allocate_shared(num_bytes, device)
        self.num_buckets += 1
        self.most_files = max(self.most_files, len(self._files() - self._before))
        return flat

    def left(self) -> set[Path]:
        """Those that are still there, and those that a process of the engine has mapped, when both have had time to let go."""
        deadline = time.monotonic() + LET_GO_S
        while found := self._files() - self._before | self._mapped():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found

    def _mapped(self) -> set[Path]:
        """By a process of the engine, also of those that have no name any more."""
        ours, found = f"{SHARED_MEMORY}/torch_{os.getpid()}_", set[Path]()
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found |= {Path(mapped.path) for mapped in child.memory_maps() if mapped.path.startswith(ours)}
        return found


@contextmanager
def serving(model: Path, log: Path, *, has_weights: bool = True, **arguments: object) -> Iterator[EngineAddress]:
    """Without weights: a server whose every tensor has to come from a sync."""
    options: dict[str, Any] = {"device_kind": "cpu", "dtype": "float32", "seed": 7, "has_weights": has_weights}
    engine = Engine(server_arguments(arguments, model_path=model, **options), log_path=log)
    try:
        yield engine.start()
    finally:
        engine.stop()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param("qwen3", 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 1, marks=pytest.mark.slow),
        # Its loader writes into what the second rank is handed.
        pytest.param("gpt_oss", 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 1, marks=pytest.mark.slow),
    ],
)
def test_every_transport_leaves_what_the_checkpoint_says(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tp: int
) -> None:
    """And nothing of the memory through which they went, of which there is one bucket more than ranks of an engine."""
    # Not tied: SGLang's Qwen3-MoE keeps a head of its own whatever config.json says.
    config = ONLY_DEEPSEEK if family == "deepseek_v3" else {}
    served, trained = (tiny_model(family=family, name=f"model{seed}", seed=seed, tied=False, **config) for seed in (0, 1))
    exported = tmp_path / "exported"
    # Nothing is generated, which latent attention could not.
    arguments = {"skip_server_warmup": True, "tp_size": tp}
    trainer = make_trainer(trained, tmp_path)
    shared = SharedBuckets(monkeypatch)

    async def checksums(address: EngineAddress) -> dict[str, str]:
        async with EngineClient(address, request_timeout_s=60) as client:
            return await client.checksums()

    async def checksums_after_syncs(address: EngineAddress) -> dict[str, dict[str, str]]:
        found = {}
        async with EngineClient(address, request_timeout_s=60, control_timeout_s=60) as client:
            for number, transport in enumerate(TRANSPORTS, start=1):
                if number > 1:
                    await client.load_weights(served, version=0)
                found[f"before {transport}"] = await client.checksums()
                await sync(trainer, client, transport=transport, version=number, model=trained, directory=tmp_path, tp=tp)
                found[transport] = await client.checksums()
                assert not shared.left(), transport
        return found

    try:
        trainer.save_hf(exported)
        with serving(exported, tmp_path / "fresh.log", **arguments) as address:
            expected = asyncio.run(checksums(address))
        with serving(served, tmp_path / "engine.log", has_weights=False, **arguments) as address:
            found = asyncio.run(checksums_after_syncs(address))
    finally:
        shutdown()
    assert shared.num_buckets == shared.most_files == tp + 1, "one is filled while each rank of an engine reads one"
    assert {name: value == expected for name, value in found.items()} == {
        name: not name.startswith("before") for transport in TRANSPORTS for name in (f"before {transport}", transport)
    }


def round_sinks(model: Path) -> None:
    """SGLang keeps the sinks of gpt-oss in bfloat16 whatever the dtype of the model."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t.bfloat16().float() if name.endswith("sinks") else t for name, t in tensors.items()}, file, metadata={"format": "pt"})


PROMPTS = [Prompt(id=str(number), token_ids=np.array([2 + number, 3, 4]), text="") for number in range(3)]
SAMPLING = Sampling(max_tokens=32, seed=0)


@contextmanager
def talking(address: EngineAddress) -> Iterator[tuple[asyncio.Runner, EngineClient, EnginePool]]:
    """A loop, a client and a pool of it."""
    with asyncio.Runner() as runner:
        client = EngineClient(address, request_timeout_s=60, control_timeout_s=60)
        runner.run(client.__aenter__())
        try:
            yield runner, client, EnginePool([client], max_requests=8)
        finally:
            runner.run(client.__aexit__(None, None, None))


# In the gate every run compares the log-probs of qwen3, and here those of a family whose layers have other norms and tensors.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", GENERATING)
def test_log_probs_agree_after_a_sync(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """And no weight stays that the engine had made up."""
    # SGLang leaves a head of Gemma-3 out, whose published checkpoints have none.
    tied = family == "gemma3"
    served, trained = (tiny_model(family=family, name=f"model{seed}", seed=seed, tied=tied) for seed in (0, 1))
    round_sinks(trained)
    with serving(served, tmp_path / "engine.log", has_weights=False) as address, talking(address) as (runner, client, pool):
        trainer = make_trainer(trained, tmp_path)
        before = runner.run(weight_checksums(pool))
        runner.run(sync(trainer, client, version=1, model=trained, directory=tmp_path))
        after = runner.run(weight_checksums(pool))
        check_replaced(before, after)
        runner.run(check_read(trained, pool, after, timeout_s=60))
        probe = runner.run(sample_probe(PROMPTS, pool, sampling=SAMPLING))
        check_probe(probe, trainer.own_log_probs, limits=PARITY, replays=False)
        shutdown()


def with_a_changed_bit(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Of each bucket the first byte."""
    flat[0] ^= 1
    dist.broadcast(flat, src=0, group=group)


@pytest.mark.timeout(300)
def test_the_gate_stops_what_is_broken_on_purpose(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that a sync leaves out, another checkpoint, temperature, top_p, rope, a changed bit: each by its cause."""
    model, other = (tiny_model(family="qwen3", name=f"model{seed}", seed=seed, tied=False) for seed in (0, 1))
    turned = tiny_model(family="qwen3", name="turned", tied=False, rope_theta=10.0)

    with serving(model, tmp_path / "engine.log", has_weights=False) as address, talking(address) as (runner, client, pool):

        def synced(version: int, left_out: str = "none") -> Checksums:
            runner.run(sync(trainer, client, version=version, model=model, directory=tmp_path, left_out=left_out))
            return runner.run(weight_checksums(pool))

        def refused(log_probs: Callable[..., Floats], limits: Limits, *, before: Checksums, after: Checksums) -> str | None:
            """The gate's cause for the tokens that the engine samples now."""
            probe = runner.run(sample_probe(PROMPTS, pool, sampling=SAMPLING))
            with pytest.raises(ParityError):
                check_probe(probe, log_probs, limits=limits, replays=False)
            weights = partial(weights_apart, before[address.url], after[address.url], tied=False)
            options: dict[str, Any] = {"replays": False, "mixture": False, "weights": lambda urls: weights()}
            return likeliest(probe, log_probs, limits=limits, scoring=limits, **options)

        before = runner.run(weight_checksums(pool))
        trainer = make_trainer(model, tmp_path)
        after = synced(1, "layers.1.mlp.")
        named = r"2 of 19 weights, needs 0: model\.layers\.1\.mlp\.gate_up_proj\.weight \(tp rank 0\), model\.layers\.1\.mlp\.down_proj"
        with pytest.raises(ParityError, match=named):
            check_replaced(before, after)
        stale, whole = runner.run(sample_probe(PROMPTS, pool, sampling=SAMPLING)), synced(2)
        for limits in (FLOAT32, DENSE):
            with pytest.raises(ParityError):
                check_probe(stale, trainer.own_log_probs, limits=limits, replays=False)
        half = weights_apart(after[address.url], whole[address.url], tied=False) or ""
        assert "half-applied weights, since another sync of the same version changed 2 of 19 weights: model.layers.1.mlp.gate_up" in half

        check_replaced(before, whole)
        healthy = runner.run(sample_probe(PROMPTS, pool, sampling=SAMPLING))
        check_probe(healthy, trainer.own_log_probs, limits=PARITY, replays=False)
        fixed = fixed_tokens(PROMPTS, context_length=address.context_length)
        scores = runner.run(score(fixed, pool, pool.membership.members))[address.url]
        assert np.abs(scores - trainer.own_log_probs(fixed, temperature=1.0)).max() < 1e-5
        runner.run(check_read(model, pool, whole, timeout_s=60))
        with pytest.raises(ParityError, match=r"got other bits by the first sync than it reads from .*model1: 19 of 19 weights"):
            runner.run(check_read(other, pool, whole, timeout_s=60))
        synced(3)

        def warmer(batch: TrainBatch, *, temperature: float) -> Floats:
            return trainer.own_log_probs(batch, temperature=1.25 * temperature)

        same = {"before": whole, "after": whole}
        assert "those of temperature 0.8 (mean" in (refused(warmer, DENSE, **same) or "")
        with monkeypatch.context() as patch:
            request = Sampling.request
            patch.setattr(Sampling, "request", lambda self, index=0: {**request(self, index), "top_p": 0.7})
            assert refused(trainer.own_log_probs, FLOAT32, **same) is None, "log-probs agree, and the tokens are likelier than they say"
        shutdown()
        trainer = make_trainer(turned, tmp_path / "turned")
        for limits in (FLOAT32, DENSE):
            assert "positions or rope, since tokens with fewer than" in (refused(trainer.own_log_probs, limits, **same) or "")

        monkeypatch.setattr(broadcast, "_broadcast", with_a_changed_bit)
        with pytest.raises(EngineError, match="cannot be reached for /update_weights_from_tensor"):
            synced(3)
        shutdown()
    ends = (tmp_path / "engine.log").read_text()
    assert re.search(r"RuntimeError: \d+ of \d+ weights did not come as the trainer sent them, needs 0: model\.embed_tokens", ends)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_head_that_an_engine_keeps_for_itself_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """SGLang's Qwen3-MoE has one, also where config.json ties it to the embedding."""
    model = tiny_model(family="qwen3_moe", tied=True)
    with serving(model, tmp_path / "engine.log", has_weights=False) as address, talking(address) as (runner, client, pool):
        before = runner.run(weight_checksums(pool))
        runner.run(sync(make_trainer(model, tmp_path), client, version=1, model=model, directory=tmp_path))
        shutdown()
        with pytest.raises(ParityError, match=r"1 of \d+ weights, needs 0: lm_head\.weight"):
            check_replaced(before, runner.run(weight_checksums(pool)))
