"""No public function of the room modifies an argument or hands back a view of one."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch

from megatron_rl.algorithms import advantage, head_statistics, kl, loss, returns, selection
from megatron_rl.algorithms.aggregation import LossInputs, Sequences, bounded_exp, token_weights
from megatron_rl.algorithms.covariance_losses import Covariances, hashed
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import OffPolicy, importance_ratio
from megatron_rl.algorithms.policy_loss import PolicyTerms
from megatron_rl.algorithms.return_advantage import ValueLoss
from megatron_rl.algorithms.selection import StepStatistics


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
    critic = ("values", "old_values", "returns")
    inputs = LossInputs(
        loss_mask=mask, sequence_index=index, sequence_tokens=tokens, **{name: tensor for name, tensor in x.items() if name not in critic}
    )
    sequences = Sequences(index, mask, tokens)
    masked = {name: sequences.masked(tensor) for name, tensor in x.items() if tensor.is_floating_point()}
    terms = PolicyTerms(
        log_probs=masked["log_probs"], old_log_probs=masked["old_log_probs"], log_ratio=masked["log_probs"] - masked["old_log_probs"],
        advantages=masked["advantages"], sequences=sequences, ref_log_probs=masked["ref_log_probs"], token_keys=x["token_keys"],
    )  # fmt: skip
    rewards, groups = torch.randn(6, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2])
    correction = OffPolicy(mode="truncate", high=1.1, opsm=0.1)
    count = {"num_tokens": int(mask.sum()), "num_trajectories": 3}
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
        "off_policy.terms": (correction.terms, (terms, masked["rollout_log_probs"]), {}),
        "covariances": (Covariances().of, (terms,), {}),
        "hashed": (hashed, (x["token_keys"], 3), {}),
        "quantile": (selection.quantile, (x["values"], 0.3), {}),
        "step_statistics": (selection.step_statistics, (Objective.of(policy_loss="kl_cov"), [inputs]), {"num_tokens": 5}),
        "value_loss": (
            ValueLoss().share,
            (sequences,),
            {**count, **{name: x[name] for name in critic}},
        ),
        "bounded_exp": (bounded_exp, (x["values"],), {}),
        "token_statistics": (head_statistics.token_statistics, (torch.randn(4, 9), torch.arange(4)), {"temperature": 1.0, "vocab_size": 8}),
        "constant": (advantage.Groups.of(groups).constant, (rewards,), {}),
    }
    everything |= loss_calls(inputs, terms, correction)
    return everything | advantage_calls(rewards, groups)


def advantage_calls(rewards: torch.Tensor, groups: torch.Tensor) -> dict[str, tuple]:
    everything = {}
    for kind in ("group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "pass@k"):
        made = Objective.of(advantage=kind).advantage
        arguments = {"rewards": rewards, "group_ids": groups, "lengths": torch.ones(6), "baselines": torch.zeros(6)}
        everything[f"group_advantages {kind}"] = (advantage.group_advantages, (made,), arguments)
    return everything


def loss_calls(inputs: LossInputs, terms: PolicyTerms, correction: OffPolicy) -> dict[str, tuple]:
    count, everything = {"num_tokens": int(inputs.loss_mask.sum()), "num_trajectories": 3}, {}
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
        "clip_cov",
        "kl_cov",
    ):
        objective = Objective.of(
            policy_loss=name, kl={"coef": 0.1}, entropy={"coef": 0.1}, off_policy=None if name == "sft" else correction
        )
        statistics = StepStatistics(policy_loss=Covariances(limit=0))
        everything[f"compute_loss {name}"] = (loss.compute_loss, (objective, inputs), {**count, "statistics": statistics})
        everything[f"policy loss {name}"] = (objective.policy_loss.losses, (terms, statistics.policy_loss), {})
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
