"""Records that cross a process boundary: immutable, validated when they are made.

Legend: P prompt tokens, R response tokens, T tokens of a flat batch of sequences, B sequences.
Per-token arrays are aligned with the token they score: `log_probs[t] = log p(token[t] | token[<t])`.
"""

import enum
import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_rl.errors import counted
from megatron_rl.frozen_arrays import check_distinct, check_lengths, freeze, freeze_experts, freeze_table, read_only

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
Experts = NDArray[np.uint8] | NDArray[np.uint16]
"""Numbers of experts [tokens, L mixture layers, K experts of a token], in the smallest type that the producer could choose."""
_OPTIONAL_FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages")
"""Fields [T] of a TrainBatch that may be None."""


def _no_components() -> Doubles:
    return np.empty((0, 0))


def _nothing_routed() -> Bools:
    return np.empty(0, np.bool_)


def _each_alone() -> Ints:
    return np.empty(0, np.int64)


def _token_ids(name: str, ids: ArrayLike) -> Ints:
    """One sequence's token ids [n]. Raises ValueError for what is not a flat list of whole numbers from 0 on."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(
            f"from_sequences got {name} with a row of type {array.dtype}, shape {array.shape}; needs token ids [n], without padding"
        )
    if array.size and array.min() < 0:
        raise ValueError(f"from_sequences got {name} with the token id {array.min()}; needs ids of 0 or more, without padding")
    return array.astype(np.int64)


def _behind_prompts(name: str, given: Sequence[ArrayLike], prompts: Sequence[Ints], responses: Sequence[Ints], *, fill: float) -> Floats:
    """Numbers of the responses' tokens, each row behind as many `fill` as its prompt has tokens, flat [T]."""
    if len(given) != len(responses):
        raise ValueError(f"from_sequences got {name} of {len(given)} responses, needs those of all {len(responses)}")
    parts = [np.empty(0, np.float32)]
    for row, (numbers, prompt, response) in enumerate(zip(given, prompts, responses, strict=True)):
        array = np.asarray(numbers, np.float32)
        if name == "advantages" and array.ndim == 0:
            array = np.full(len(response), array, np.float32)
        if array.shape != response.shape:
            raise ValueError(
                f"from_sequences got {name}[{row}] of shape {array.shape} for a response of {counted(len(response), 'token')}, needs one "
                "each"
            )
        parts += [np.full(len(prompt), fill, np.float32), array]
    return np.concatenate(parts)


