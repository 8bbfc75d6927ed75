"""Weights of mixtures of experts, from the trainer through a process group into the real SGLang server: both give the same log-probs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from layout_table import SYNCED

from megatron_rl.config.settings import RolloutSettings, Settings
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.engine import Engine, EngineAddress, free_port
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Floats, Prompt, TrainBatch
from megatron_rl.weights import broadcast
from megatron_rl.weights.bucket import make_buckets
from megatron_rl.weights.interface import SenderPlan, Surroundings, WeightSender, WeightTransport
from megatron_rl.weights.manifest import make_manifest
from megatron_rl.weights.parity import check_parity, make_probe, sequences
from megatron_rl.weights.sync import TRANSPORTS, WeightSync

PARITY = 1e-5


def make_trainer(model: Path, directory: Path) -> Trainer:
    settings = Settings.model_validate(
        {
            "run": {"directory": directory / "run"},
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": "unused.jsonl"},
            "objective": {"policy_loss": "sft", "aggregation": "token_mean"},
            "training": {"max_tokens_per_micro_batch": 200},
        }
    )
    return Trainer.of(settings, rank=0, init_method=f"file://{directory}/rendezvous")


class OneRank:
    """A trainer of one rank in this process, whose calls run beside the event loop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._thread = trainer, ThreadPoolExecutor(1)
        self._sender: WeightSender

    def begin_open_sender(self, plan: SenderPlan) -> list[Future[None]]:
        def work() -> None:
            self._sender = plan.open(self._trainer, rank=0)

        return [self._thread.submit(work)]

    def begin_close_sender(self) -> list[Future[None]]:
        return [self._thread.submit(self._sender.close)]

    def begin_send(self, *, version: int) -> list[Future[None]]:
        return [self._thread.submit(self._sender.send, version=version)]


async def sync_and_score(trainer: Trainer, address: EngineAddress, probe: TrainBatch, *, model: Path, directory: Path) -> Floats:
    """Log-probs [T] of the probe's tokens by the engine after it got the trainer's weights."""

    def make_transport(num_engines: int) -> WeightTransport:
        surroundings = Surroundings(
            manifest=make_manifest(read_model_spec(model), dtype="float32"),
            directory=directory / "weights",
            free_address=lambda: ("127.0.0.1", free_port("127.0.0.1")),
            backend="gloo",
            num_engines=num_engines,
            ranks_per_engine=1,
            timeout_s=60.0,
        )
        return TRANSPORTS["broadcast"](surroundings)

    async with EngineClient(address, request_timeout_s=60, control_timeout_s=60) as client:
        pool = EnginePool([client], max_requests=8)
        sync = WeightSync(make_transport, ranks=OneRank(trainer), pool=pool, timeout_s=60)
        await sync.run(version=1)
        await sync.disconnect()
        return np.concatenate([(await client.score(tokens)).log_probs for tokens in sequences(probe)])


# SGLang's latent attention does not run on a CPU.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", SYNCED)
def test_experts_reach_the_engine(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    # Many buckets, so that some begin and end among the experts of a layer.
    monkeypatch.setattr(broadcast, "make_buckets", partial(make_buckets, max_bytes=20_000))
    # Not tied: SGLang's Qwen3-MoE keeps a head of its own whatever config.json says.
    served, trained = (tiny_model(family=family, name=f"model{seed}", seed=seed, tied=False) for seed in (0, 1))
    prompts = [Prompt(id=str(number), token_ids=np.array([2 + number, 3, 4]), text="") for number in range(3)]
    probe = make_probe(prompts, vocab_size=32, num_sequences=6, length=40, seed=0)
    engine = Engine(
        served,
        settings=RolloutSettings(startup_timeout_s=180),
        device_kind="cpu",
        dtype="float32",
        seed=7,
        log_path=tmp_path / "engine.log",
    )
    try:
        address = engine.start()
        trainer = make_trainer(trained, tmp_path)
        expected = trainer.log_probs(probe)
        found = asyncio.run(sync_and_score(trainer, address, probe, model=trained, directory=tmp_path))
        shutdown()
    finally:
        engine.stop()
    check_parity(found, expected, mask_T=probe.loss_mask, threshold=PARITY)
