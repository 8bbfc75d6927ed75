"""Per-token inputs of the loss beside the model's own output, as token-aligned arrays of a shard.

Legend: T tokens of the shard's batch, B its sequences; B_all sequences of the whole batch.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.advantage import Gdpo, Samples, TokenPlaces
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import current_share
from megatron_rl.algorithms.returns import last_trainable
from megatron_rl.data.batch import GREEDY_BASELINE, compared_names
from megatron_rl.data.packing import Trajectories
from megatron_rl.errors import UserError
from megatron_rl.training.collectives import sum_over_data_parallel
from megatron_rl.training.token_record import TokenRecord, token_places
from megatron_rl.types import Bools, Doubles, Floats, Ints, Shard, TrainBatch

_TOKENS_PER_SEQUENCE = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class TokenData:
    """Arrays [T] aligned with the tokens of a shard's batch; log-probs in nats.

    `rollout_log_probs` None: the generator's log-probs are not known. `old_log_probs` None: the old
    policy is the current one, or made with `current_share`. `kl_mask` None: the KL of every token
    counts. `replayed`: the experts of all tokens before are the engine's; None without any record.
    `old_values`, of the states before the choice of each token, and `returns` are a critic's. They,
    `ref_log_probs` and `teacher_log_probs` are None without such a model. `token_keys` name a token
    within the whole batch under every layout. `trajectory_ids` [B] name each sequence's trajectory
    in the whole batch, and `trajectory_tokens` [B] count its trainable tokens over all ranks; None
    where each sequence is a trajectory. `drawn_log_probs` are the trainer's of the distribution that
    drew the tokens, None where that is the policy. `record` gets the values of its tokens when they
    are trained on.
    """

    rollout_log_probs: Floats | None
    old_log_probs: Floats | None
    current_share: Floats | None
    ref_log_probs: Floats | None
    advantages: Floats
    weight_versions: Ints
    replayed: Bools | None
    token_keys: Ints
    kl_mask: Bools | None = None
    old_values: Floats | None = None
    returns: Floats | None = None
    teacher_log_probs: Floats | None = None
    trajectory_ids: Ints | None = None
    trajectory_tokens: Ints | None = None
    drawn_log_probs: Floats | None = None
    record: TokenRecord | None = None


def needs_old_log_probs(objective: Objective, *, num_steps: int) -> bool:
    """Return True when the old log-probs need a pass: one step alone computes them as the current policy's."""
    if not objective.trains_by_rewards or objective.proximal != "recomputed":
        return False
    return num_steps > 1 or objective.kl_reward is not None or objective.distillation_coef > 0


def make_token_data(
    objective: Objective,
    shard: Shard,
    *,
    old: Floats | None,
    reference: Floats | None,
    state_values: Floats | None = None,
    teacher: Floats | None = None,
    kl_reward_coef: float = 0.0,
) -> TokenData:
    """Return the data [T] of `shard`, with advantages by the groups of the whole batch, 0 for supervised training.

    A baseline counts each trajectory once, and all its sequences get the same advantage.
    `state_values` [T] are behind each token. The batch's own values replace computed ones, own
    advantages unchanged. Collective over data-parallel ranks.
    """
    batch, trajectories = shard.batch, Trajectories.of(shard.all_trajectory_ids)
    own = trajectories.index[shard.rows]
    rows, offsets = token_places(shard)
    advantages = np.zeros(len(batch.tokens)) if batch.advantages is None else np.where(batch.loss_mask, batch.advantages, 0.0)
    data = TokenData(
        rollout_log_probs=batch.rollout_log_probs,
        old_log_probs=_own_or(batch.old_log_probs, old, batch),
        current_share=_share(objective, batch),
        ref_log_probs=_own_or(batch.ref_log_probs, reference, batch),
        advantages=advantages.astype(np.float32),
        weight_versions=batch.weight_versions,
        replayed=None if batch.routed_experts is None else np.roll(batch.routed, 1),
        token_keys=rows * _TOKENS_PER_SEQUENCE + offsets,
        old_values=_own_or(batch.values, None if state_values is None else values_before(state_values), batch),
        teacher_log_probs=teacher,
        trajectory_ids=None if trajectories.single else own,
        trajectory_tokens=None if trajectories.single else trajectories.sum(shard.all_trainable_tokens)[own],
    )
    if batch.advantages is not None or not objective.trains_by_rewards:
        return data
    samples = compared_samples(objective, shard, trajectories)
    if objective.zero_variance == "mask_kl":
        nothing = objective.advantage.without_signal(samples).numpy()[own]
        data = dataclasses.replace(data, kl_mask=np.repeat(~nothing, batch.lengths))
    places = _places(objective, batch, data, state_values, kl_reward_coef)
    scores = objective.advantage.scores(samples)[_tensor(own)]
    made, returns = objective.advantage.of_tokens(scores, places, all_reduce_sum=sum_over_data_parallel)
    return dataclasses.replace(data, advantages=made.float().numpy(), returns=None if returns is None else returns.float().numpy())


