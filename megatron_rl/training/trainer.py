"""All work of one Megatron rank: log-probabilities, training, weights out, checkpoints."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from torch import Tensor, distributed

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.checkpoints import manifest, training_state
from megatron_rl.checkpoints.hugging_face import MAX_SHARD_BYTES
from megatron_rl.checkpoints.saving import HostCopies, PolicyFiles, Saving, StateFiles
from megatron_rl.checkpoints.stored_weights import mtp_tensors
from megatron_rl.config.derived import step_deadline_s
from megatron_rl.config.settings import ModelSettings, Settings, TrainingSettings
from megatron_rl.errors import UserError
from megatron_rl.models.build import TrainedModel, complete_parameters
from megatron_rl.models.hf_weights import export_hf_weights
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.observe.metrics import Metric
from megatron_rl.observe.spans import Spans
from megatron_rl.plugins.loader import load
from megatron_rl.training import passes
from megatron_rl.training.advantages import TokenData, make_token_data, needs_old_log_probs, values_before
from megatron_rl.training.collectives import shares_of_data_parallel
from megatron_rl.training.critic import Critic
from megatron_rl.training.expert_load import check_routing_replay
from megatron_rl.training.joining import Meeting, join
from megatron_rl.training.micro_batch import MicroBatch, MicroBatches
from megatron_rl.training.model_check import check_layout
from megatron_rl.training.objective_checks import check_batch, check_fits, check_objective, resolve_objective, teacher_path
from megatron_rl.training.offload import PARTS, ModelMemory, Part
from megatron_rl.training.resting import Reference
from megatron_rl.training.step import Gradients, PolicySteps
from megatron_rl.training.teacher import Teacher
from megatron_rl.training.token_record import TokenRecord
from megatron_rl.training.topology import Place, Topology, shutdown
from megatron_rl.training.trained_model import build_trained_model, model_dtype
from megatron_rl.training.whole_batch import check_same_everywhere, divide, merge_over_ranks, with_signal
from megatron_rl.types import Floats, Shard, TrainBatch


class Trainer:
    """One rank of a training: the policy and, for ppo, its critic, with their optimizers. Needs no
    data, engines or run directory.

    Every process of `training.topology.num_ranks` makes one, and calls the same methods in the same
    order with the same arguments: collective unless stated otherwise. Legend: T tokens of the batch.

    `objective` is GRPO by default, log-probs those of softmax(logits / temperature). A decaying
    learning rate falls over `total_steps` optimizer steps, if not over
    training.schedule.decay_steps. Micro-batches of a non-finite loss or gradient are written to
    `dump_directory`. `meeting` is for processes outside torchrun. Raises UserError for a misfit of
    model, layout, number of processes or megatron-core, and, on all ranks, for weights that differ
    from their manifest.
    """

    def __init__(
        self,
        *,
        model: ModelSettings,
        training: TrainingSettings | None = None,
        objective: Objective | None = None,
        temperature: float = 1.0,
        total_steps: int | None = None,
        seed: int = 0,
        dump_directory: Path | str | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        training, dumps = training or TrainingSettings(), None if dump_directory is None else Path(dump_directory)
        self._model_settings, self._training, self._seed = model, training, seed
        self._objective = (objective or Objective()).loaded(load)
        check_objective(self._objective)
        self._topology = Topology.of(training.topology)
        self._spec = read_model_spec(model.path)
        check_layout(self._topology, self._spec, model.megatron)
        check_routing_replay(model, training, self._spec)
        self._device, self._owns_group = join(self._topology, meeting or Meeting(), timeout_s=step_deadline_s(model), seed=seed)
        self._waiting: tuple[Gradients, Gradients | None] | None = None
        self._saving: Saving | None = None
        self._host_copies, self.spans = HostCopies(), Spans()  # the parts of each `train_shard`
        with ExitStack() as undo:
            # A process without a complete rank must not stay in the groups.
            undo.callback(self.close)
            place = Place.here()
            self.dp_rank = place.dp_rank
            """The number of this rank's batch shard for `train_shard`."""
            self._micro_batches = MicroBatches(self._topology, place, self._device.torch_device, training.max_tokens_per_micro_batch)
            teacher = teacher_path(self._objective, model) if self._objective.distillation_coef else None
            for path in dict.fromkeys(path for path in (model.path, teacher) if path is not None):
                training_state.check_on_ranks(partial(manifest.check, path, "weights"))
            build = partial(build_trained_model, model, training, self._spec, device=self._device, total_steps=total_steps)
            frozen = training.critic.warmup_steps if self._objective.has_critic else 0
            self._model = build(optimizer=training.optimizer, total_steps=total_steps and total_steps - frozen)
            self._policy = passes.Policy(self._model.chunks, place, self._spec.vocab_size, temperature, training.routing_replay)
            self.critic = Critic(build, self._objective, training, place=place, dumps=dumps) if self._objective.has_critic else None
            self._reference = Reference(model.path, self._model.chunks) if training.keeps_reference(self._objective) else None
            self._teacher = Teacher(model, training.topology, teacher, device=self._device, place=place) if teacher is not None else None
            self._steps = PolicySteps(self._objective, self._model, self._policy, dumps=dumps, seed=seed, frozen_steps=frozen)
            self._memories = {name: ModelMemory(trained) for name, trained in self.trained_models().items()}
            undo.pop_all()

    @classmethod
    def of(cls, settings: Settings, *, rank: int, init_method: str) -> "Trainer":
        """Return the trainer of a run with these settings. Raises UserError as the constructor."""
        sampling = settings.rollout.sampling
        return cls(
            model=settings.model,
            training=settings.training,
            objective=resolve_objective(settings.objective, response_budget=sampling.max_response_tokens),
            temperature=1.0 if settings.supervised else sampling.temperature,
            total_steps=settings.run.num_steps * settings.training.optimizer_steps_per_batch,
            seed=settings.run.seed,
            dump_directory=settings.run.directory / "dumps",
            meeting=Meeting(rank, 0, init_method),
        )

    def close(self) -> None:
        """Leave the other ranks, but no foreign process group; allow another Trainer here."""
        self._let_go_of_state()
        if self._owns_group:
            shutdown()
        else:
            parallel_state.destroy_model_parallel()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_go_of_state(self) -> None:
        """Wait until no save reads the state: first in every method that changes or moves it."""
        if self._saving is not None:
            self._saving.wait_for_copies()

    def _log_probs(self, num_tokens: int, micro_batches: Sequence[MicroBatch], *, reference: bool = False, **distribution: Any) -> Floats:
        policy = dataclasses.replace(self._policy, **distribution)
        weights: AbstractContextManager[None] = nullcontext()
        if reference:
            if self._reference is None:
                unread = "log_probs of the reference were asked for, but no term of this objective reads them, so it is not kept"
                raise UserError(f"{unread}; set a KL coefficient, or training.reference_interval")
            # Another model has its own routing.
            policy, weights = dataclasses.replace(policy, replays_routing=False), self._reference.in_place()
            self._let_go_of_state()
        with complete_parameters(self._model.chunks), weights:
            return passes.log_probs(policy, micro_batches, num_tokens=num_tokens)

    def log_probs(self, batch: TrainBatch, *, reference: bool = False, temperature: float | None = None) -> Floats:
        """Return log-probs [T], nats, of every token of `batch`; 0 for each sequence's first.

        The weights are the current or the initial `reference` ones, `temperature` by default the
        trainer's. Each data-parallel rank computes a share. Raises UserError for different batches.

        Before several steps: `replace(batch, old_log_probs=trainer.log_probs(batch))`.
        """
        micro_batches, given = self._shared_micro_batches(batch), {} if temperature is None else {"temperature": temperature}
        return shares_of_data_parallel(self._log_probs(len(batch.tokens), micro_batches, reference=reference, **given))

    def own_log_probs(self, batch: TrainBatch, **distribution: Any) -> Floats:
        """Return `log_probs` [T] of the current weights, undivided, for the parity probe; `distribution` as in `passes.Policy`."""
        check_fits(batch, self._spec)
        return self._log_probs(len(batch.tokens), self._micro_batches.of_all_tokens(batch, divided=False), **distribution)

    def values(self, batch: TrainBatch) -> Floats:
        """Return the critic's values [T], reward units, before each token.

        A first token has any number. Raises UserError without a critic, and for unequal batches.
        """
        if self.critic is None:
            raise UserError("values were asked for, but only objective.advantage.kind gae has a critic; choose it")
        values = self.critic.state_values(self._shared_micro_batches(batch), num_tokens=len(batch.tokens))
        return values_before(shares_of_data_parallel(values))

    def _shared_micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        """Return this data-parallel rank's share of all tokens of a batch held by every rank."""
        check_fits(batch, self._spec)
        check_same_everywhere(batch)
        return self._micro_batches.of_all_tokens(batch, divided=True)

    def train(self, batch: TrainBatch) -> list[dict[str, float]]:
        """Train on a whole batch, passed by every rank; return each step's metrics of all ranks.

        For a loop of your own: a run divides the batch before and calls `train_shard`. Each of
        `training.optimizer_steps_per_batch` steps takes a random part of the trajectories. A
        non-finite loss or gradient changes no weights and sets `train/skipped_steps`; see
        observe/metrics.py. Raises UserError for a batch that misfits or differs between ranks.

        Example: `loss = trainer.train(batch)[-1]["train/loss"]`
        """
        self._refuse_waiting("train")
        check_same_everywhere(batch)
        number = self._steps.num_steps // self._training.optimizer_steps_per_batch
        shards = divide(with_signal(self._objective, batch), self._training, seed=self._seed + number)
        return merge_over_ranks(self.train_shard(shards[self.dp_rank]))

    def train_shard(self, shard: Shard, *, expected: Expected | None = None, record: TokenRecord | None = None) -> list[dict[str, Metric]]:
        """Train on this rank's `shard`; return its share of the metrics. `record` gets its tokens' values. Raises ParityError."""
        self._let_go_of_state()
        with self.spans.measure("log-probs, advantages"):
            parts, data = self._prepare(shard, record, entropy=None if expected is None else expected.entropy)
        metrics, measure = [], self.spans.measure
        for number, (part, totals) in enumerate(zip(parts, shard.totals, strict=True)):
            known = expected if not number or data.old_log_probs is not None else None  # by the engines' weights
            with measure("forward, backward", count=totals.num_sequences):
                gradients = self._steps.forward_backward(part, totals, data, expected=known)
            with measure("optimizer"):
                metrics.append({**gradients.metrics, **self._steps.apply(gradients)})
            if self.critic is not None:
                with measure("critic"):
                    gradients = self.critic.forward_backward(part, totals, data, number=gradients.number)
                    metrics[-1] |= {**gradients.metrics, **self.critic.apply(gradients)}
        if self.critic is not None:
            metrics[0] |= self.critic.judge(shard.batch, data)
        return metrics

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """Compute the gradient over `batch`, one whole step; return metrics of all ranks.

        Every rank passes the same batch; no weight changes. Means are over this batch, and
        advantages are made within it. A part of a larger batch brings `advantages`, and
        `old_log_probs` unless the weights are still the generator's. Raises UserError as `train`,
        or when a gradient waits for `optimizer_step`.

        Example: `metrics = trainer.forward_backward(batch.select(rows)) | trainer.optimizer_step()`
        """
        self._refuse_waiting("forward_backward")
        self._let_go_of_state()
        check_same_everywhere(batch)
        shard = divide(with_signal(self._objective, batch), self._training, seed=self._seed, optimizer_steps=1)[self.dp_rank]
        (part,), data = self._prepare(shard)
        policy = self._steps.forward_backward(part, shard.totals[0], data)
        metrics, critic = dict(policy.metrics), None
        if self.critic is not None:
            critic = self.critic.forward_backward(part, shard.totals[0], data, number=policy.number)
            metrics |= {**critic.metrics, **self.critic.judge(shard.batch, data)}
        self._waiting = policy, critic
        return merge_over_ranks([metrics])[0]

    def optimizer_step(self) -> dict[str, float]:
        """Update the weights by a finite gradient of `forward_backward`; return metrics over ranks.

        They are norm, learning rate and skipped steps. Raises UserError when no gradient waits.
        """
        if self._waiting is None:
            raise UserError("optimizer_step has no gradient to apply; call forward_backward(batch) first")
        self._let_go_of_state()
        (policy, critic), self._waiting = self._waiting, None
        metrics = self._steps.apply(policy)
        if self.critic is not None and critic is not None:
            metrics |= self.critic.apply(critic)
        return merge_over_ranks([metrics])[0]

    def _refuse_waiting(self, what: str) -> None:
        if self._waiting is not None:
            raise UserError(
                f"{what} was called while the gradient of forward_backward waits, and would lose it; call optimizer_step() first (one "
                "forward_backward takes all sequences of an optimizer step, whose micro-batches it makes itself)"
            )

    def _prepare(
        self, shard: Shard, record: TokenRecord | None = None, *, entropy: EntropyAware | None = None
    ) -> tuple[list[list[MicroBatch]], TokenData]:
        """Return each step's micro-batches, and the shard's token data, drawn by `entropy` if given. UserError for a misfit."""
        check_fits(shard.batch, self._spec)
        check_batch(self._objective, shard.batch, rewards=shard.all_rewards, trajectory_ids=shard.all_trajectory_ids)
        parts = [self._micro_batches.of_parts(shard.batch, step) for step in shard.steps]
        batch, num_tokens = shard.batch, len(shard.batch.tokens)
        everything = [micro_batch for part in parts for micro_batch in part]
        # All by the models before the first step.
        reference = old = state_values = teacher = drawn = None
        measures = self._objective.needs_reference or self._steps.num_steps // len(parts) % (self._training.reference_interval or 1) == 0
        if batch.ref_log_probs is None and self._reference is not None and measures:
            reference = self._log_probs(num_tokens, everything, reference=True)
        if needs_old_log_probs(self._objective, num_steps=len(parts)) and batch.old_log_probs is None:
            old = self._log_probs(num_tokens, everything)
        if entropy is not None:
            drawn = self._log_probs(num_tokens, everything, entropy=entropy)
        if self.critic is not None and batch.values is None:
            state_values = self.critic.state_values(everything, num_tokens=num_tokens)
        if self._teacher is not None:
            teacher = self._teacher.log_probs(everything, num_tokens=num_tokens, temperature=self._policy.temperature)
        data = make_token_data(
            self._objective, shard, old=old, reference=reference, state_values=state_values, teacher=teacher,
            kl_reward_coef=self._steps.controls.kl_reward_coef(self._objective),
        )  # fmt: skip
        return parts, dataclasses.replace(data, drawn_log_probs=drawn, record=record)

    def trained_models(self) -> dict[str, TrainedModel]:
        """Return the trained models by checkpoint name: `policy` and, for ppo, `critic`."""
        policy = {training_state.POLICY: self._model}
        return policy if self.critic is None else {**policy, "critic": self.critic.model}

    def put_away(self, parts: Collection[Part] = PARTS) -> None:
        """Free the device memory of `parts` of all models. Not collective.

        A part already away stays away. `weights` needs the parameters, all else everything. Raises
        UserError while a gradient waits.
        """
        self._refuse_waiting("put_away")
        self._let_go_of_state()
        for memory in self._memories.values():
            memory.put_away(parts)

    def take_back(self, parts: Collection[Part] = PARTS) -> None:
        """Bring these parts of all models back to the device, bit for bit. Not collective."""
        for memory in self._memories.values():
            memory.take_back(parts)

    def weights(self, *, receivers: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights by Hugging Face names, one whole tensor at a time.

        Shapes and names equal the directory written by `save_hf`; the dtype is the model's. Each
        tensor is gathered on request: every rank takes all tensors. Tied embeddings come once,
        without the head. Ranks that are no `receivers`, when given, get nothing.

        Example: `their_model.load_state_dict(dict(trainer.weights()), strict=False)`
        """
        with complete_parameters(self._model.chunks):
            if receivers is None or self._topology.gathers_for(receivers, rank=distributed.get_rank()):
                yield from export_hf_weights([chunk.module for chunk in self._model.chunks], self._spec)

    def save(self, directory: Path | str) -> None:
        """Write a checkpoint for `load`, complete or not at all, to storage shared by all ranks.

        It has weights, optimizer, schedule, controllers and random states. Raises UserError when
        writing fails, and while a gradient waits.
        """
        Saving(state=self._state_files(Path(directory))).finish()

    def begin_save(self, directory: Path | str | None = None, *, hf: Path | str | None = None) -> None:
        """Save as `save` to `directory` and as `save_hf` to `hf`; return once planned and gathered.

        A thread of each rank copies the state to host memory and writes while the training goes on;
        the next call that changes or moves the state waits for the copies alone. A policy of more
        than half of rank 0's free host memory is written before the return. `finish_save` must
        follow before the process ends and the next save, and puts all in place. UserError as `save`.
        """
        if self._saving is not None:
            raise UserError("begin_save was called while an earlier save is not in its place; call finish_save() first")
        state = None if directory is None else self._state_files(Path(directory))
        policy = None if hf is None else self._policy_files(Path(hf), staged=True)
        self._saving = Saving(state=state, policy=policy, stage=self._host_copies)

    def _state_files(self, directory: Path) -> StateFiles:
        self._refuse_waiting("save")
        facts = {"frozen": list(self._training.frozen), "reference": self._reference and self._reference.identity}
        return StateFiles(directory, self.trained_models(), counters=facts | self._steps.state())

    def _policy_files(self, directory: Path, *, staged: bool, max_shard_bytes: int = MAX_SHARD_BYTES, durable: bool = True) -> PolicyFiles:
        source, dtype = self._model_settings.path, model_dtype(self._model_settings, self._device)
        num_bytes = sum(math.prod(shape) for _, shape in tensor_shapes(self._spec)) * dtype.itemsize
        stale = mtp_tensors(source, self._spec, dequantised_dtype=dtype) if durable and self._spec.num_mtp_layers else ()
        options = {"source": source, "stale": stale, "max_shard_bytes": max_shard_bytes, "durable": durable}
        return PolicyFiles(directory, self.weights(receivers=(0,)), num_bytes=num_bytes if staged else None, **options)

    @property
    def save_is_written(self) -> bool:
        """Return True when `finish_save` would not wait for this rank's files. Not collective."""
        return self._saving is None or self._saving.is_written

    def finish_save(self) -> None:
        """Wait until the save of `begin_save`, if any, is in place. Raises UserError on failure."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def load(self, directory: Path | str, *, weights_only: bool = False, checked: bool = False) -> tuple[str, ...]:
        """Continue from a checkpoint of `save`, in any layout; return a sentence for each change.

        Changes are of hyperparameters: the settings' are taken. With `weights_only` the optimizer
        starts anew. `checked`, on every rank: all files were compared with the manifest. A waiting
        gradient is dropped. Raises UserError when there is no checkpoint, or one with changed files,
        of another model or reference, or without optimizer state.
        """
        self._let_go_of_state()
        self._waiting = None
        counters, changes = training_state.load(Path(directory), self.trained_models(), weights_only=weights_only, checked=checked)
        if self._reference is not None:
            self._reference.check(counters, spec=self._spec, frozen=self._training.frozen)
        self._steps.restore(counters)
        return changes

    def save_hf(self, directory: Path | str, *, max_shard_bytes: int = MAX_SHARD_BYTES, durable: bool = True) -> None:
        """Write the policy as a Hugging Face directory, in files of at most `max_shard_bytes`.

        Layers of multi-token prediction are not trained: their weights come from model.path and are
        named in manifest.json. A directory that is not `durable` is for engines alone: without such
        layers, and not safe from a power failure. Raises UserError on failure.
        """
        Saving(policy=self._policy_files(Path(directory), staged=False, max_shard_bytes=max_shard_bytes, durable=durable)).finish()
