"""The node under trial: models, settings, batches, and a run's own ranks and engines.

Sizes suit the devices of the node.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_rl.config.derived import AUTO_DTYPES
from megatron_rl.config.settings import ClusterSettings, Settings
from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.doctor import on_rank
from megatron_rl.doctor.tiny_models import FAMILIES, write_tiny_model
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.errors import MegatronRLError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.runtime.cluster import Reservation, reserve
from megatron_rl.runtime.engine_model import EngineModel
from megatron_rl.runtime.engines import EngineGroup
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.ray_session import ray_cluster
from megatron_rl.runtime.start import make_transport
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.system.deadlines import PLACEMENT_S
from megatron_rl.system.process_variables import shared_variables
from megatron_rl.training.offload import PARTS
from megatron_rl.types import Sample, TrainBatch
from megatron_rl.weights.sync import WeightSync
from megatron_rl.weights.transport import exported_specs

VOCAB = 512
RUN_STEPS, RUN_TIMEOUT_S, ENGINE_TIMEOUT_S = 3, 900.0, 300.0
LOG_TAIL_LINES = 12
_MLA_OF_KERNELS = {
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
"""The heads of DeepSeek-V3, the target of attention kernels of GPUs."""
_DEEPSEEK = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 1.0, "mscale_all_dim": 1.0},
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Keys read by SGLang without a default, and the rotary embedding for latent attention on a CPU."""


def even_sum(*, sample: Sample) -> float:
    """Return the trial's reward: 1 for an even sum of ids, so that groups have a signal."""
    return float(sample.response_ids.sum() % 2 == 0)


class TrialRanks(TrainerGroup):
    """The ranks of a run, whose processes build one model after another: no second import."""

    _in_use: int | None = None

    @property
    def workers(self) -> list[Any]:
        """The actors of the present layout, by rank."""
        return super().workers[: self._in_use]

    def open(self, settings: Settings) -> None:
        """Build the model of `settings` on the first ranks, in place of the last model."""
        if self._in_use is not None:
            self.apply(on_rank.close)
        self._settings, self._in_use = settings, settings.training.topology.num_ranks
        self.start()


@dataclass(frozen=True, slots=True)
class Joined:
    """Ranks and an engine of a run, their `sync`, and `wait`, which returns the result of work on the engine."""

    ranks: TrialRanks
    client: EngineClient
    pool: EnginePool
    sync: WeightSync
    watchdog: Watchdog
    wait: Callable[..., Any]


