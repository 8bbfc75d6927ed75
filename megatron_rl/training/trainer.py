"""Everything that one Megatron rank can do: log-probabilities, training, weights out, checkpoints."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import Settings
from megatron_rl.data.packing import pack, sequence_multiple
from megatron_rl.device import local_device, prepare_megatron
from megatron_rl.errors import UserError
from megatron_rl.models.reading import read_model_spec
from megatron_rl.models.saving import save_hf
from megatron_rl.models.spec import ModelSpec
from megatron_rl.models.weights import export_hf_weights
from megatron_rl.observe.metrics import Metric
from megatron_rl.training import checkpoint, passes
from megatron_rl.training.critic import Critic, critic_optimizer
from megatron_rl.training.expert_load import check_record, check_routing_replay
from megatron_rl.training.micro_batch import MicroBatch, make_micro_batch
from megatron_rl.training.offload import PARTS, ModelMemory, Part
from megatron_rl.training.reference import ReferenceWeights
from megatron_rl.training.step import StepRunner
from megatron_rl.training.teacher import Teacher
from megatron_rl.training.token_data import TokenData, check_objective, make_token_data, needs_old_log_probs
from megatron_rl.training.topology import Place, Topology, initialize
from megatron_rl.training.trained_model import TrainedModel, build_trained_model, complete_parameters
from megatron_rl.types import Floats, Ints, Shard, TrainBatch


class Trainer:
    """One rank's share of the policy and, for ppo, of its critic.

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
        check_layout(self._topology, self._spec, settings.model.megatron)
        check_routing_replay(settings, self._spec)
        initialize(
            self._topology,
            rank=rank,
            init_method=init_method,
            device=self._device,
            timeout_s=settings.training.step_timeout_s,
            seed=settings.run.seed,
        )
        self._place = Place.here()
        self._model = build_trained_model(settings, self._spec, device=self._device, optimizer=settings.training.optimizer)
        self._critic = self._build_critic() if settings.has_critic else None
        self._reference = ReferenceWeights(self._model.chunks) if settings.keeps_reference else None
        self._teacher = self._build_teacher() if self._objective.distillation_coef else None
        self._steps = StepRunner(
            self._objective,
            self._model,
            dump_directory=settings.run.directory / "dumps",
            seed=settings.run.seed,
            frozen_steps=settings.training.critic.warmup_steps if settings.has_critic else 0,
        )

        self._memories = {name: ModelMemory(model) for name, model in self.trained_models().items()}

    def _build_critic(self) -> Critic:
        settings = self._settings
        optimizer = critic_optimizer(settings.training)
        model = build_trained_model(settings, self._spec, device=self._device, optimizer=optimizer, with_value_head=True)
        return Critic(self._objective, model, place=self._place, dump_directory=settings.run.directory / "dumps")

    def _build_teacher(self) -> Teacher:
        path = self._settings.model.teacher
        assert path is not None, "settings without a teacher have no distillation"
        check_layout(self._topology, read_model_spec(path), self._settings.model.megatron)
        return Teacher(self._settings, path, device=self._device, place=self._place)

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel rank: the number of the shard that `train` wants."""
        return self._place.dp_rank

    @property
    def critic(self) -> Critic | None:
        """The critic, None when the objective needs none."""
        return self._critic

    def _policy(self, temperature: float | None = None) -> passes.Policy:
        if temperature is None:
            temperature = 1.0 if self._settings.supervised else self._settings.rollout.sampling.temperature
        return passes.Policy(
            chunks=self._model.chunks,
            place=self._place,
            vocab_size=self._spec.vocab_size,
            temperature=temperature,
            replays_routing=self._settings.training.routing_replay,
        )

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
        with complete_parameters(self._model.chunks):
            if not reference:
                values = passes.log_probs(policy, micro_batches, num_tokens=len(batch.tokens))
            else:
                assert self._reference is not None, "log-probs of a reference that is not kept"
                # Another model: it routes by itself.
                policy = dataclasses.replace(policy, replays_routing=False)
                with self._reference.in_place():
                    values = passes.log_probs(policy, micro_batches, num_tokens=len(batch.tokens))
        return np.asarray(values.cpu().numpy(), dtype=np.float32)

    def log_probs(self, batch: TrainBatch, *, reference: bool = False, temperature: float | None = None) -> Floats:
        """Log-probs [T] in nats of every token of `batch` given those before it, 0 at each sequence's first token.

        Of the current weights or of the initial `reference` ones, at `temperature` or else that of the rollout (1 for
        supervised training). All ranks of one data-parallel rank pass the same batch and get the same values. Raises UserError
        when the settings keep no reference.
        """
        if reference and self._reference is None:
            raise UserError(
                "Trainer.log_probs was asked for the reference's, but no term of this objective reads them, so that its weights are not "
                "kept; set a KL coefficient, or training.reference_interval"
            )
        check_record(batch, self._spec)
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
        check_record(shard.batch, self._spec)
        parts = [self._micro_batches(shard.batch, step.micro_batches) for step in shard.steps]
        data = self._token_data(shard, [micro_batch for part in parts for micro_batch in part], num_steps=len(parts))
        policy, metrics = self._policy(), []
        for part, plan in zip(parts, shard.steps, strict=True):
            metrics.append(self._steps.run(policy, part, plan.totals, data))
            if self._critic is not None:
                metrics[-1] |= self._critic.step(part, plan.totals, data, number=self._steps.num_steps)
        if self._critic is not None:
            metrics[0] |= self._critic.judge(shard.batch, data)
        return metrics

    def _asks_reference(self, num_steps: int) -> bool:
        """Whether the coming batch of `num_steps` optimizer steps passes through the reference, for the objective or to measure."""
        if not self._settings.keeps_reference or self._objective.needs_reference:
            return self._settings.keeps_reference
        return self._steps.num_steps // num_steps % self._settings.training.reference_interval == 0

    def _token_data(self, shard: Shard, micro_batches: Sequence[MicroBatch], *, num_steps: int) -> TokenData:
        """Everything about the batch's tokens that stays the same through its optimizer steps, from the models before the first."""
        reference = old = state_values = teacher = None
        if self._asks_reference(num_steps):
            reference = self._log_probs(shard.batch, micro_batches, reference=True)
        if needs_old_log_probs(self._objective, num_steps=num_steps):
            old = self._log_probs(shard.batch, micro_batches, reference=False)
        if self._critic is not None:
            state_values = self._critic.state_values(micro_batches, num_tokens=len(shard.batch.tokens))
        if self._teacher is not None:
            temperature = self._settings.rollout.sampling.temperature
            teacher = self._teacher.log_probs(micro_batches, num_tokens=len(shard.batch.tokens), temperature=temperature)
        return make_token_data(
            self._objective,
            shard,
            old=old,
            reference=reference,
            state_values=state_values,
            teacher=teacher,
            kl_reward_coef=self._steps.kl_reward_coef,
        )

    def trained_models(self) -> dict[str, TrainedModel]:
        """The models with an optimizer, by their names in a checkpoint: `policy` and, for ppo, `critic`."""
        policy = {checkpoint.POLICY: self._model}
        return policy if self._critic is None else {**policy, "critic": self._critic.model}

    def put_away(self, parts: Collection[Part] = PARTS) -> None:
        """Free the device memory of these parts of all models; for `weights` the parameters must be here, for all else everything.

        Not collective; a part that is away already stays so.
        """
        for memory in self._memories.values():
            memory.put_away(parts)

    def take_back(self, parts: Collection[Part] = PARTS) -> None:
        """Bring these parts of all models back to the device, bit for bit. Not collective."""
        for memory in self._memories.values():
            memory.take_back(parts)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under their Hugging Face names, one whole tensor at a time, the same on every rank."""
        with complete_parameters(self._model.chunks):
            yield from export_hf_weights([chunk.module for chunk in self._model.chunks], self._spec)

    def save(self, directory: Path) -> None:
        """Write a checkpoint that `load` continues from; the directory appears complete or not at all. Raises UserError."""
        checkpoint.save(directory, self.trained_models(), counters=self._steps.state())

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint, of this layout or another. The reference stays the model of the settings. Raises UserError."""
        self._steps.restore(checkpoint.load(directory, self.trained_models()))

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


def check_layout(topology: Topology, spec: ModelSpec, megatron: Mapping[str, Any]) -> None:
    """Raise UserError when the model cannot be divided as `topology` and the user's fields of megatron-core's configuration ask."""
    topology.check_model(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_groups=spec.num_kv_heads,
        ffn_size=spec.ffn_hidden_size,
        megatron=megatron,
    )
