"""No public function of the room modifies an argument or hands back a view of one."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch

from megatron_rl.algorithms import advantage, kl, log_prob, loss, policy_loss, returns, selection
from megatron_rl.algorithms.aggregation import token_weights
from megatron_rl.algorithms.inputs import LossInputs
from megatron_rl.algorithms.objective import AdvantageSettings, Objective, OffPolicyCorrection
from megatron_rl.algorithms.off_policy import importance_ratio, off_policy_terms
from megatron_rl.algorithms.policy_terms import PolicyTerms
from megatron_rl.algorithms.selection import StepStatistics
from megatron_rl.algorithms.sequences import Sequences, bounded_exp


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif is_dataclass(value):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name))


def calls(make_step) -> dict[str, tuple]:
    step = make_step([4, 1, 3], seed=2)
    x, mask = step.tokens, step.loss_mask
    index, tokens = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2]), torch.tensor(step.trainable())
    cu_seqlens = torch.tensor([0, 4, 5, 8])
    inputs = LossInputs(loss_mask=mask, sequence_index=index, sequence_tokens=tokens, **x)
    sequences = Sequences(index, mask, tokens)
    masked = {name: sequences.masked(tensor) for name, tensor in x.items() if tensor.is_floating_point()}
    terms = PolicyTerms(
        masked["log_probs"], masked["old_log_probs"], masked["log_probs"] - masked["old_log_probs"], masked["advantages"], sequences,
        ref_log_probs=masked["ref_log_probs"], values=masked["values"], old_values=masked["old_values"], returns=masked["returns"],
    )  # fmt: skip
    rewards, groups = torch.randn(6, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2])
    correction = OffPolicyCorrection(mode="truncate", high=1.1, opsm=0.1)
    count = {"num_tokens": int(mask.sum()), "num_sequences": 3}
    everything = {
        "token_rewards": (
            returns.token_rewards,
            (),
            {"rewards": x["values"][:3], "loss_mask": mask, "cu_seqlens": cu_seqlens, "kl": x["entropy"], "kl_coef": 0.1},
        ),
        "gae": (
            returns.gae,
            (),
            {"rewards": x["returns"], "values": x["values"], "loss_mask": mask, "cu_seqlens": cu_seqlens, "gamma": 0.9, "lam": 0.9},
        ),
        "gae, whole": (
            returns.gae,
            (),
            {"rewards": x["returns"], "values": x["values"], "loss_mask": mask | True, "cu_seqlens": cu_seqlens, "gamma": 0.9, "lam": 0.0},
        ),
        "discounted_returns": (
            returns.discounted_returns,
            (),
            {"rewards": x["returns"], "loss_mask": mask | True, "cu_seqlens": cu_seqlens, "gamma": 0.0},
        ),
        "whiten": (returns.whiten, (x["values"],), {"mask": mask}),
        "kl_estimate": (kl.kl_estimate, (x["log_probs"],), {"reference": x["ref_log_probs"], "estimator": "k3"}),
        "token_weights": (
            token_weights,
            (sequences,),
            {**count, "aggregation": "token_sum", "max_response_length": 3, "dtype": torch.float64},
        ),
        "importance_ratio": (importance_ratio, (sequences, masked["old_log_probs"], masked["rollout_log_probs"], "token"), {}),
        "off_policy_terms": (
            off_policy_terms,
            (correction,),
            {"sequences": sequences, **{n: masked[n] for n in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")}},
        ),
        "covariance": (selection.covariance, (x["log_probs"], x["advantages"], StepStatistics()), {}),
        "hashed": (selection.hashed, (x["token_keys"], 3), {}),
        "quantile": (selection.quantile, (x["values"], 0.3), {}),
        "step_statistics": (selection.step_statistics, (Objective(policy_loss="kl_cov"), [inputs]), {"num_tokens": 5}),
        "bounded_exp": (bounded_exp, (x["values"],), {}),
        "token_statistics": (log_prob.token_statistics, (torch.randn(4, 9), torch.arange(4)), {"temperature": 1.0, "vocab_size": 8}),
        "zero_variance": (advantage.zero_variance, (), {"rewards": rewards, "group_ids": groups}),
    }
    everything |= loss_calls(inputs, terms, correction)
    return everything | advantage_calls(rewards, groups)


def advantage_calls(rewards: torch.Tensor, groups: torch.Tensor) -> dict[str, tuple]:
    everything = {}
    for estimator in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "pass@k"):
        made = AdvantageSettings(estimator=estimator).without_whitening()
        arguments = {"rewards": rewards, "group_ids": groups, "lengths": torch.ones(6), "baselines": torch.zeros(6)}
        everything[f"group_advantages {estimator}"] = (advantage.group_advantages, (made,), arguments)
    return everything


def loss_calls(inputs: LossInputs, terms: PolicyTerms, correction: OffPolicyCorrection) -> dict[str, tuple]:
    count, everything = {"num_tokens": int(inputs.loss_mask.sum()), "num_sequences": 3}, {}
    for name in (
        "clip",
        "cispo",
        "sapo",
        "vespo",
        "gmpo",
        "gpg",
        "dppo_tv",
        "dppo_kl",
        "distillation",
        "sft",
        "value",
        "clip_cov",
        "kl_cov",
    ):
        objective = Objective(policy_loss=name, kl_loss_coef=0.1, entropy_coef=0.1, off_policy_correction=correction)
        step_settings = {
            **count,
            "statistics": StepStatistics(covariance_threshold=0.0, key_threshold=0),
        }
        everything[f"compute_loss {name}"] = (loss.compute_loss, (objective, inputs), step_settings)
        if name not in ("clip_cov", "kl_cov"):
            everything[f"policy loss {name}"] = (policy_loss.find_policy_loss(objective), (objective, terms), {})
    return everything


def test_nothing_is_modified_or_aliased(make_step) -> None:
    for name, (function, arguments, keywords) in calls(make_step).items():
        given = list(tensors_in((arguments, keywords)))
        before = [(tensor.clone(), tensor._version) for tensor in given]
        result = function(*arguments, **keywords)
        for tensor, (copy, version) in zip(given, before, strict=True):
            assert tensor._version == version and torch.equal(tensor, copy), f"{name} modified an argument"
        held = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel()}
        for tensor in tensors_in(result):
            assert not tensor.numel() or tensor.untyped_storage().data_ptr() not in held, f"{name} returns an alias of an argument"
