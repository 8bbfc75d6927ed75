"""Everything that one Megatron rank can do: log-probabilities, training, weights out, checkpoints."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import Settings
from megatron_rl.data.packing import pack, sequence_multiple
from megatron_rl.device import Device, local_device, prepare_megatron
from megatron_rl.models.build import build_model
from megatron_rl.models.saving import save_hf
from megatron_rl.models.spec import ModelSpec, read_model_spec, resolve_attention, transformer_config
from megatron_rl.models.weights import export_hf_weights, load_hf_weights
from megatron_rl.observe.metrics import Metric
from megatron_rl.training import checkpoint, passes
from megatron_rl.training.micro_batch import MicroBatch, make_micro_batch
from megatron_rl.training.optimizer import build_optimizer, build_scheduler, make_configs, wrap_ddp
from megatron_rl.training.reference import ReferenceWeights, complete_parameters
from megatron_rl.training.step import StepRunner
from megatron_rl.training.token_data import check_objective, make_token_data, needs_old_log_probs
from megatron_rl.training.topology import Place, Topology, initialize
from megatron_rl.types import Floats, Ints, Shard, TrainBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """One rank's share of the policy and its optimizer.

    Methods are collective over all ranks of the topology unless they say otherwise: every rank calls each in the same order.
    """

    def __init__(self, settings: Settings, *, rank: int, init_method: str, local_rank: int = 0) -> None:
        """Join the ranks at `init_method` and build the model from `settings.model.path` with its weights.

        Raises UserError for settings that do not fit the model, the layout or the installed megatron-core.
        """
        self._settings = settings
        self._objective = resolve_objective(settings)
        self._device = local_device(local_rank)
        prepare_megatron(self._device)
        self._topology = Topology.of(settings.training.topology)
        self._spec = read_model_spec(settings.model.path)
        check_layout(self._topology, self._spec)
        initialize(
            self._topology,
            rank=rank,
            init_method=init_method,
            device=self._device,
            timeout_s=settings.training.step_timeout_s,
            seed=settings.run.seed,
        )
        self._place = Place.here()
        self._build()
        self._reference = ReferenceWeights(self._model) if self._objective.trains_by_rewards else None
        self._steps = StepRunner(
            self._objective,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            dump_directory=settings.run.directory / "dumps",
            seed=settings.run.seed,
        )

    def _build(self) -> None:
        settings, training = self._settings, self._settings.training
        dtype = model_dtype(settings, self._device)
        attention = resolve_attention(settings.model.attention)
        config = transformer_config(
            self._spec, topology=training.topology, dtype=dtype, overrides=settings.model.megatron, attention=attention
        )
        chunks = build_model(self._spec, config, attention=attention)
        load_hf_weights(chunks, self._spec, settings.model.path)
        prepare_megatron(self._device)
        optimizer_config, ddp_config = make_configs(training.optimizer, training.ddp, dtype=dtype)
        self._model = wrap_ddp(chunks, config, ddp_config)
        self._optimizer = build_optimizer(optimizer_config, self._model)
        total_steps = settings.run.num_steps * training.optimizer_steps_per_batch
        self._scheduler = build_scheduler(self._optimizer, optimizer_config, training.schedule, total_steps=total_steps)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel rank: the number of the shard that `train` wants."""
        return self._place.dp_rank

    def _policy(self, temperature: float | None = None) -> passes.Policy:
        if temperature is None:
            temperature = 1.0 if self._settings.supervised else self._settings.rollout.sampling.temperature
        return passes.Policy(model=self._model, place=self._place, vocab_size=self._spec.vocab_size, temperature=temperature)

    def _micro_batches(self, batch: TrainBatch, parts: Sequence[Ints], *, all_tokens: bool = False) -> list[MicroBatch]:
        """Tensors of the micro-batches, and empty ones behind them where an interleaved pipeline wants a multiple of its stages."""
        missing = -len(parts) % self._topology.pp if self._topology.vpp > 1 else 0
        parts = [*parts, *[np.empty(0, np.int64)] * missing]
        return [
            make_micro_batch(
                batch, rows, topology=self._topology, place=self._place, device=self._device.torch_device, all_tokens=all_tokens
            )
            for rows in parts
        ]

    def _log_probs(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], *, reference: bool, temperature: float | None = None
    ) -> Floats:
        policy = self._policy(temperature)
        with complete_parameters(self._model):
            if not reference:
                values = passes.log_probs(policy, micro_batches, num_tokens=len(batch.tokens))
            else:
                assert self._reference is not None, "supervised training keeps no reference weights"
                with self._reference.in_place():
                    values = passes.log_probs(policy, micro_batches, num_tokens=len(batch.tokens))
        return np.asarray(values.cpu().numpy(), dtype=np.float32)

    def log_probs(self, batch: TrainBatch, *, reference: bool = False, temperature: float | None = None) -> Floats:
        """Log-probs [T] in nats of every token of `batch` given those before it, 0 at each sequence's first token.

        Of the current weights or of the initial `reference` ones, at `temperature` or else that of the rollout (1 for
        supervised training). All ranks of one data-parallel rank pass the same batch and get the same values.
        """
        unit = sequence_multiple(self._topology.cp)
        lengths = -(-batch.lengths // unit) * unit
        budget = self._settings.training.max_tokens_per_micro_batch * self._topology.cp
        parts = pack(lengths, num_ranks=1, max_tokens=budget)[0]
        micro_batches = self._micro_batches(batch, parts, all_tokens=True)
        return self._log_probs(batch, micro_batches, reference=reference, temperature=temperature)

    def train(self, shard: Shard) -> list[dict[str, Metric]]:
        """Train on one rollout batch, of which `shard` is this data-parallel rank's part; metrics of each optimizer step.

        Merging the metrics of all ranks gives the step's: a rank that would only repeat another's returns empty dicts.
        A step with a non-finite loss or gradient changes no weights; its micro-batches are written to the run's `dumps`.
        """
        parts = [self._micro_batches(shard.batch, step.micro_batches) for step in shard.steps]
        everything = [micro_batch for part in parts for micro_batch in part]
        reference = old = None
        if self._objective.trains_by_rewards:
            reference = self._log_probs(shard.batch, everything, reference=True)
        if needs_old_log_probs(self._objective, num_steps=len(parts)):
            old = self._log_probs(shard.batch, everything, reference=False)
        data = make_token_data(self._objective, shard, old=old, reference=reference)
        policy = self._policy()
        return [self._steps.run(policy, part, plan.totals, data) for part, plan in zip(parts, shard.steps, strict=True)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under their Hugging Face names, one whole tensor at a time, the same on every rank."""
        with complete_parameters(self._model):
            yield from export_hf_weights([chunk.module for chunk in self._model], self._spec)

    def save(self, directory: Path) -> None:
        """Write a checkpoint that `load` continues from; the directory appears complete or not at all. Raises UserError."""
        checkpoint.save(
            directory, model=self._model, optimizer=self._optimizer, scheduler=self._scheduler, counters=self._steps.state()
        )

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint, of this layout or another. The reference stays the model of the settings. Raises UserError."""
        counters = checkpoint.load(directory, model=self._model, optimizer=self._optimizer, scheduler=self._scheduler)
        self._steps.restore(counters)

    def save_hf(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory. Raises UserError when it cannot be written."""
        weights = self.weights()

        def write(path: Path) -> None:
            try:
                save_hf(path, weights, source=self._settings.model.path)
            finally:
                _drain(weights)

        checkpoint.on_rank_zero(write, directory, meanwhile=lambda: _drain(weights))


def _drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Take part in gathering the tensors that are left, without keeping them."""
    for _ in weights:
        pass


def resolve_objective(settings: Settings) -> Objective:
    """The objective with the response budget as its constant length, where that is not set. Raises UserError when it cannot be trained."""
    objective = settings.objective
    check_objective(objective)
    if objective.aggregation == "sequence_mean_token_sum_norm" and objective.max_response_length is None:
        return dataclasses.replace(objective, max_response_length=settings.rollout.sampling.max_response_tokens)
    return objective


def check_layout(topology: Topology, spec: ModelSpec) -> None:
    """Raise UserError when the model cannot be divided as `topology` asks."""
    topology.check_model(
        num_layers=spec.num_layers, num_heads=spec.num_heads, num_kv_groups=spec.num_kv_heads, ffn_size=spec.ffn_hidden_size
    )


def model_dtype(settings: Settings, device: Device) -> torch.dtype:
    """The parameters' dtype that `settings.model.dtype` means on `device`."""
    return device.default_dtype if settings.model.dtype == "auto" else DTYPES[settings.model.dtype]
