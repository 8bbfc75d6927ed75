"""What the trainer needs of an objective, and of a batch for it."""

import dataclasses
from pathlib import Path

import numpy as np

from megatron_rl.algorithms.arguments import DiscountedArguments, PPOArguments
from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import ModelSettings, Settings
from megatron_rl.errors import UserError
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.training.expert_load import check_record
from megatron_rl.types import Doubles, Ints, TrainBatch

_OWN = ("old_log_probs", "ref_log_probs", "values", "advantages")
_MORE_THAN_REWARDS = {"ppo": "a critic's returns", "remax": "the rewards of greedy responses", "gdpo": "components of the rewards"}


def check_objective(objective: Objective) -> None:
    """Raise UserError when the trainer lacks what `objective` needs."""
    if objective.policy_loss == "value":
        raise UserError(
            "objective.policy_loss is value, the loss of a critic, which is trained beside a policy; choose a policy loss, and "
            "objective.advantage.estimator ppo for a critic"
        )
    if objective.aggregation == "sequence_mean_token_sum_norm" and objective.max_response_length is None:
        raise UserError(
            "objective.aggregation sequence_mean_token_sum_norm divides by a constant, but objective.max_response_length is not set; "
            "set it to the response budget, in tokens"
        )


def resolve_objective(settings: Settings) -> Objective:
    """The objective with the response budget as its constant length, where that is not set. Raises UserError when it cannot be trained."""
    objective = settings.objective
    if objective.aggregation == "sequence_mean_token_sum_norm" and objective.max_response_length is None:
        objective = dataclasses.replace(objective, max_response_length=settings.rollout.sampling.max_response_tokens)
    check_objective(objective)
    return objective


def teacher_path(objective: Objective, model: ModelSettings) -> Path:
    """The directory of the teacher that `objective` distils. Raises UserError when `model` names none."""
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
    """Raise UserError when `objective` would not use what `batch` brings, or lacks what it needs.

    `rewards` and `trajectory_ids` [B] are the whole batch's.
    """
    given = [name for name in _OWN if getattr(batch, name) is not None]
    if not objective.trains_by_rewards:
        if given:
            raise UserError(f"TrainBatch.{given[0]} has no effect with objective.policy_loss {objective.policy_loss}; leave it out")
        return
    if objective.off_policy_correction is not None and batch.rollout_log_probs is None:
        raise UserError(
            "objective.off_policy_correction compares the policy with the one that generated, but TrainBatch.rollout_log_probs is None; "
            "give them, or remove the correction"
        )
    if batch.values is not None:
        _check_values(objective)
    if batch.advantages is not None:
        _check_advantages(objective)
    elif objective.advantage.estimator != "gdpo" and not np.isfinite(rewards).all():
        raise UserError(
            f"{int((~np.isfinite(rewards)).sum())} of {len(rewards)} sequences have no finite reward, and the batch has no advantages of "
            "its own; give TrainBatch rewards for all of them, or advantages"
        )
    if batch.advantages is None and len(np.unique(trajectory_ids)) < len(trajectory_ids):
        _check_returns(objective)


def _check_returns(objective: Objective) -> None:
    """Returns run from token to token of one sequence: nothing carries them on to the trajectory's next one."""
    estimator = objective.advantage.estimator
    cause = None
    if estimator == "ppo":
        cause = "the returns and values of ppo"
    elif estimator == "reinforce_plus_plus" and (objective.kl_reward_coef or objective.advantage.arguments(DiscountedArguments).gamma < 1):
        cause = "the returns of reinforce_plus_plus with gamma below 1 or a KL in the rewards"
    if cause is not None:
        raise UserError(
            f"objective.advantage.estimator {estimator} got trajectories of several sequences, and {cause} end with each sequence "
            "instead of the trajectory; choose an estimator that scores whole trajectories, such as grpo, or let the rollout return each "
            "trajectory as one sample"
        )


def _check_values(objective: Objective) -> None:
    estimator = objective.advantage.estimator
    if estimator != "ppo":
        raise UserError(f"TrainBatch.values has no effect with objective.advantage.estimator {estimator}; leave it out, or choose ppo")
    if objective.advantage.arguments(PPOArguments).bootstrap_truncated:
        raise UserError(
            "objective.advantage.args.bootstrap_truncated needs the value behind a truncated response, which TrainBatch.values does not "
            "have; leave values out, so that the critic is asked, or set bootstrap_truncated to false"
        )


def _check_advantages(objective: Objective) -> None:
    """The batch's advantages are used as they are: what would have changed them is refused."""
    estimator = objective.advantage.estimator
    if estimator in _MORE_THAN_REWARDS:
        raise UserError(
            f"TrainBatch.advantages is given, but objective.advantage.estimator {estimator} works with {_MORE_THAN_REWARDS[estimator]}; "
            "leave advantages out, or the estimator at its default"
        )
    for name in ("kl_reward_coef", "distillation_coef"):
        if getattr(objective, name):
            raise UserError(
                f"objective.{name} {getattr(objective, name)} changes the advantages, but TrainBatch.advantages are used as they are; "
                f"put it into them and set objective.{name} to 0, or leave advantages out"
            )
    if objective.zero_variance == "mask_kl":
        raise UserError(
            "objective.zero_variance mask_kl goes by the rewards of a group, but TrainBatch.advantages is given in their place; "
            "leave advantages out, or set zero_variance to keep"
        )