def _share(objective: Objective, batch: TrainBatch) -> Floats | None:
    """Return the current policy's share [T] in the proximal one; None for the recomputed one."""
    if objective.proximal == "recomputed":
        return None
    interpolates = objective.proximal == "interpolated"
    return current_share(_tensor(batch.weight_versions), version=batch.version, interpolates=interpolates).float().numpy()


def _places(objective: Objective, batch: TrainBatch, data: TokenData, state_values: Floats | None, kl_reward_coef: float) -> TokenPlaces:
    """Return the known values of each token [T] for the estimator, in float64."""
    mask, cu_seqlens = _tensor(batch.loss_mask), _tensor(batch.cu_seqlens)
    old, kl, log_ratio, bootstrap = _doubles(data.old_log_probs), None, None, None
    if objective.distillation_coef:
        teacher = _doubles(data.teacher_log_probs)
        assert old is not None and teacher is not None, "distillation needs old and teacher log-probs"
        log_ratio = old - teacher
    if objective.kl_reward is not None and kl_reward_coef:
        reference = _doubles(data.ref_log_probs)
        assert old is not None and reference is not None, "a KL in the rewards needs old and reference log-probs"
        kl = kl_estimate(old, reference=reference, estimator=objective.kl_reward.estimator)
        kl = kl if data.kl_mask is None else kl.masked_fill(~_tensor(data.kl_mask), 0.0)
    if state_values is not None:
        ends = last_trainable(mask, cu_seqlens)
        ended = ~_tensor(batch.truncated) | (ends < 0)
        bootstrap = torch.where(ended, 0.0, _tensor(state_values).double()[ends])
    return TokenPlaces(
        loss_mask=mask,
        cu_seqlens=cu_seqlens,
        kl=kl,
        kl_coef=kl_reward_coef,
        values=_doubles(data.old_values),
        bootstrap=bootstrap,
        teacher_log_ratio=log_ratio,
        distillation_coef=objective.distillation_coef,
    )


def values_before(state_values: Floats) -> Floats:
    """Return values [T] before each token from `state_values` [T] behind each; a sequence's first is any number."""
    return np.concatenate([np.zeros(1, np.float32), state_values[:-1]])[: len(state_values)]


def _own_or(own: Floats | None, computed: Floats | None, batch: TrainBatch) -> Floats | None:
    """Return the batch's own numbers [T], 0 outside the loss mask, where anything may stand, or else the computed ones."""
    return computed if own is None else np.where(batch.loss_mask, own, np.float32(0.0))


def _tensor(array: Doubles | Ints | Floats | Bools) -> Tensor:
    return torch.from_numpy(np.array(array))


def _doubles(array: Floats | None) -> Tensor | None:
    return None if array is None else _tensor(array).double()


def compared_samples(objective: Objective, shard: Shard, trajectories: Trajectories) -> Samples:
    """Return the whole batch's trajectories as the estimator compares them. Raises UserError for missing data."""
    first, advantage = trajectories.first, objective.advantage
    return Samples(
        rewards=_tensor((_components(advantage, shard) if isinstance(advantage, Gdpo) else shard.all_rewards)[first]),
        group_ids=_tensor(shard.all_group_ids[first]),
        lengths=_tensor(trajectories.sum(shard.all_trainable_tokens)),
        baselines=_tensor(_greedy_baselines(shard)[first]) if advantage.needs_greedy else None,
    )


def _greedy_baselines(shard: Shard) -> Doubles:
    """Return the rewards [B_all] of greedy responses to the whole batch's prompts. Raises UserError without them."""
    names = shard.batch.component_names
    if GREEDY_BASELINE not in names:
        raise UserError(
            f"objective.advantage.kind remax needs the reward of a greedy response as component {GREEDY_BASELINE!r}, got "
            f"{list(names)}; only generated samples have it"
        )
    return shard.all_reward_components[:, names.index(GREEDY_BASELINE)]


def _components(advantage: Gdpo, shard: Shard) -> Doubles:
    """Return the reward components [B_all, K]. Raises UserError for missing ones, and for weights of other components."""
    every = shard.batch.component_names
    names = compared_names(every)
    components = shard.all_reward_components[:, [every.index(name) for name in names]]
    weights = advantage.reward_weights
    if not names:
        raise UserError(
            "objective.advantage.kind gdpo needs the components of every reward, and the reward function gives none; return a dict "
            "with the key reward and one for each component"
        )
    lacking = [name for name, column in zip(names, components.T, strict=True) if not np.isfinite(column).all()]
    if lacking:
        raise UserError(
            f"objective.advantage.kind gdpo needs every component of every reward, and some samples have no finite {lacking[0]}; "
            "let the reward function return all of them each time"
        )
    if weights is not None and len(weights) != len(names):
        raise UserError(
            f"objective.advantage.reward_weights has {len(weights)} numbers, the rewards have {len(names)} components "
            f"({', '.join(names)}); give one for each, in this order"
        )
    return components
