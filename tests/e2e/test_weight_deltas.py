"""Changes of weights instead of all weights, from the trainer into the real SGLang server: bit for bit what all weights leave."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_engine_weights import ONLY_DEEPSEEK, TINY_BUCKET, OneRank, make_trainer, serving

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress, free_port
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.errors import EngineError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.observe.metrics import metric_values
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer
from megatron_rl.weights.sync import TRANSPORTS, WeightSync
from megatron_rl.weights.transport import Surroundings, exported_specs


def change(trainer: Trainer, *, share: float = 0.01) -> None:
    """Move some elements of every weight."""
    with torch.no_grad():
        for _, tensor in trainer.weights():
            tensor[torch.rand(tensor.shape) < share] *= 1.25


# Experts in a stack and one by one, q with k and v, gate with up, latent attention with two of its tensors fused.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param("qwen3", 2, marks=pytest.mark.slow),
        ("qwen3_moe", 1),
        pytest.param("gpt_oss", 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 1, marks=pytest.mark.slow),
    ],
)
def test_deltas_leave_what_all_weights_leave(tiny_model: Callable[..., Path], tmp_path: Path, family: str, tp: int) -> None:
    config = ONLY_DEEPSEEK if family == "deepseek_v3" else {}
    served, trained = (tiny_model(family=family, name=f"model{seed}", seed=seed, tied=False, **config) for seed in (0, 1))
    trainer = make_trainer(trained, tmp_path)
    manifest = exported_specs(read_model_spec(trained), dtype="float32")
    total = sum(spec.num_bytes for spec in manifest)

    async def work(address: EngineAddress) -> None:
        surroundings = Surroundings(
            manifest=manifest,
            directory=tmp_path / "weights",
            free_address=lambda: ("127.0.0.1", free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX))),
            backend="gloo",
            num_engines=1,
            ranks_per_engine=tp,
            timeout_s=60.0,
            bucket_bytes=TINY_BUCKET,
        )
        version = 0
        async with EngineClient(address, request_timeout_s=60, control_timeout_s=60) as client:

            def opened(transport: str, *, deltas: bool) -> WeightSync:
                given = replace(surroundings, deltas=deltas)
                ranks, pool = OneRank(trainer), EnginePool([client], max_requests=8)
                return WeightSync(lambda urls: TRANSPORTS[transport](given), ranks=ranks, pool=pool, timeout_s=60, check_interval=10)

            async def num_bytes(sync: WeightSync) -> float:
                nonlocal version
                version += 1
                sent = metric_values(await sync.run(version=version))["weights/bytes"]
                assert await client.weight_version() == version
                return sent

            for transport in ("broadcast", "disk"):
                sync = opened(transport, deltas=True)
                assert await num_bytes(sync) >= total
                change(trainer)
                assert await num_bytes(sync) > total, "a delta, and all weights to compare"
                for _ in range(2):
                    change(trainer)
                    assert await num_bytes(sync) < 0.5 * total
                got = await client.checksums()
                await sync.disconnect()
                await client.load_weights(served, version=0)
                sync = opened("broadcast", deltas=False)
                assert await num_bytes(sync) == total
                assert await client.checksums() == got
                await sync.disconnect()
            sync = opened("broadcast", deltas=True)
            await num_bytes(sync)
            await client.load_weights(served, version=0)
            assert await num_bytes(sync) == total, "over a new connection"
            # As if what the engine had read by itself were not known.
            await client.load_weights(served, version=0)
            client.holds = "unknown"
            with pytest.raises(EngineError, match=r"a delta is to the weights .*, and this engine has None; it needs all weights"):
                await num_bytes(sync)

    try:
        with serving(served, tmp_path / "engine.log", has_weights=False, skip_server_warmup=True, tp_size=tp) as address:
            asyncio.run(work(address))
    finally:
        shutdown()
