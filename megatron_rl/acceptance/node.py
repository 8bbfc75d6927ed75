"""The node under test: its devices, models and settings of the right size for them, ranks and engines."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron_rl.acceptance.rank_processes import Ranks, free_address
from megatron_rl.acceptance.tiny_models import write_tiny_model
from megatron_rl.config.derived import AUTO_DTYPES
from megatron_rl.config.settings import RolloutSettings, Settings
from megatron_rl.device import quiet_megatron_imports
from megatron_rl.errors import UserError
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.engine import Engine, EngineAddress
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.types import TrainBatch
from megatron_rl.weights.interface import Surroundings
from megatron_rl.weights.sync import TRANSPORTS, WeightSync

with quiet_megatron_imports():
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.weights.manifest import make_manifest

STARTUP_TIMEOUT_S, SYNC_TIMEOUT_S, REQUEST_TIMEOUT_S = 300.0, 120.0, 120.0
VOCAB = 512

_MLA_OF_KERNELS = {
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
"""The heads of DeepSeek-V3, for which attention kernels of GPUs are made."""
_DEEPSEEK = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 1.0, "mscale_all_dim": 1.0},
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""What SGLang reads without a default, and the rotary embedding with which it builds latent attention on a CPU too."""


class Node:
    """`num_gpus` GPUs, or with kind "cpu" as many processes in their place; all is written below `directory`. Close it in the end."""

    def __init__(self, kind: Literal["cpu", "cuda"], *, num_gpus: int, directory: Path) -> None:
        self.kind, self.num_gpus, self.directory = kind, num_gpus, directory
        self._ranks: Ranks | None = None

    @property
    def dtype(self) -> str:
        """Of parameters, at both ends."""
        return AUTO_DTYPES[self.kind]

    @property
    def tolerance(self) -> float:
        """The largest mean |difference| of log-probs that two ways of computing them may have, nats."""
        return 2e-2 if self.kind == "cuda" else 1e-5

    @property
    def ranks(self) -> Ranks:
        """A rank for every GPU, of which a layout takes the first ones; others after `close`."""
        if self._ranks is None:
            self._ranks = Ranks(self.num_gpus, directory=self.directory)
        return self._ranks

    @property
    def num_trainers(self) -> int:
        """Ranks that train beside an engine of its own: two tensor parallel ones, two pairs of them where there are GPUs for both."""
        return 4 if self.num_gpus >= 6 else 2

    @property
    def engine_tp(self) -> int:
        """Tensor parallel ranks of an engine."""
        return 2 if self.num_gpus >= 6 else 1

    def engine_gpus(self) -> range:
        """The GPUs of an engine beside those that train. Raises UserError where they are too few."""
        needed = self.num_trainers + self.engine_tp
        if self.kind == "cuda" and self.num_gpus < needed:
            raise UserError(f"{self.num_trainers} ranks and 1 engine need {needed} GPUs, this node has {self.num_gpus}")
        return range(self.num_trainers, needed)

    def deaths(self) -> list[str]:
        """What is said of ranks that have died."""
        return [] if self._ranks is None else self._ranks.deaths()

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None

    def model(self, name: str, *, family: str = "qwen3", seed: int = 0, **config: Any) -> Path:
        """A tiny model of a family, with heads for which GPUs have kernels where there are GPUs."""
        on_gpu: Mapping[str, Any] = {"hidden": 512, "num_attention_heads": 8, "head_dim": 64, "num_key_value_heads": 4}
        sizes: dict[str, Any] = dict(on_gpu) if self.kind == "cuda" else {"num_key_value_heads": 4}
        if family == "deepseek_v3":
            sizes = {**_DEEPSEEK, **({"hidden": 512, **_MLA_OF_KERNELS} if self.kind == "cuda" else {})}
        # Not tied: SGLang's mixtures of experts keep a head of their own whatever config.json says.
        options = {"tied": False, "max_position_embeddings": 8192, **sizes, **config}
        return write_tiny_model(self.directory / name, family=family, seed=seed, vocab=VOCAB, **options)

    def settings(self, model: Path, *, attention: str = "auto", training: Mapping[str, Any] | None = None, **topology: Any) -> Settings:
        """Settings that train `model` on answers, in the layout `topology`, over tensor parallel ranks with sequence parallelism."""
        topology["sequence_parallel"] = topology.get("tp", 1) > 1
        return Settings.model_validate(
            {
                "run": {"directory": self.directory / "run"},
                "model": {"path": model, "dtype": self.dtype, "attention": attention},
                "data": {"train": "unused.jsonl"},
                "objective": {"policy_loss": "sft", "aggregation": "token_mean"},
                "training": {
                    "topology": topology,
                    "max_tokens_per_micro_batch": self.longest,
                    "optimizer": {"lr": 1e-3},
                    "step_timeout_s": 300.0,
                    **(training or {}),
                },
            }
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return 4096 if self.kind == "cuda" else 64

    def batch(self, lengths: Sequence[int] | None = None) -> TrainBatch:
        """Random sequences of a prompt token and so many more: 1, 17 and the longest when not given."""
        rng = np.random.default_rng(0)
        lengths = (1, 17, self.longest - 1) if lengths is None else lengths
        return TrainBatch.from_sequences(
            prompts=[rng.integers(2, VOCAB, 1) for _ in lengths], responses=[rng.integers(2, VOCAB, length) for length in lengths]
        )

    @contextmanager
    def serving(self, model: Path, *, gpus: Sequence[int], name: str, colocated: bool = False) -> Iterator[EngineAddress]:
        """An engine on these GPUs that serves `model`; a `colocated` one has a cache that is large enough to be seen when it sleeps."""
        # Nothing is generated before a test asks: latent attention cannot on a CPU.
        arguments: dict[str, Any] = {"skip_server_warmup": True, "max_total_tokens": self.cache_tokens if colocated else 16384}
        if self.kind == "cpu":
            arguments["tp_size"] = len(gpus)
        else:
            arguments |= {"mem_fraction_static": 0.5, "cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        engine = Engine(
            model,
            settings=RolloutSettings(startup_timeout_s=STARTUP_TIMEOUT_S, sglang=arguments),
            device_kind=self.kind,
            dtype=self.dtype,
            seed=0,
            log_path=self.directory / f"{name}.log",
            gpu_ids=tuple(map(visible_gpu, gpus)) if self.kind == "cuda" else (),
            colocated=colocated,
        )
        try:
            yield engine.start()
        finally:
            engine.stop()

    def client(self, address: EngineAddress) -> EngineClient:
        """A client, for an `async with` block."""
        return EngineClient(address, request_timeout_s=REQUEST_TIMEOUT_S, control_timeout_s=SYNC_TIMEOUT_S)

    def weight_sync(self, client: EngineClient, transport: str, *, model: Path, bucket_bytes: int) -> WeightSync:
        """The ranks' weights on their way to one engine, which is beside the first ranks or has GPUs of its own."""
        surroundings = Surroundings(
            manifest=make_manifest(read_model_spec(model), dtype=self.dtype),
            directory=self.directory / "weights",
            free_address=free_address,
            backend="nccl" if self.kind == "cuda" else "gloo",
            num_engines=1,
            ranks_per_engine=self.engine_tp,
            timeout_s=SYNC_TIMEOUT_S,
            ranks_beside={client.address.url: tuple(range(self.engine_tp))},
            bucket_bytes=bucket_bytes,
        )
        pool = EnginePool([client], max_requests=8)
        return WeightSync(lambda urls: TRANSPORTS[transport](surroundings), ranks=self.ranks, pool=pool, timeout_s=SYNC_TIMEOUT_S)

    @property
    def cache_tokens(self) -> int:
        """Tokens of a colocated engine's cache."""
        return 2**22 if self.kind == "cuda" else 16384

    def pool_bytes(self, model: Path) -> int:
        """Bytes of cache and weights that a colocated engine gives back on each of its GPUs, 0 without GPUs."""
        if self.kind == "cpu":
            return 0
        spec = read_model_spec(model)
        cache = self.cache_tokens * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * torch.bfloat16.itemsize
        return (cache + self.weight_bytes(model)) // self.engine_tp

    def weight_bytes(self, model: Path) -> int:
        """Bytes that a sync moves."""
        return sum(spec.num_bytes for spec in make_manifest(read_model_spec(model), dtype=self.dtype))

    def checksum(self, model: Path, *, gpus: Sequence[int], name: str) -> str:
        """What an engine says that was started on `model`."""

        async def ask(address: EngineAddress) -> str:
            async with self.client(address) as client:
                return await client.checksum()

        with self.serving(model, gpus=gpus, name=name) as address:
            return asyncio.run(ask(address))


def visible_gpu(number: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls the GPU that is `number` here, where ranks count those that they see."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if named is None else named.split(",")[number]


def has_transformer_engine() -> bool:
    """Whether ranks on GPUs can take its kernels."""
    import importlib.util

    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