class Node:
    """`num_gpus` GPUs, or with kind "cpu" as many processes instead; all files below `directory`.

    Both ends have parameters of `dtype`. Sequences have up to `longest` tokens. Between layouts of
    one model the mean |difference| of log-probs is at most `tolerance` nats. Close the node in the
    end.
    """

    def __init__(self, kind: Literal["cpu", "cuda"], *, num_gpus: int, directory: Path) -> None:
        self.kind, self.num_gpus, self.directory = kind, num_gpus, directory
        self.dtype = AUTO_DTYPES[kind]
        self.tolerance, self.longest = (2e-2, 4096) if kind == "cuda" else (1e-5, 64)
        self._stack = ExitStack()
        self._ranks: TrialRanks | None = None

    @property
    def ranks(self) -> TrialRanks:
        """A rank for every GPU; a layout takes the first ranks. New ranks after `close`."""
        if self._ranks is None:
            settings = self.settings(self.directory, num_ranks=self.num_gpus)
            needs = Needs.of(settings.training.topology, None, colocate=False, device_kind=self.kind)
            reservation, watchdog = self._stack.enter_context(self.reserving(needs))
            self._ranks = TrialRanks(settings, reservation=reservation, watchdog=watchdog)
        return self._ranks

    @contextmanager
    def reserving(self, needs: Needs) -> Iterator[tuple[Reservation, Watchdog]]:
        """Start Ray and reserve a run's `needs`: a separate GPU for each rank."""
        variables = shared_variables(os.environ, device_kind=self.kind, interface=None)
        with (
            ray_cluster(address=None, num_processes=needs.num_ranks + needs.num_engines, logs=self.directory / "logs" / "ray") as lost,
            Watchdog() as watchdog,
        ):
            watchdog.watch("Ray", lost)
            yield reserve(needs, cluster=ClusterSettings(), device_kind=self.kind, timeout_s=PLACEMENT_S, variables=variables), watchdog

    @contextmanager
    def ranks_and_engine(self, settings: Settings) -> Iterator[Joined]:
        """Start ranks, at rest if beside an engine, and one engine without weights, in place of earlier ranks."""
        self.close()
        needs = Needs.of(settings.training.topology, settings.rollout, colocate=settings.runtime.colocate, device_kind=self.kind)
        with self.reserving(needs) as (reservation, watchdog):
            ranks = TrialRanks(settings, reservation=reservation, watchdog=watchdog)
            ranks.open(settings)
            if settings.runtime.colocate:
                # A first step loads kernels and opens communicators, and their memory is not the engine's.
                ranks.apply(on_rank.step, batch=self.batch())
                ranks.call("put_away", frozenset(PARTS))
            model = EngineModel(settings.model.path, has_weights=False)
            gpus = ranks.gpus if settings.runtime.colocate else ()
            group = EngineGroup(settings, model=model, reservation=reservation, watchdog=watchdog, gpus_of_ranks=gpus)
            try:
                addresses = [each for each in group.finish_start(group.begin_start()) if each is not None]
                client = EngineClient(addresses[0], request_timeout_s=ENGINE_TIMEOUT_S, control_timeout_s=ENGINE_TIMEOUT_S)
                with watchdog.entered(client, name="connecting", owner="the engine", timeout_s=ENGINE_TIMEOUT_S):
                    pool, transport = EnginePool([client], max_requests=8), partial(make_transport, settings, ranks, reservation, addresses)
                    sync = WeightSync(transport, ranks=ranks, pool=pool, timeout_s=ENGINE_TIMEOUT_S)
                    wait = partial(watchdog.wait, owner="the engine", timeout_s=ENGINE_TIMEOUT_S)
                    yield Joined(ranks, client, pool, sync, watchdog, wait)
            finally:
                group.stop()

    def close(self) -> None:
        """End the ranks."""
        self._ranks = None
        self._stack.close()

    def model(self, name: str, *, family: str = "qwen3", seed: int = 0, **config: Any) -> Path:
        """Make a tiny model of a family; with GPUs, the heads suit kernels of GPUs."""
        on_gpu: Mapping[str, Any] = {"hidden": 512, "num_attention_heads": 8, "head_dim": 64, "num_key_value_heads": 4}
        sizes: dict[str, Any] = dict(on_gpu) if self.kind == "cuda" else {"num_key_value_heads": 4}
        if family == "deepseek_v3":
            sizes = {**_DEEPSEEK, **({"hidden": 512, **_MLA_OF_KERNELS} if self.kind == "cuda" else {})}
        # Not tied: SGLang's mixtures of experts have a separate head whatever config.json says.
        options = {"tied": False, "max_position_embeddings": 8192, **sizes, **config}
        return write_tiny_model(self.directory / name.replace(" ", "-"), family=FAMILIES[family], seed=seed, vocab=VOCAB, **options)

    def settings(
        self, model: Path, *, attention: str = "auto", training: Mapping[str, Any] | None = None, sections: Mapping[str, Any] | None = None,
        **topology: Any,
    ) -> Settings:  # fmt: skip
        """Return settings for training `model` on answers, in the layout `topology`.

        Tensor parallel ranks have sequence parallelism. `sections` replace sections of the
        settings.
        """
        topology["sequence_parallel"] = topology.get("tp", 1) > 1
        return Settings.model_validate(
            {
                "run": {"directory": self.directory / "run"},
                "model": {"path": model, "dtype": self.dtype, "attention": attention, "deadline_s": 300.0},
                "data": {"train": "unused.jsonl"},
                "objective": {"policy_loss": {"kind": "sft"}, "aggregation": "token_mean"},
                "training": {
                    "topology": topology,
                    "max_tokens_per_micro_batch": self.longest,
                    "optimizer": {"lr": 1e-3},
                    **(training or {}),
                },
                **(sections or {}),
            }
        )

    def run_settings(
        self, name: str, model: Path, *, engines: Mapping[str, Any], temperature: float = 1.0, **training: Any
    ) -> dict[str, Any]:
        """Return settings of a run on rewarded answers of `model`; `engines` are its rollout and runtime sections."""
        rows = self.directory / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"{number}+{number % 7}=", "label": ""}) + "\n" for number in range(64)))
        return {
            "run": {"directory": str(self.directory / name), "num_steps": RUN_STEPS, "save_interval": 0},
            "model": {"path": str(model), "dtype": self.dtype},
            "data": {"train": str(rows), "prompts_per_step": 8, "samples_per_prompt": 4, "max_prompt_tokens": 16},
            "reward": {"function": f"{__name__}:even_sum"},
            "training": {"max_tokens_per_micro_batch": self.longest, "optimizer": {"lr": 1e-4}, **training},
            **engines,
            "rollout": {
                "num_engines": 1,
                **engines.get("rollout", {}),
                "sampling": {"max_response_tokens": 24, "temperature": temperature},
            },
        }

    def run(self, settings: Mapping[str, Any]) -> list[dict[str, float]]:
        """Run `megatron-rl train` as a user; return the metrics of each step. Raises MegatronRLError."""
        directory = Path(settings["run"]["directory"])
        file, log = directory.with_suffix(".yaml"), directory.with_suffix(".log")
        # YAML reads JSON.
        file.write_text(json.dumps(settings))
        with log.open("wb") as output:
            command = [sys.executable, "-m", "megatron_rl", "train", str(file)]
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_TIMEOUT_S, check=False).returncode
        if status:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise MegatronRLError(f"a run ended with status {status}, needs 0; the end of {log}:\n{tail}")
        return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]

    def batch(self, lengths: Sequence[int] | None = None) -> TrainBatch:
        """Return random sequences of a prompt token and `lengths` more (1, 17 and longest)."""
        rng = np.random.default_rng(0)
        lengths = (1, 17, self.longest - 1) if lengths is None else lengths
        return batch_from_sequences(
            prompts=[rng.integers(2, VOCAB, 1) for _ in lengths],
            responses=[rng.integers(2, VOCAB, length) for length in lengths],
            rewards=np.zeros(len(lengths)),
        )

    def weight_bytes(self, model: Path) -> int:
        """Return the bytes moved by a sync."""
        return sum(spec.num_bytes for spec in exported_specs(read_model_spec(model), dtype=self.dtype))
