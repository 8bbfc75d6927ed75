"""Published objectives as plain data: only what differs from `Objective()`. Every field can be overridden."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    # DeepSeekMath, arXiv 2402.03300
    "grpo": {"policy_loss": "clip", "ratio_level": "token", "aggregation": "sequence_mean_token_mean", "clip_low": 0.2, "clip_high": 0.2,
             "advantage": {"estimator": "grpo"}},
    # Understanding R1-Zero-like training, arXiv 2503.20783
    "dr_grpo": {"policy_loss": "clip", "aggregation": "sequence_mean_token_sum_norm", "advantage": {"estimator": "dr_grpo"}},
    # DAPO, arXiv 2503.14476
    "dapo": {"policy_loss": "clip", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28, "advantage": {"estimator": "grpo"},
             "zero_variance": "resample"},
    # TRL's name for GRPO over the batch's tokens; with global denominators it differs from dapo in its clip range only
    "bnpo": {"policy_loss": "clip", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2, "advantage": {"estimator": "grpo"}},
    # GSPO, arXiv 2507.18071
    "gspo": {"policy_loss": "clip", "ratio_level": "sequence", "aggregation": "sequence_mean_token_mean", "clip_low": 3e-4,
             "clip_high": 4e-4, "advantage": {"estimator": "grpo"}},
    # MiniMax-M1, arXiv 2506.13585: an absolute cap of 5 and no lower clip
    "cispo": {"policy_loss": "cispo", "aggregation": "token_mean", "clip_low": None, "clip_high": 4.0, "advantage": {"estimator": "grpo"}},
    # SAPO, arXiv 2511.20347
    "sapo": {"policy_loss": "sapo", "loss_args": {"tau_positive": 1.0, "tau_negative": 1.05}, "aggregation": "sequence_mean_token_mean",
             "advantage": {"estimator": "grpo"}},
    # LUSPO, arXiv 2602.05261
    "luspo": {"policy_loss": "clip", "ratio_level": "sequence", "aggregation": "sequence_mean_token_sum", "clip_low": 0.2, "clip_high": 0.2,
              "advantage": {"estimator": "grpo"}},
    # VESPO, arXiv 2602.10693
    "vespo": {"policy_loss": "vespo", "aggregation": "token_mean", "advantage": {"estimator": "grpo"}},
    # GMPO, arXiv 2507.20673: clip distances are in log space
    "gmpo": {"policy_loss": "gmpo", "aggregation": "sequence_mean_token_mean", "clip_low": 0.4, "clip_high": 0.4,
             "advantage": {"estimator": "grpo"}},
    # PPO, arXiv 1707.06347, with GAE, arXiv 1506.02438
    "ppo": {"policy_loss": "clip", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2,
            "advantage": {"estimator": "ppo", "args": {"gamma": 1.0, "lam": 0.95, "whiten": True}}},
    # REINFORCE++, arXiv 2501.03262
    "reinforce_plus_plus": {"policy_loss": "clip", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2,
                            "advantage": {"estimator": "reinforce_plus_plus", "args": {"gamma": 1.0, "whiten": True}}},
    # RLOO, arXiv 2402.14740: the whole response is one action, so its loss is a sum over tokens
    "rloo": {"policy_loss": "clip", "aggregation": "sequence_mean_token_sum", "clip_low": 0.2, "clip_high": 0.2,
             "advantage": {"estimator": "rloo"}},
})  # fmt: skip


def _merge(base: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = dict(base)
    for key, value in explicit.items():
        below = base.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return {key: _merge(value, {}) if isinstance(value, Mapping) else value for key, value in merged.items()}


def _without_args(preset: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """`preset` without the arguments of a loss or an estimator in whose place `explicit` names another one."""
    left = dict(preset)
    if explicit.get("policy_loss", left["policy_loss"]) != left["policy_loss"]:
        left.pop("loss_args", None)
    given, advantage = explicit.get("advantage"), dict(left["advantage"])
    if isinstance(given, Mapping) and given.get("estimator", advantage["estimator"]) != advantage["estimator"]:
        advantage.pop("args", None)
    return {**left, "advantage": advantage}


def expand_preset(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Objective` that `config` means: those of its `preset`, under what it says itself; nested sections merge.

    Arguments of the preset's loss and estimator come along only where `config` keeps these.

    Raises ValueError for an unknown preset. `config` is not modified.
    """
    explicit = {key: value for key, value in config.items() if key != "preset"}
    name = config.get("preset", "grpo")
    if not isinstance(name, str) or name not in PRESETS:
        closest = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"; did you mean {closest[0]!r}?" if closest else ""
        raise ValueError(f"Objective.preset is {name!r}, needs one of {', '.join(PRESETS)}{hint}")
    return _merge(_without_args(PRESETS[name], explicit), explicit)
