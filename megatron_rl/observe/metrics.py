"""Metrics: values with a reduction, and the table of the meaning of each name.

A metric is a share of a number from many ranks, micro-batches or samples. The grouping of merges
changes nothing, and a mean is never taken of means.
"""

import difflib
import math
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Metric:
    """A share of a number, together with the rule that reduces two shares to one, field by field."""

    number: float
    rule: ClassVar[Callable[..., float]]

    @property
    def value(self) -> float:
        """Return the number, NaN without a measurement."""
        return self.number

    def merge(self, other: "Metric") -> Self:
        """Return the union of both shares. Raises TypeError for different reductions."""
        if type(other) is not type(self):
            raise TypeError(f"cannot merge the reductions {type(self).__name__} and {type(other).__name__} of one metric")
        return type(self)(*(self.rule(getattr(self, name), getattr(other, name)) for name in self.__match_args__))


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """The weighted mean number / weight. A weight of 0 means no measurement."""

    weight: float
    rule = operator.add

    @property
    def value(self) -> float:
        """Return number / weight."""
        return self.number / self.weight if self.weight else math.nan


class Sum(Metric):
    """A total."""

    rule = operator.add


class Max(Metric):
    """The largest; NaN wins."""

    rule = np.maximum


class Min(Metric):
    """The smallest; NaN wins."""

    rule = np.minimum


class Last(Metric):
    """The newest number, the argument of a merge; equal on all ranks, as a learning rate is."""

    rule = staticmethod(lambda _, newest: newest)


