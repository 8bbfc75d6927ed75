"""From the rewards of a batch to an advantage per token, for every estimator: the two calls that a training step makes.

First `sample_scores` over the whole batch, because a baseline needs groups that other ranks hold; then `token_advantages` over
the sequences of one rank. Legend: B samples of the whole batch, where a trajectory of several stands once; S sequences of this rank
laid end to end, T their tokens.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.advantage import AllReduceSum, group_advantages, zero_variance
from megatron_rl.algorithms.arguments import DiscountedArguments, PPOArguments, WhitenedArguments
from megatron_rl.algorithms.objective import WITHOUT_GROUPS, AdvantageSettings, Objective
from megatron_rl.algorithms.returns import discounted_returns, gae, token_rewards, whiten
from megatron_rl.algorithms.sequences import identity

# Estimators that end on the level of tokens; all others give every token of a sample the same advantage.
_BY_TOKEN = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def sample_scores(
    settings: AdvantageSettings, *, rewards: Tensor, group_ids: Tensor, lengths: Tensor, baselines: Tensor | None = None
) -> Tensor:
    """What `token_advantages` needs of each sample, [B] float64: its reward, its reward above the group, or its whole advantage.

    Arguments and errors are those of `group_advantages`.
    """
    if settings.estimator in WITHOUT_GROUPS:
        return rewards.double().clone()
    whole = settings if settings.estimator == "gdpo" else settings.without_whitening()
    return group_advantages(whole, rewards=rewards, group_ids=group_ids, lengths=lengths, baselines=baselines)


def without_signal(
    settings: AdvantageSettings, *, rewards: Tensor, group_ids: Tensor, lengths: Tensor, baselines: Tensor | None = None
) -> Tensor:
    """[B] bool: samples of groups whose rewards teach nothing, because every advantage in the group is 0 before whitening.

    Where the group is the baseline these are groups of equal rewards (gdpo: in every component; pass@k: of the best two) and lone
    samples, for remax groups that all got the greedy response's reward. ppo and reinforce_plus_plus compare with other groups and
    learn from all; for them it is groups of equal rewards, as in `zero_variance`. Arguments and errors are those of `group_advantages`.
    """
    if settings.estimator in WITHOUT_GROUPS:
        return zero_variance(rewards=rewards, group_ids=group_ids)
    scores = sample_scores(settings.without_whitening(), rewards=rewards, group_ids=group_ids, lengths=lengths, baselines=baselines)
    _, index = torch.unique(group_ids, return_inverse=True)
    teaches = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=torch.int64).index_add(0, index, (scores != 0).long())
    return teaches[index] == 0


def token_advantages(
    objective: Objective,
    *,
    scores: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    values: Tensor | None = None,
    bootstrap: Tensor | None = None,
    teacher_log_ratio: Tensor | None = None,
    all_reduce_sum: AllReduceSum = identity,
) -> tuple[Tensor, Tensor | None]:
    """(advantages [T], returns [T] for a critic or None), 0 at masked positions; whitened over all ranks where the settings say so.

    `scores` [S] from `sample_scores`. `kl` [T] raw KL to the reference and its present coefficient, for a KL in the reward. `values`
    [T] and `bootstrap` [S] (the value after a truncated response, else 0) are for ppo. `teacher_log_ratio` [T], log pi_old - log
    pi_teacher, is for on-policy distillation, of which a critic knows nothing. `all_reduce_sum` adds over data-parallel ranks.

    Raises ValueError when ppo gets no values, a KL reward no kl or distillation no teacher.
    """
    settings = objective.advantage
    if kl_coef != 0.0 and kl is None:
        raise ValueError("token_advantages got kl_coef without kl, needs the raw KL of every token")
    if objective.distillation_coef and teacher_log_ratio is None:
        raise ValueError("Objective.distillation_coef got no teacher_log_ratio, needs that of every token to the teacher")
    distillation: Tensor | float = 0.0
    if objective.distillation_coef and teacher_log_ratio is not None:
        distillation = objective.distillation_coef * teacher_log_ratio.double().masked_fill(~loss_mask, 0.0)
    if settings.estimator not in _BY_TOKEN:
        return _spread(scores, loss_mask, cu_seqlens) - distillation, None
    returns: Tensor | None = None
    if settings.estimator == "reinforce_plus_plus_baseline":
        none = torch.zeros_like(scores)
        penalty = token_rewards(rewards=none, loss_mask=loss_mask, cu_seqlens=cu_seqlens, kl=kl, kl_coef=kl_coef)
        advantages = _spread(scores, loss_mask, cu_seqlens) + penalty
    else:
        shaped = token_rewards(rewards=scores, loss_mask=loss_mask, cu_seqlens=cu_seqlens, kl=kl, kl_coef=kl_coef)
        if settings.estimator == "reinforce_plus_plus":
            gamma = settings.arguments(DiscountedArguments).gamma
            advantages = discounted_returns(rewards=shaped, loss_mask=loss_mask, cu_seqlens=cu_seqlens, gamma=gamma)
        elif values is None:
            raise ValueError("AdvantageSettings.estimator ppo got no values, needs those of a critic")
        else:
            ppo = settings.arguments(PPOArguments)
            end = bootstrap if ppo.bootstrap_truncated else None
            places = {"loss_mask": loss_mask, "cu_seqlens": cu_seqlens}
            advantages, returns = gae(rewards=shaped, values=values, gamma=ppo.gamma, lam=ppo.lam, bootstrap=end, **places)
    advantages = advantages - distillation
    if settings.arguments(WhitenedArguments).whiten:
        advantages = whiten(advantages, mask=loss_mask, all_reduce_sum=all_reduce_sum)
    return advantages, returns


def _spread(scores: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`scores` [S] at the trainable tokens of their sequences, [T]."""
    return scores.repeat_interleave(cu_seqlens.diff()).masked_fill(~loss_mask, 0.0)
