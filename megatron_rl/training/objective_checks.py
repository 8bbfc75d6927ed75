"""The trainer's demands on an objective, and the objective's demands on a batch."""

import dataclasses
from pathlib import Path

import numpy as np

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.return_advantage import GaeAdvantage
from megatron_rl.algorithms.unclipped_losses import Distillation
from megatron_rl.config.settings import ModelSettings
from megatron_rl.errors import UserError
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.training.expert_load import check_record
from megatron_rl.types import Doubles, Ints, TrainBatch

_OWN = ("old_log_probs", "ref_log_probs", "values", "advantages")


def check_objective(objective: Objective) -> None:
    """Raise UserError when the trainer lacks what `objective` needs."""
    if _lacks_length(objective):
        raise UserError(
            "objective.aggregation sequence_mean_token_sum_norm divides by a constant, but objective.max_response_length is not set; "
            "set it to the response budget, in tokens"
        )


def resolve_objective(objective: Objective, *, response_budget: int) -> Objective:
    """Return the objective with the response budget, tokens, as constant length where none is set."""
    return dataclasses.replace(objective, max_response_length=response_budget) if _lacks_length(objective) else objective


def _lacks_length(objective: Objective) -> bool:
    return objective.aggregation == "sequence_mean_token_sum_norm" and objective.max_response_length is None


def teacher_path(objective: Objective, model: ModelSettings) -> Path:
    """Return the directory of the teacher of `objective`. Raises UserError when `model` names none."""
    if model.teacher is None:
        raise UserError(
            f"objective.distillation_coef is {objective.distillation_coef}, but model.teacher is not set, so there is nothing to "
            "learn from; set model.teacher to a Hugging Face directory, or objective.distillation_coef to 0"
        )
    return model.teacher


def check_fits(batch: TrainBatch, spec: ModelSpec) -> None:
    """Raise ValueError when the model of `spec` has no such tokens or experts as are in `batch`."""
    if len(batch.tokens) and not (batch.tokens.min() >= 0 and batch.tokens.max() < spec.vocab_size):
        raise ValueError(
            f"TrainBatch.tokens are in [{batch.tokens.min()}, {batch.tokens.max()}], needs them in [0, {spec.vocab_size}), the "
            f"vocabulary of {spec.architecture}"
        )
    check_record(batch, spec)


def check_batch(objective: Objective, batch: TrainBatch, *, rewards: Doubles, trajectory_ids: Ints) -> None:
    """Raise UserError for data unused by `objective`, or missing; `rewards` and `trajectory_ids` [B] are of all ranks."""
    given = [name for name in _OWN if getattr(batch, name) is not None]
    if not objective.trains_by_rewards:
        if given:
            raise UserError(f"TrainBatch.{given[0]} has no effect with objective.policy_loss {objective.policy_loss.kind}; leave it out")
        return
    if isinstance(objective.policy_loss, Distillation) and batch.ref_log_probs is None:
        raise UserError(
            "objective.policy_loss distillation got no TrainBatch.ref_log_probs, needs those of a teacher: the trainer's own reference is "
            "the initial policy, from which there is nothing to learn; give them, or set objective.distillation_coef and model.teacher"
        )
    proximal = objective.proximal
    for name, reads in (("off_policy", objective.off_policy is not None), (f"proximal {proximal}", proximal != "recomputed")):
        if reads and batch.rollout_log_probs is None:
            raise UserError(
                f"objective.{name} compares the policy with the one that generated, but TrainBatch.rollout_log_probs is None; "
                f"give them, or remove objective.{name.split()[0]}"
            )
    if proximal != "recomputed" and batch.old_log_probs is not None:
        raise UserError(f"TrainBatch.old_log_probs has no effect with objective.proximal {proximal}; leave one of them out")
    if proximal == "interpolated" and (newest := batch.weight_versions.max(initial=-1)) > batch.version:
        raise UserError(
            f"TrainBatch.version is {batch.version} and weight_versions reach {newest}, but objective.proximal interpolated takes the age "
            "of each token from them; give the version of the weights before the step, as in dataclasses.replace(batch, version=..)"
        )
    if batch.values is not None:
        _check_values(objective)
    if batch.advantages is not None:
        _check_advantages(objective)
    elif not objective.advantage.needs_components and not np.isfinite(rewards).all():
        raise UserError(
            f"{int((~np.isfinite(rewards)).sum())} of {len(rewards)} sequences have no finite reward, and the batch has no advantages of "
            "its own; give TrainBatch rewards for all of them, or advantages"
        )
    if batch.advantages is None and len(np.unique(trajectory_ids)) < len(trajectory_ids):
        check_returns(objective)


def check_returns(objective: Objective) -> None:
    """Refuse returns over trajectories of several sequences: they run from token to token of one sequence."""
    cause = objective.advantage.ends_with_sequence(has_kl=objective.kl_reward is not None)
    if cause is not None:
        raise UserError(
            f"objective.advantage.kind {objective.advantage.kind} got trajectories of several sequences, and {cause} end with each "
            "sequence instead of the trajectory; choose an estimator that scores whole trajectories, such as group, or let the rollout "
            "return each trajectory as one sample"
        )


def _check_values(objective: Objective) -> None:
    advantage = objective.advantage
    if not isinstance(advantage, GaeAdvantage):
        raise UserError(f"TrainBatch.values has no effect with objective.advantage.kind {advantage.kind}; leave it out, or choose gae")
    if advantage.bootstrap_truncated:
        raise UserError(
            "objective.advantage.bootstrap_truncated needs the value behind a truncated response, which TrainBatch.values does not "
            "have; leave values out, so that the critic is asked, or set bootstrap_truncated to false"
        )


def _check_advantages(objective: Objective) -> None:
    """Refuse settings that would change the batch's own advantages, which are used unchanged."""
    advantage = objective.advantage
    if advantage.reads:
        raise UserError(
            f"TrainBatch.advantages is given, but objective.advantage.kind {advantage.kind} works with {advantage.reads}; leave advantages "
            "out, or the estimator at its default"
        )
    changes = {
        "kl_reward": 0.0 if objective.kl_reward is None else objective.kl_reward.coef,
        "distillation_coef": objective.distillation_coef,
    }
    for name, coef in changes.items():
        if coef:
            raise UserError(
                f"objective.{name} {coef} changes the advantages, but TrainBatch.advantages are used as they are; put it into them and "
                f"leave objective.{name} out, or leave advantages out"
            )
    if objective.zero_variance != "keep":
        raise UserError(
            f"objective.zero_variance {objective.zero_variance} goes by the rewards of a group, but TrainBatch.advantages is given in "
            "their place; leave advantages out, or set zero_variance to keep"
        )
