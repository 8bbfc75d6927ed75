"""Weights of mixtures of experts, from the trainer through a process group into the real SGLang server: both give the same log-probs."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.settings import RolloutSettings, Settings
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.engine import Engine, EngineAddress
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Floats, Prompt, TrainBatch
from megatron_rl.weights.broadcast import BroadcastGroup, join_as_sender, send_buckets
from megatron_rl.weights.bucket import make_buckets, make_manifest
from megatron_rl.weights.parity import check_parity, make_probe, sequences

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


async def sync_and_score(trainer: Trainer, address: EngineAddress, probe: TrainBatch) -> Floats:
    """Log-probs [T] of the probe's tokens by the engine after it got the trainer's weights."""
    # Many buckets, so that some begin and end among the experts of a layer.
    buckets = make_buckets(make_manifest(trainer.weights()), max_bytes=20_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = BroadcastGroup(address="127.0.0.1", port=int(free.getsockname()[1]), world_size=2, name="experts", backend="gloo")
    async with EngineClient(address, request_timeout_s=60) as client:
        joining = client.join_group(
            address=group.address, port=group.port, rank_offset=1, world_size=2, name=group.name, backend=group.backend
        )
        process_group, _ = await asyncio.gather(asyncio.to_thread(join_as_sender, group, timeout_s=30), joining)
        await client.pause("abort")
        await client.begin_weight_update()
        sending = asyncio.create_task(asyncio.to_thread(send_buckets, trainer.weights(), buckets, group=process_group))
        for bucket in buckets:
            names, dtypes, shapes = zip(*((spec.name, spec.dtype, spec.shape) for spec in bucket), strict=True)
            await client.receive_bucket(names, dtypes=dtypes, shapes=shapes, group=group.name, version=1, flattened=True)
        await sending
        await client.end_weight_update()
        await client.resume()
        await client.leave_group(group.name)
        return np.concatenate([(await client.score(tokens)).log_probs for tokens in sequences(probe)])


# SGLang's latent attention does not run on a CPU.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ("qwen3_moe", "glm4_moe"))
def test_experts_reach_the_engine(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
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
        found = asyncio.run(sync_and_score(trainer, address, probe))
        shutdown()
    finally:
        engine.stop()
    check_parity(found, expected, mask_T=probe.loss_mask, threshold=PARITY)