def _numbered(labels: Iterable[Hashable]) -> Ints:
    """Equal labels as equal numbers, counted from 0 in the order in which they first appear, [B]."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)


class StopReason(str, enum.Enum):
    """Why a response ended."""

    STOP = "stop"
    """The model emitted a stop token or stop string."""
    LENGTH = "length"
    """The token budget ran out: the response is truncated."""
    ABORT = "abort"
    """The request was aborted; the response is partial."""


class RewardOutcome(str, enum.Enum):
    """What became of a reward call. An error or a timeout is never a score of zero."""

    SCORED = "scored"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Reward:
    """The result of one reward call.

    `value` is a finite number exactly when `outcome` is SCORED, else None; `message` then holds the traceback or the timeout.
    `components` names the parts of a composite reward.
    """

    outcome: RewardOutcome
    value: float | None = None
    message: str = ""
    components: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scored = self.outcome is RewardOutcome.SCORED
        if scored != (self.value is not None and math.isfinite(self.value)):
            raise ValueError(
                f"Reward with outcome {self.outcome.value} has value {self.value!r}; scored needs a finite number, others None"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One problem to generate for: token ids [P], the text they came from, the label a reward function compares with."""

    id: str
    token_ids: Ints
    text: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self, "token_ids", np.int64)
        if not len(self.token_ids):
            raise ValueError(f"Prompt {self.id!r} has no tokens, needs at least one")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response to a prompt, with everything known of each of its tokens.

    Samples of a group that have the same `trajectory` are parts of one attempt at its problem, such as turns of several agents, or those
    before and after a history was cut; they carry the same reward, the highest `index` is the last. None: an attempt of this sample alone.
    `prompt` is what the engine saw before this response: the group's, or one with token ids and text of its own.

    Arrays have length R: `response_ids`; `loss_mask`, True where the policy chose the token and trains on it;
    `rollout_log_probs`, nats, of the sampling distribution; `weight_versions`, the weights that made each token
    (-1 for tokens no engine made).

    `routed_experts` [N, L, K], from an engine that was asked for them, are the experts of the first N tokens of prompt and response
    in each of the model's L mixture layers. The engine never routes the last token that it makes, so N is at most P + R - 1 for one
    turn. None means that nothing is known.
    """

    group_id: str
    index: int
    prompt: Prompt
    response_ids: Ints
    loss_mask: Bools
    rollout_log_probs: Floats
    weight_versions: Ints
    stop_reason: StopReason
    response_text: str = ""
    reward: Reward | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: Experts | None = None
    trajectory: int | None = None

    def __post_init__(self) -> None:
        if self.trajectory is not None:
            object.__setattr__(self, "trajectory", operator.index(self.trajectory))
        freeze(self, "response_ids", np.int64)
        freeze(self, "loss_mask", np.bool_)
        freeze(self, "rollout_log_probs", np.float32)
        freeze(self, "weight_versions", np.int64)
        check_lengths(self, ("loss_mask", "rollout_log_probs", "weight_versions"), len(self.response_ids))
        trained = self.rollout_log_probs[self.loss_mask]
        if not np.isfinite(trained).all():
            raise ValueError(
                f"Sample {self.index} of group {self.group_id} has the rollout log-prob {trained[~np.isfinite(trained)][0]} on a trainable "
                "token, needs a finite number"
            )
        if self.routed_experts is not None:
            freeze_experts(self, "routed_experts")
            check_distinct(self, self.routed_experts)
            num_tokens = len(self.prompt.token_ids) + len(self.response_ids)
            if len(self.routed_experts) > num_tokens:
                raise ValueError(
                    f"Sample {self.index} of group {self.group_id} has experts of {len(self.routed_experts)} tokens, needs at most "
                    f"{num_tokens}, those of its prompt and response"
                )

    @property
    def truncated(self) -> bool:
        """True when the token budget ended the response."""
        return self.stop_reason is StopReason.LENGTH

    @property
    def num_turns(self) -> int:
        """Turns of the model in this response: runs of tokens that an engine made, divided by tokens that none made."""
        made = self.weight_versions >= 0
        return int(made[:1].sum() + (made[1:] & ~made[:-1]).sum())


def trajectories(samples: Iterable[Sample]) -> tuple[tuple[Sample, ...], ...]:
    """The samples of each trajectory by index; trajectories in the order in which they first appear in `samples`."""
    found: dict[Hashable, list[Sample]] = {}
    for position, sample in enumerate(samples):
        key = (position,) if sample.trajectory is None else (sample.group_id, sample.trajectory)
        found.setdefault(key, []).append(sample)
    return tuple(tuple(sorted(parts, key=lambda part: part.index)) for parts in found.values())


def last_samples(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """The last sample of each trajectory: the one that was scored, and whose reward is that of the trajectory."""
    return tuple(parts[-1] for parts in trajectories(samples))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All trajectories from one prompt, of a sample or more each; the unit that moves through the buffer."""

    id: str
    prompt: Prompt
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        strays = [sample.group_id for sample in self.samples if sample.group_id != self.id]
        if strays:
            raise ValueError(f"Group {self.id} holds samples of group {strays[0]}")


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """B whole sequences as flat arrays, prompt and response tokens alike.

    `cu_seqlens` [B + 1] are the offsets of the sequences in the token arrays of length T. `loss_mask` [T] is False on
    prompts. `rollout_log_probs` [T] nats and `weight_versions` [T] hold 0 and -1 where no engine made the token; log-probs None: they are
    not known. `rewards` [B] (NaN: none), `group_ids` [B] (equal for samples of one prompt), `truncated` [B]. `reward_components` [B, K]
    are the parts of composite rewards, named by `component_names` [K]; NaN where a sample's reward lacks the part. `routed_experts`
    [T, L, K] are the experts of each token in each mixture layer as engines chose them, known where `routed` [T] is True; None without
    any record. `trajectory_ids` [B] are equal for the sequences of one trajectory, which have one group and one reward: baselines and
    means over sequences count it once, with the tokens of all its sequences; when not given, each sequence is a trajectory.

    What a loop of its own has computed, each [T], finite on trainable tokens and used as it is; None lets the trainer compute it:
    `old_log_probs` nats, of the policy before the first optimizer step on these tokens; `ref_log_probs` nats, of the reference;
    `values`, reward units, of a critic in the state in which the token was chosen; `advantages`, in place of those that the
    objective's estimator makes of the rewards: no baseline, scale or whitening is applied to them.

    Example: `TrainBatch.from_sequences(prompts=[[5, 6], [5, 6]], responses=[[7], [8, 9]], rewards=[1.0, 0.0])`.
    """

    tokens: Ints
    cu_seqlens: Ints
    prompt_lengths: Ints
    loss_mask: Bools
    rollout_log_probs: Floats | None
    weight_versions: Ints
    rewards: Doubles
    group_ids: Ints
    truncated: Bools
    component_names: tuple[str, ...] = ()
    reward_components: Doubles = field(default_factory=_no_components)
    routed_experts: Experts | None = None
    routed: Bools = field(default_factory=_nothing_routed)
    old_log_probs: Floats | None = None
    ref_log_probs: Floats | None = None
    values: Floats | None = None
    advantages: Floats | None = None
    trajectory_ids: Ints = field(default_factory=_each_alone)

    def __post_init__(self) -> None:
        if not len(self.trajectory_ids):
            object.__setattr__(self, "trajectory_ids", np.arange(self.num_sequences))
        for name in ("tokens", "cu_seqlens", "prompt_lengths", "weight_versions", "group_ids", "trajectory_ids"):
            freeze(self, name, np.int64)
        for name in ("loss_mask", "truncated", "routed"):
            freeze(self, name, np.bool_)
        freeze(self, "rewards", np.float64)
        if len(self.cu_seqlens) < 1 or self.cu_seqlens[0] != 0 or (np.diff(self.cu_seqlens) < 1).any():
            raise ValueError("TrainBatch.cu_seqlens needs to start at 0 and to rise: a sequence without tokens cannot be trained on")
        check_lengths(self, ("tokens", "loss_mask", "weight_versions"), int(self.cu_seqlens[-1]))
        for name in _OPTIONAL_FLOATS:
            self._check_optional(name)
        check_lengths(self, ("prompt_lengths", "rewards", "group_ids", "truncated", "trajectory_ids"), self.num_sequences)
        freeze_table(self, "reward_components", num_rows=self.num_sequences, num_columns=len(self.component_names))
        self._check_trajectories()
        if self.routed_experts is not None:
            freeze_experts(self, "routed_experts")
            check_lengths(self, ("routed_experts", "routed"), int(self.cu_seqlens[-1]))

    def _check_optional(self, name: str) -> None:
        """Freeze the field `name` [T], where it is given. Raises ValueError for another length or a trainable token without a number."""
        if getattr(self, name) is None:
            return
        freeze(self, name, np.float32)
        check_lengths(self, (name,), len(self.tokens))
        bad = self.loss_mask & ~np.isfinite(getattr(self, name))
        if bad.any():
            row = int(np.searchsorted(self.cu_seqlens, bad.argmax(), side="right")) - 1
            raise ValueError(
                f"TrainBatch.{name} is {getattr(self, name)[bad.argmax()]} on trainable token {bad.argmax() - self.cu_seqlens[row]} of "
                f"sequence {row}, needs a finite number there; only tokens that loss_mask leaves out may hold anything"
            )

    def _check_trajectories(self) -> None:
        """Raise ValueError where sequences of one trajectory have different groups or rewards."""
        _, first, index = np.unique(self.trajectory_ids, return_index=True, return_inverse=True)
        if len(first) == self.num_sequences:
            return
        for name in ("group_ids", "rewards", "reward_components"):
            values = getattr(self, name)
            expected = values[first[index]]
            differs = ((values != expected) & ~(np.isnan(values) & np.isnan(expected))).reshape(self.num_sequences, -1).any(axis=1)
            if differs.any():
                row = int(differs.argmax())
                raise ValueError(
                    f"TrainBatch.{name} is {values[row]} for sequence {row} and {expected[row]} for sequence {first[index][row]}, needs "
                    f"the same for both, which are of trajectory {self.trajectory_ids[row]}; give each trajectory of the batch an id of "
                    "its own, and one group and reward"
                )

    @classmethod
    def from_sequences(
        cls,
        *,
        prompts: Sequence[ArrayLike],
        responses: Sequence[ArrayLike],
        rewards: ArrayLike | None = None,
        group_ids: Iterable[Hashable] | None = None,
        loss_masks: Sequence[ArrayLike] | None = None,
        rollout_log_probs: Sequence[ArrayLike] | None = None,
        old_log_probs: Sequence[ArrayLike] | None = None,
        ref_log_probs: Sequence[ArrayLike] | None = None,
        values: Sequence[ArrayLike] | None = None,
        advantages: Sequence[ArrayLike] | None = None,
        truncated: ArrayLike | None = None,
        trajectory_ids: Iterable[Hashable] | None = None,
    ) -> "TrainBatch":
        """A batch of B responses, `responses[b]` [R_b] token ids to `prompts[b]` [P_b] (at least one), no padding in either.

        `rewards` [B]. `group_ids` [B], any labels: equal ones share a baseline; equal prompts when not given. `trajectory_ids` [B], any
        labels that no other group uses: equal ones are one trajectory, whose first prompt decides its group where none is given. Whatever
        is given per token is [R_b] for response b, aligned with its tokens: `loss_masks`, True where the token is trained on (all when
        not given), and the fields of that name; `advantages` may also be one number for each response. `truncated` [B], False when not
        given.
        Without `rollout_log_probs` the generator is taken to be the policy before the step. Raises ValueError for other lengths.
        """
        rows = [_token_ids(name, ids) for name, parts in (("prompts", prompts), ("responses", responses)) for ids in parts]
        prompt_ids, response_ids = rows[: len(prompts)], rows[len(prompts) :]
        shortest = min(map(len, prompt_ids), default=0)
        if len(prompt_ids) != len(response_ids) or not all(map(len, prompt_ids)):
            raise ValueError(
                f"from_sequences got {counted(len(prompt_ids), 'prompt')}, the shortest of {counted(shortest, 'token')}, and "
                f"{counted(len(response_ids), 'response')}; needs a prompt of a token or more for each response"
            )

        def flat(name: str, given: Sequence[ArrayLike] | None, *, fill: float = 0.0) -> Floats | None:
            return None if given is None else _behind_prompts(name, given, prompt_ids, response_ids, fill=fill)

        whole = [np.ones(len(ids)) for ids in response_ids]
        made = [np.full(len(ids), -1 if rollout_log_probs is None else 0) for ids in response_ids]
        num = len(response_ids)
        owners = range(num) if trajectory_ids is None else list(trajectory_ids)
        if len(owners) != num:
            raise ValueError(f"from_sequences got {len(owners)} trajectory_ids, needs one for each of {num} responses")
        openings: dict[Hashable, Hashable] = {}
        groups = [openings.setdefault(owner, ids.tobytes()) for owner, ids in zip(owners, prompt_ids, strict=True)]
        return cls(
            tokens=np.concatenate([np.empty(0, np.int64), *itertools.chain(*zip(prompt_ids, response_ids, strict=True))]),
            cu_seqlens=np.cumsum([0, *(len(prompt) + len(ids) for prompt, ids in zip(prompt_ids, response_ids, strict=True))]),
            prompt_lengths=np.array([len(ids) for ids in prompt_ids], np.int64),
            loss_mask=np.asarray(flat("loss_masks", whole if loss_masks is None else loss_masks), np.bool_),
            weight_versions=np.asarray(flat("weight_versions", made, fill=-1), np.int64),
            rollout_log_probs=flat("rollout_log_probs", rollout_log_probs),
            old_log_probs=flat("old_log_probs", old_log_probs),
            ref_log_probs=flat("ref_log_probs", ref_log_probs),
            values=flat("values", values),
            advantages=flat("advantages", advantages),
            rewards=np.full(num, np.nan) if rewards is None else np.asarray(rewards, np.float64),
            group_ids=_numbered(groups if group_ids is None else group_ids),
            trajectory_ids=_numbered(owners),
            truncated=np.zeros(num, np.bool_) if truncated is None else np.asarray(truncated, np.bool_),
        )

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Ints:
        """Tokens of each sequence, [B]."""
        return np.diff(self.cu_seqlens)

    @property
    def trainable_tokens(self) -> Ints:
        """Tokens of each sequence that the loss mask keeps, [B]."""
        return np.add.reduceat(self.loss_mask, self.cu_seqlens[:-1], dtype=np.int64) if self.num_sequences else np.empty(0, np.int64)

    def select(self, rows: Ints, *, may_cut: bool = False) -> "TrainBatch":
        """The sequences `rows`, in that order, as a batch of their own.

        Raises ValueError when they are a part of a trajectory, whose other sequences its means count, unless they `may_cut` one.
        """
        chosen = np.zeros(self.num_sequences, np.bool_)
        chosen[rows] = True
        cut = ~chosen & np.isin(self.trajectory_ids, self.trajectory_ids[rows])
        if cut.any() and not may_cut:
            raise ValueError(
                f"TrainBatch.select got rows without {np.flatnonzero(cut)[0]}, needs all sequences of trajectory "
                f"{self.trajectory_ids[cut][0]} or none; choose whole trajectories by trajectory_ids"
            )
        spans = [np.arange(self.cu_seqlens[row], self.cu_seqlens[row + 1]) for row in rows]
        positions = np.concatenate(spans) if spans else np.empty(0, np.int64)
        return TrainBatch(
            tokens=self.tokens[positions],
            cu_seqlens=np.concatenate([[0], np.cumsum(self.lengths[rows])]),
            prompt_lengths=self.prompt_lengths[rows],
            loss_mask=self.loss_mask[positions],
            weight_versions=self.weight_versions[positions],
            rewards=self.rewards[rows],
            group_ids=self.group_ids[rows],
            trajectory_ids=self.trajectory_ids[rows],
            truncated=self.truncated[rows],
            component_names=self.component_names,
            reward_components=self.reward_components[rows],
            routed_experts=None if self.routed_experts is None else read_only(self.routed_experts[positions]),
            routed=self.routed if self.routed_experts is None else self.routed[positions],
            **{name: None if getattr(self, name) is None else getattr(self, name)[positions] for name in _OPTIONAL_FLOATS},
        )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The denominators of one optimizer step, counted once over all ranks and micro-batches.

    `num_tokens` trainable tokens N; `num_trajectories` trajectories with at least one trainable token, B; `num_sequences` sequences with
    at least one, which are as many where each is a trajectory; `num_sequence_tokens` all tokens of these sequences, prompts included.
    """

    num_tokens: int
    num_trajectories: int
    num_sequences: int
    num_sequence_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One optimizer step on one data-parallel rank: which rows of the shard form each micro-batch, and the step's totals.

    Every data-parallel rank has the same number of micro-batches; one may be empty.
    """

    micro_batches: tuple[Ints, ...]
    totals: StepTotals


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What one data-parallel rank trains on: its sequences, its optimizer steps, and the rewards of the whole batch.

    `rows` [B_local] are the positions of this shard's sequences in the whole batch. `all_rewards`, `all_group_ids`, `all_trajectory_ids`
    and `all_trainable_tokens` [B_all] and `all_reward_components` [B_all, K] describe the whole batch, because a baseline needs groups,
    and a mean trajectories, that other ranks hold.
    """

    batch: TrainBatch
    rows: Ints
    steps: tuple[StepPlan, ...]
    all_rewards: Doubles
    all_group_ids: Ints
    all_trajectory_ids: Ints
    all_trainable_tokens: Ints
    all_reward_components: Doubles = field(default_factory=_no_components)

    def __post_init__(self) -> None:
        for name in ("rows", "all_group_ids", "all_trajectory_ids", "all_trainable_tokens"):
            freeze(self, name, np.int64)
        freeze(self, "all_rewards", np.float64)
        check_lengths(self, ("rows",), self.batch.num_sequences)
        check_lengths(self, ("all_group_ids", "all_trajectory_ids", "all_trainable_tokens"), len(self.all_rewards))
        num_components = len(self.batch.component_names)
        freeze_table(self, "all_reward_components", num_rows=len(self.all_rewards), num_columns=num_components)
