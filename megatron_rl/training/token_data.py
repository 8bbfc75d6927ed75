"""What the loss needs of each token besides the model's own output, as token-aligned arrays of a shard's batch.

Legend: T tokens of the shard's batch, B its sequences.
"""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms.advantage import group_advantages, zero_variance
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.returns import discounted_returns, token_rewards, whiten
from megatron_rl.errors import UserError
from megatron_rl.training.topology import sum_over
from megatron_rl.types import Bools, Doubles, Floats, Ints, Shard

_UNSUPPORTED_ESTIMATORS = {
    "ppo": "a critic, which this version does not train",
    "gdpo": "one reward per component for each sample, and batches carry a single reward",
    "remax": "the reward of a greedy response for each prompt, which is not generated",
}
_TOKENS_PER_SEQUENCE = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class TokenData:
    """Arrays [T] aligned with the tokens of a shard's batch, in nats where they are log-probs.

    `old_log_probs` None: the old policy is the current one. `ref_log_probs` None: no reference is used. `kl_mask` None: the KL of
    every token counts. `token_keys` name a token within the whole batch, the same under every layout.
    """

    rollout_log_probs: Floats
    old_log_probs: Floats | None
    ref_log_probs: Floats | None
    advantages: Floats
    weight_versions: Ints
    token_keys: Ints
    kl_mask: Bools | None = None


def check_objective(objective: Objective) -> None:
    """Raise UserError when the trainer lacks what `objective` needs."""
    estimator = objective.advantage.estimator
    if objective.trains_by_rewards and estimator in _UNSUPPORTED_ESTIMATORS:
        raise UserError(
            f"objective.advantage.estimator is {estimator}, which needs {_UNSUPPORTED_ESTIMATORS[estimator]}; choose grpo, dr_grpo, rloo, "
            "opo, pass@k, reinforce_plus_plus or reinforce_plus_plus_baseline"
        )
    if objective.policy_loss == "value":
        raise UserError("objective.policy_loss is value, the loss of a critic, which this version does not train; choose a policy loss")


def needs_old_log_probs(objective: Objective, *, num_steps: int) -> bool:
    """Whether a pass over the batch before its first optimizer step is needed for the old policy's log-probs.

    With a single step the old policy is the current one, whose log-probs the step computes anyway.
    """
    return objective.trains_by_rewards and (num_steps > 1 or objective.kl_reward_coef > 0)


def make_token_data(objective: Objective, shard: Shard, *, old: Floats | None, reference: Floats | None) -> TokenData:
    """The data of `shard`, with advantages by the groups of the whole batch; advantages are zero for supervised training.

    Collective over data-parallel ranks.
    """
    batch = shard.batch
    advantages = np.zeros(len(batch.tokens))
    kl_mask = None
    if objective.trains_by_rewards:
        token_level = objective.kl_reward_coef > 0 or (_is_reinforce(objective) and objective.advantage.gamma < 1)
        advantages = _token_advantages(objective, shard, old, reference) if token_level else _sample_advantages(objective, shard)
        if objective.zero_variance == "mask_kl":
            constant = zero_variance(rewards=_tensor(shard.all_rewards), group_ids=_tensor(shard.all_group_ids)).numpy()[shard.rows]
            kl_mask = np.repeat(~constant, batch.lengths)
    offsets = np.arange(len(batch.tokens)) - np.repeat(batch.cu_seqlens[:-1], batch.lengths)
    return TokenData(
        rollout_log_probs=batch.rollout_log_probs,
        old_log_probs=old,
        ref_log_probs=reference,
        advantages=advantages.astype(np.float32),
        weight_versions=batch.weight_versions,
        token_keys=np.repeat(shard.rows, batch.lengths) * _TOKENS_PER_SEQUENCE + offsets,
        kl_mask=kl_mask,
    )


def _is_reinforce(objective: Objective) -> bool:
    return objective.advantage.estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def _tensor(array: Doubles | Ints | Floats | Bools) -> Tensor:
    return torch.from_numpy(np.array(array))


def _sample_advantages(objective: Objective, shard: Shard) -> Doubles:
    """One advantage per sample, [T] repeated over its tokens."""
    everything = group_advantages(
        objective.advantage,
        rewards=_tensor(shard.all_rewards),
        group_ids=_tensor(shard.all_group_ids),
        lengths=_tensor(shard.all_trainable_tokens),
    )
    return np.repeat(everything.numpy()[shard.rows], shard.batch.lengths)


def _token_advantages(objective: Objective, shard: Shard, old: Floats | None, reference: Floats | None) -> Doubles:
    """REINFORCE++ with a KL in the rewards or a discount: returns per token [T], whitened over the whole batch's tokens."""
    batch, rewards = shard.batch, shard.all_rewards
    if objective.advantage.estimator == "reinforce_plus_plus_baseline":
        groups = np.unique(shard.all_group_ids, return_inverse=True)[1]
        rewards = rewards - (np.bincount(groups, weights=rewards) / np.bincount(groups))[groups]
    mask, cu_seqlens = _tensor(batch.loss_mask), _tensor(batch.cu_seqlens)
    kl = None
    if objective.kl_reward_coef:
        assert old is not None and reference is not None, "a KL in the rewards needs old and reference log-probs"
        kl = kl_estimate(_tensor(old).double(), reference=_tensor(reference).double(), estimator=objective.kl_reward_estimator)
    shaped = token_rewards(
        rewards=_tensor(rewards[shard.rows]), loss_mask=mask, cu_seqlens=cu_seqlens, kl=kl, kl_coef=objective.kl_reward_coef
    )
    returns = discounted_returns(rewards=shaped, loss_mask=mask, cu_seqlens=cu_seqlens, gamma=objective.advantage.gamma)
    if objective.advantage.whiten:
        returns = whiten(returns, mask=mask, all_reduce_sum=_sum_over_data_parallel)
    return np.asarray(returns.numpy(), dtype=np.float64)


def _sum_over_data_parallel(values: Tensor) -> Tensor:
    device = torch.device("cuda") if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
    return sum_over(values.to(device), parallel_state.get_data_parallel_group()).to(values.device)