def merge_metrics(shares: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge shares by name, in the given order. Raises TypeError for different reductions of one name."""
    merged: dict[str, Metric] = {}
    for share in shares:
        for name, metric in share.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers of merged metrics, sorted by name, without means over nothing."""
    return {name: float(metric.value) for name, metric in sorted(metrics.items()) if not (isinstance(metric, Mean) and metric.weight == 0)}


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One line of the table; a name ending in `*` stands for all names with this beginning."""

    name: str
    reduction: type[Metric]
    unit: str
    meaning: str
    healthy: str


# Columns: name, reduction, unit, meaning, healthy range or advice outside of the range.
_TABLE: tuple[tuple[str, type[Metric], str, str, str], ...] = (
    ("rollout/reward", Mean, "reward", "Reward of the scored samples", "rises; flat from the start: look at zero_variance_fraction"),
    ("rollout/reward_component/*", Mean, "reward", "One part of a composite reward", "the parts that you want rise, no other"),
    ("rollout/role_reward/*", Mean, "reward", "Reward of the trajectories of one role", "rises, if more slowly than others"),
    ("rollout/reward_errors", Sum, "samples", "Reward calls that raised; not trained on", "0; the first traceback is in the log"),
    ("rollout/reward_failed_fraction", Mean, "fraction", "Reward calls with an error or a timeout", "< 0.01; see logs/rewards.log"),
    ("rollout/label_found_fraction", Mean, "fraction", "Responses that have their label in them", "rises; far above the reward: mend it"),
    ("rollout/reward_timeouts", Sum, "samples", "Reward calls killed at their deadline; not trained on", "0; raise reward.timeout_s"),
    ("rollout/zero_variance_fraction", Mean, "fraction", "Groups with one reward throughout", "< 0.5; above: other prompts"),
    ("rollout/zero_variance_fraction/*", Mean, "fraction", "Those of them with one reward, rounded to a tenth", "0.0: easier prompts"),
    ("rollout/prompt_length", Mean, "tokens", "Prompt length", "that of the data"),
    ("rollout/response_length", Mean, "tokens", "Response length", "no drift to the limit or to 0"),
    ("rollout/response_length_max", Max, "tokens", "Longest response", "below rollout.sampling.max_response_tokens"),
    ("rollout/truncated_fraction", Mean, "fraction", "Responses cut by the token budget", "< 0.1; above: raise max_response_tokens"),
    ("rollout/aborted_fraction", Mean, "fraction", "Responses whose request was aborted", "0 in synchronous runs"),
    ("rollout/num_samples", Sum, "samples", "Samples generated", "prompts_per_step x samples_per_prompt"),
    ("rollout/samples_per_trajectory", Mean, "samples", "Samples of a trajectory, where one has several", "what the rollout is for"),
    ("rollout/turns", Mean, "turns", "Answers of the policy in a trajectory with an environment or agent", "below rollout.max_turns"),
    ("rollout/refused_requests", Sum, "requests", "Requests of agents that the endpoint refused", "0; the error says what to change"),
    ("rollout/overridden_requests", Sum, "requests", "Those with other settings than the run's, which were not used", "known ones"),
    ("rollout/tool_calls", Mean, "calls", "Calls of tools in such a trajectory", "as many as the task needs"),
    ("rollout/tool_error_fraction", Mean, "fraction", "Calls answered with an error: unreadable, or refused", "falls"),
    (
        "rollout/structure_difference_fraction",
        Mean,
        "fraction",
        "Ended trajectories with other markers of turns and calls than the chat template writes",
        "near 0; see structure_difference in the samples' metadata",
    ),
    ("rollout/environment_token_fraction", Mean, "fraction", "Response tokens of environment and template; not trained on", "steady"),
    ("rollout/num_tokens", Sum, "tokens", "Response tokens generated", "num_samples x response_length"),
    ("rollout/tokens_per_second", Mean, "tokens/s", "Response tokens per second of time/rollout", "steady; falls with longer responses"),
    ("rollout/reward_wait_fraction", Mean, "fraction", "Rewards' share of the time to make groups", "< 0.5; else faster rewards, or CPUs"),
    ("rollout/failures", Sum, "trajectories", "Trajectories that the rollout failed to make; left out", "0; see logs/rollout.log"),
    (
        "rollout/failures/*",
        Sum,
        "trajectories",
        "Those of one cause: error, timeout, contract, environment, tool, replay, context, template; of agents agent, budget, no_request",
        "0; mend the rollout",
    ),
    ("rollout/left_out_groups", Sum, "groups", "Groups too few of whose trajectories were made; other prompts take their places", "0"),
    ("rollout/retries", Sum, "calls", "Calls of the rollout after one that failed", "0; see rollout/failures"),
    ("rollout/retries/*", Sum, "calls", "Those after a failure of one cause, as of rollout/failures", "0"),
    ("rollout/replays", Sum, "environments", "Replayable ones whose process ended and that were asked all again", "none"),
    ("rollout/staleness", Mean, "versions", "Weight versions between a token and the step that trains on it", "0 in synchronous runs"),
    ("rollout/staleness_max", Max, "versions", "The same for the oldest token", "at most rollout.max_staleness; older: context"),
    ("rollout/staleness_share/*", Mean, "fraction", "Tokens of that age in versions", "most at the age of rollout.max_staleness"),
    ("rollout/mixed_versions_fraction", Mean, "fraction", "Responses with tokens of several weight versions", "0 in synchronous runs"),
    ("rollout/renewed_groups", Sum, "groups", "Finished groups that were too old and made anew", "0; more: max_staleness was lowered"),
    ("rollout/surplus_groups", Sum, "groups", "Groups made in vain for a step that had enough, and anew", "few; else lower oversampling"),
    ("rollout/carried_groups", Sum, "groups", "Unfinished groups that a step left to later ones", "at most those of the oversampling"),
    ("rollout/trained_length", Mean, "tokens", "Tokens of a response that are trained on", "as response_length; else raise max_staleness"),
    ("rollout/stale_context_fraction", Mean, "fraction", "Tokens too old to be trained on", "< 0.1; above: raise max_staleness"),
    ("rollout/filtered_groups", Sum, "groups", "Groups that rollout.filter left out", "few; else most generation is for nothing"),
    ("rollout/overlap_fraction", Mean, "fraction", "Training time in which engines generated, too", "0 when synchronous, else near 1"),
    ("engine/restarts", Sum, "engines", "Dead engines that were started again", "0; a note and the engine's log say why"),
    ("engine/kv_use", Mean, "fraction", "Share of the engines' key-value pools held by running requests", "0.5-0.8 with long responses"),
    ("engine/kv_use_max", Max, "fraction", "The same, of the fullest moment of any engine", "< 0.9; above: lower max_concurrent_requests"),
    ("engine/kv_use_of_idlest", Min, "fraction", "The same, mean of the idlest engine", "near that of the busiest"),
    ("engine/kv_use_of_busiest", Max, "fraction", "The same, mean of the busiest engine", "near that of the idlest"),
    ("engine/requests", Mean, "requests", "Requests in flight at an engine", "near rollout.max_concurrent_requests until a step's tail"),
    ("engine/request_limit", Mean, "requests", "Limit of these where max_concurrent_requests is null", "steady after some steps"),
    ("engine/queue", Mean, "requests", "Requests that wait inside an engine", "near 0; else lower max_concurrent_requests"),
    ("engine/queue_max", Max, "requests", "The same, of the fullest moment of any engine", "near 0, but for a step's begin"),
    ("engine/prefix_hits", Mean, "fraction", "Prompt tokens that engines took from their caches", "high with many turns"),
    ("engine/prefix_hits_min", Min, "fraction", "The same, of the engine with the fewest", "near that of all"),
    ("engine/prefix_hits_max", Max, "fraction", "The same, of the engine with the most", "near that of all"),
    ("engine/token_s_of_fastest", Min, "s", "Seconds of a request per token, mean of the fastest engine", "steady"),
    ("engine/token_s_of_slowest", Max, "s", "The same, of the slowest engine", "less than twice the fastest's"),
    ("engine/retractions", Sum, "requests", "Requests that engines put back for want of memory", "0; else lower max_concurrent_requests"),
    ("engine/retractions_max", Max, "requests", "The same, of the engine with the most", "0"),
    ("engine/compared_weights", Sum, "tensors", "Weights compared with the trainer's", "all, at the first and every 10th sync; else 0"),
    ("eval/*/accuracy", Last, "fraction", "mean@n: share of correct answers, mean over prompts", "as the reward; else reward hacking"),
    ("eval/*/reward", Last, "reward", "mean@n of the reward, mean over prompts", "close to rollout/reward at the same sampling"),
    ("eval/*/pass@*", Last, "fraction", "Chance that k of a prompt's n answers have a correct one, unbiased", "above accuracy"),
    ("eval/*/pass^*", Last, "fraction", "Chance that k of a prompt's n answers are all correct, unbiased", "rises towards accuracy"),
    ("eval/*/maj@*", Last, "fraction", "Chance that most votes of k of n answers go to a correct one; a tie has none", "above accuracy"),
    ("eval/*/response_length", Last, "tokens", "Generated tokens per answer", "close to rollout/response_length"),
    ("eval/*/truncated", Last, "fraction", "Answers that the token budget cut", "< 0.1; above: raise the set's max_response_tokens"),
    ("eval/*/unextracted", Last, "fraction", "Scored answers without an extracted one", "falls to near 0"),
    ("eval/*/failed", Last, "fraction", "Asked answers without a reward; in no other denominator", "0; NAME.jsonl has the causes"),
    ("train/loss", Mean, "loss", "All terms with their coefficients", "near 0 for policy gradients; its height means little"),
    ("train/policy_loss", Mean, "loss", "Policy term alone, when there are others", "near 0"),
    ("train/empty_step", Mean, "fraction", "Steps without a single trainable token", "0; mend the data or the filters"),
    ("train/entropy", Mean, "nats", "Entropy per trainable token", "slow decline; fast: lower lr, raise policy_loss.high or entropy.coef"),
    ("train/top_entropy", Mean, "nats", "Entropy of the tokens kept by top_entropy_fraction", "above entropy"),
    ("train/varentropy", Mean, "nats^2", "Variance of the surprise per trainable token", "of the order of the entropy"),
    ("train/full_entropy", Mean, "nats", "Entropy over the vocabulary, where tokens are left out of the draw", "above entropy"),
    ("train/candidates", Mean, "tokens", "Candidates for a trainable token, with top_p, top_k or min_p", "far below top_k; falls slowly"),
    ("train/lone_candidate", Mean, "fraction", "Trainable tokens with one candidate, which get no gradient", "< 0.8; else raise top_p"),
    ("train/entropy_coef", Last, "", "Coefficient of the entropy bonus in use", "steady unless a controller moves it"),
    ("train/clip_high", Last, "", "Upper clip range in use", "steady unless a controller moves it"),
    ("train/kl_loss_coef", Last, "", "Coefficient of the KL term in use", "steady unless a controller moves it"),
    ("train/kl_reference", Mean, "nats", "KL to the initial policy (k3); see training.reference_interval", "slow, < 0.5; jumps: lower lr"),
    ("train/kl_k1", Mean, "nats", "KL to the initial policy, estimator k1", "as kl_reference, noisier, may be negative"),
    ("train/kl_k2", Mean, "nats", "KL to the initial policy, estimator k2", "as kl_reference"),
    ("train/kl_k3", Mean, "nats", "KL to the initial policy, estimator k3", "as kl_reference"),
    ("train/kl_per_sequence", Mean, "nats", "KL to the initial policy, mean over trajectories of their token means", "as kl_reference"),
    ("train/teacher_kl", Mean, "nats", "KL from the old policy to the teacher, mean of old - teacher log-prob", "falls towards 0"),
    ("train/ppo_kl", Mean, "nats", "KL from the old policy, mean of old - new log-prob", "0 in a batch's first step, then < 0.02"),
    ("train/ratio", Mean, "", "Importance ratio new / old", "1 in a batch's first step, then within 0.1 of it"),
    ("train/clip_fraction_low", Mean, "fraction", "Tokens clipped at the lower bound", "< 0.1; above: lower lr or fewer optimizer steps"),
    ("train/clip_fraction_high", Mean, "fraction", "Tokens clipped at the upper bound", "< 0.1; above: lower lr or fewer optimizer steps"),
    ("train/dual_clip_fraction", Mean, "fraction", "Tokens clipped by the second bound of negative advantages", "< 0.01"),
    ("train/covariance_fraction", Mean, "fraction", "Tokens chosen by their covariance", "as set in the objective"),
    ("train/log_prob_diff", Mean, "nats", "Mean |engine - trainer| log-prob of trainable tokens", "fp32 < 1e-4, bf16 0.01; more if stale"),
    ("train/log_prob_diff_clipped", Mean, "nats", "The same of tokens by the present weights, outliers cut off", "a run ends at its limit"),
    ("train/log_prob_outliers", Mean, "fraction", "Share of the same tokens that were cut off", "near 0"),
    ("train/log_prob_diff_max", Max, "nats", "The largest of the same differences", "fp32 < 1e-3; bf16 < 1, more at ties of experts"),
    ("train/quadrant_*", Mean, "fraction", "Trainable tokens in a quadrant of rollout.sampling.entropy", "argmax below 0.9"),
    ("train/draw_log_ratio", Mean, "nats", "Mean log pi - log q, of policy and entropy-aware draw", "above -0.5; else cooler quadrants"),
    ("train/off_policy_ratio", Mean, "", "Trainer / engine probability of trainable tokens", "1 within 0.01"),
    ("train/off_policy_ratio_square", Mean, "", "Its square; 1 / this is the effective sample share", "1 within 0.02"),
    ("train/off_policy_weight_mean", Mean, "", "Weight of the off-policy correction", "1 within 0.05"),
    ("train/off_policy_weight_square", Mean, "", "Its square", "1 within 0.1"),
    ("train/off_policy_bounded_fraction", Mean, "fraction", "Tokens whose correction hit a bound", "< 0.01"),
    ("train/off_policy_rejected_fraction", Mean, "fraction", "Tokens that the correction rejected", "< 0.01; above: fresher rollouts"),
    ("train/expert_load_max", Max, "", "Tokens of any layer's busiest expert, over the layer's mean", "< 4; above: moe_aux_loss_coeff"),
    ("train/expert_load_min", Min, "", "Tokens of any layer's idlest expert, over the layer's mean", "> 0"),
    ("train/expert_idle_fraction", Mean, "fraction", "Experts that got no token in the step", "0 for large batches"),
    ("train/aux_loss", Mean, "", "The routers' sequence-wise balance loss, bare of its coefficient", "near 1; above 2: raise it"),
    ("train/router_z_loss", Mean, "", "Squared log-sum-exp of router logits, bare of its coefficient", "steady"),
    ("train/routing_replayed", Mean, "fraction", "Tokens routed to the experts that the engine chose", "near 1"),
    ("train/routing_changed", Mean, "fraction", "Replayed choices that the trainer would make otherwise", "fp32 < 1e-3, bf16 < 0.1"),
    ("train/routing_reordered", Mean, "fraction", "Those with the engine's experts in another order of weight", "below routing_changed"),
    ("train/value_mean", Mean, "reward", "The critic's value per token", "follows return_mean"),
    ("train/return_mean", Mean, "reward", "Return per token", "rises with the reward"),
    ("train/value_clip_fraction", Mean, "fraction", "Tokens whose value was clipped", "< 0.2"),
    ("train/value_loss", Mean, "loss", "Critic term", "falls, then flat"),
    ("train/explained_variance", Mean, "fraction", "Share of the returns' variance that the critic foretells", "rises; below 0: lower lr"),
    ("train/critic_grad_norm", Mean, "", "The critic's gradient norm before clipping", "steady"),
    ("train/critic_lr", Last, "", "The critic's learning rate", "the schedule"),
    ("train/critic_skipped_steps", Sum, "steps", "The critic's steps left out: non-finite loss or gradient", "0; replay the dump"),
    ("train/zero_variance_fraction", Mean, "fraction", "Groups without a learning signal", "< 0.5"),
    ("train/grad_norm", Mean, "", "Gradient norm before clipping", "steady; spikes over 10 times the median: lower lr"),
    ("train/lr", Last, "", "Learning rate", "the schedule"),
    ("train/num_tokens", Sum, "tokens", "Trainable tokens", "rollout/num_tokens less what was not scored"),
    ("train/num_sequences", Sum, "samples", "Sequences with a trainable token", "close to rollout/num_samples"),
    ("train/num_trajectories", Sum, "trajectories", "Trajectories with a trainable token, where they have several sequences", "steady"),
    ("train/num_micro_batches", Sum, "", "Micro-batches over all data-parallel ranks", "many: raise max_tokens_per_micro_batch"),
    ("train/skipped_steps", Sum, "steps", "Optimizer steps left out: non-finite loss or gradient", "0; replay the dumped micro-batch"),
    ("train/tokens_per_second", Mean, "tokens/s", "Trainable tokens per second of time/train", "steady"),
    ("time/rollout", Sum, "s", "Seconds in which groups were being made, awaited or not", "near time/train when asynchronous"),
    ("time/rollout_wait", Sum, "s", "Seconds that training waited for groups", "time/rollout when synchronous, else near 0"),
    ("time/sync_drain", Sum, "s", "Seconds until all engines stood still for a weight sync", "near 0"),
    ("time/sync_gather", Sum, "s", "Seconds of gathering and conversion; for disk a part of time/sync_send", "most of time/sync"),
    ("time/sync_send", Sum, "s", "Seconds of packing and sending, or of writing files, waits for engines included", "near a copy's"),
    ("time/sync_apply", Sum, "s", "Seconds of engines that take weights, waits for the ranks included", "gather and send"),
    ("time/sync_resume", Sum, "s", "Seconds until all engines went on", "near 0"),
    ("time/*", Sum, "s", "Seconds in one phase of the step", "the longest but time/rollout is the bottleneck"),
    ("weights/version", Last, "version", "Weights that the engines serve", "rises by one per step"),
    ("weights/bytes", Sum, "bytes", "Bytes sent in a weight sync", "the model's size; less with weights.delta"),
    ("weights/parity_median", Last, "nats", "Median |engine - trainer| log-prob of sampled tokens", "below weights.parity_threshold"),
    ("weights/parity_mean", Last, "nats", "Mean of the same", "a few medians; float32: below the threshold"),
    ("weights/parity_outliers", Last, "fraction", "Share of tokens far above the median that is allowed", "few"),
    ("weights/parity_mean_without_replay", Last, "nats", "The same with the trainer's own routing", "what routing replay is for"),
    ("weights/parity_mean_of_best", Last, "nats", "Mean of the engine that is closest to the trainer", "near that of the worst"),
    ("weights/parity_max", Last, "nats", "Largest |engine - trainer| log-prob of the probe", "within 100 times the mean"),
    ("weights/scored_median", Last, "nats", "Median |engine - trainer| log-prob of fixed tokens, scored at each sync", "steady"),
    ("weights/scored_mean", Last, "nats", "Mean of the same, of the worst engine", "steady; a rise over the run: the sides drift apart"),
    ("weights/scored_mean_of_best", Last, "nats", "Mean of the same, of the best engine", "near that of the worst"),
    ("weights/scored_max", Last, "nats", "Largest of the same", "within 100 times the mean"),
    ("weights/scored_outliers", Last, "fraction", "Share of the same that are far above the median that is allowed", "few"),
    ("buffer/pending", Last, "groups", "Prompts that wait for generation", ""),
    ("buffer/in_flight", Last, "groups", "Prompts being generated", "0 between steps of a synchronous run"),
    ("buffer/done", Last, "groups", "Finished groups that wait for training", "0 between steps of a synchronous run"),
    ("buffer/consumed", Last, "groups", "Groups trained on", "rises by prompts_per_step"),
    ("memory/peak_bytes", Max, "bytes", "Largest memory of all processes of the run so far (PSS)", "well below the machine's"),
)

METRICS: Mapping[str, MetricInfo] = {row[0]: MetricInfo(*row) for row in _TABLE}


def reference() -> str:
    """Return METRICS.md: all lines of METRICS, by their part of the run."""
    how = """python -c 'from megatron_rl.observe import metrics; print(metrics.reference(), end="")'"""
    lines = ["# Metrics", "", "Made from [the table](metrics.py), checked by a test, and written by", "", "```bash", how, "```"]
    part = ""
    for info in METRICS.values():
        if (first := info.name.partition("/")[0]) != part:
            part = first
            lines += ["", f"## {part}", ""]
        kind = ", ".join(filter(None, (info.unit, info.reduction.__name__.lower())))
        # A bound stays on one line.
        healthy = f" Healthy: {info.healthy}.".replace("< ", "<\0") if info.healthy else ""
        lines += textwrap.wrap(f"- `{info.name}` ({kind}): {info.meaning}.{healthy}", 100, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


def find_info(name: str) -> MetricInfo | None:
    """Return the line of METRICS for `name`, None for one of a user's own loss."""
    return METRICS.get(name) or next((info for pattern, info in METRICS.items() if fnmatchcase(name, pattern.replace("*", "?*"))), None)


def metric_info(name: str) -> MetricInfo:
    """Return the line of METRICS for `name`. Raises KeyError with the closest name without one."""
    found = find_info(name)
    if found is not None:
        return found
    closest = difflib.get_close_matches(name, METRICS, n=1)
    raise KeyError(f"metric {name!r} is not in the table of metrics" + (f"; the closest is {closest[0]!r}" if closest else ""))


def healthy_bound(name: str) -> float | None:
    """Return the bound that begins the healthy range of a metric, as in `< 0.1`; None without one."""
    info = find_info(name)
    bound = None if info is None else re.match(r"< ([\d.]+)(?=;|$)", info.healthy)
    return None if bound is None else float(bound[1])


def is_beyond_healthy(name: str, value: float) -> bool:
    """Return True where `value` is not below its `healthy_bound`."""
    bound = healthy_bound(name)
    return bound is not None and not value < bound


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raise KeyError for a name missing in the table and TypeError for an undeclared reduction."""
    for name, metric in metrics.items():
        declared = metric_info(name).reduction
        if type(metric) is not declared:
            raise TypeError(f"metric {name!r} has reduction {type(metric).__name__}, the table declares {declared.__name__}")
