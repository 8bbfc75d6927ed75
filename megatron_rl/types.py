"""Records that cross a process boundary: immutable, validated when they are made.

Legend: P prompt tokens, R response tokens, T tokens of a flat batch, B sequences. Per-token arrays
are aligned with the token they score: `log_probs[t] = log p(token[t] | token[<t])`.
"""

import dataclasses
import enum
import math
import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.system.frozen_arrays import Candidates, check_candidates, check_distinct, freeze, freeze_experts, freeze_table

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
Message = Mapping[str, Any]
"""A message of a chat, in OpenAI's form: role, content, and the assistant's tool_calls."""
Experts = NDArray[np.uint8] | NDArray[np.uint16]
"""Chosen experts' indices [tokens, L mixture layers, K experts of a token], of the smallest type."""
_TOKEN_FIELDS: dict[str, type[np.generic]] = {"tokens": np.int64, "loss_mask": np.bool_, "weight_versions": np.int64}
"""Fields [T] of a TrainBatch, with their types."""
_OPTIONAL_FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages")
"""Fields [T] of a TrainBatch that may be None."""
_SEQUENCE_FIELDS: dict[str, type[np.generic]] = dict(
    prompt_lengths=np.int64, rewards=np.float64, group_ids=np.int64, truncated=np.bool_, trajectory_ids=np.int64
)
"""Fields [B] of a TrainBatch, with their types."""


class StopReason(enum.StrEnum):
    """The reason for the end of a response."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # the token budget: the response is truncated
    ABORT = "abort"  # the end of the request: the response is partial


class RewardOutcome(enum.StrEnum):
    """The outcome of a reward call. An error or a timeout is never a score of zero."""

    SCORED = "scored"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Reward:
    """The result of one reward call.

    `value` is a finite number exactly when `outcome` is SCORED; otherwise `message` holds the
    traceback or the timeout. `components` names the parts of a composite reward. `answer` is the
    text that evaluations vote on: the answer extracted from the response, empty where there is
    none, None of a function that extracts none. The buffer does not hold it.
    """

    outcome: RewardOutcome
    value: float | None = None
    message: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None

    def __post_init__(self) -> None:
        scored = self.outcome is RewardOutcome.SCORED
        if scored != (self.value is not None and math.isfinite(self.value)):
            raise ValueError(
                f"Reward with outcome {self.outcome.value} has value {self.value!r}; scored needs a finite number, others None"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One problem: token ids [P], the source text, and the label for the reward function.

    `messages` are those of a chat, and one of the user where the source has a string.
    """

    id: str
    token_ids: Ints
    text: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        freeze(self, {"token_ids": np.int64})
        if not self.messages:
            object.__setattr__(self, "messages", ({"role": "user", "content": self.text},))
        if not len(self.token_ids):
            raise ValueError(f"Prompt {self.id!r} has no tokens, needs at least one")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response to a prompt, with all known values of each token.

    Samples of a group with the same `trajectory` are parts of one: turns of several agents, or
    parts before and after a cut of the history. All carry its reward; the highest `index` is the
    last. A sample with None is a trajectory by itself. Trajectories of a group are compared within
    their `role`, such as proposer or verifier; None: one role. `prompt` is the engine's input: the
    group's prompt, or one with other tokens and text.

    Arrays have length R: `loss_mask`, True where the policy chose the token and trains on it;
    `rollout_log_probs`, nats, of the sampling distribution; `weight_versions` of the weights behind
    each token (-1 for tokens not made by an engine).

    `routed_experts` [N, L, K] are the engine's experts of the first N tokens of prompt and response
    in L mixture layers. The last token of a turn is never routed: one turn has N <= P + R - 1.
    `candidates` [R] are those of the sampler, for all trained tokens; None: the whole vocabulary.
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
    role: str | None = None
    candidates: Candidates | None = None

    def __post_init__(self) -> None:
        if self.trajectory is not None:
            object.__setattr__(self, "trajectory", operator.index(self.trajectory))
        freeze(self, {"response_ids": np.int64})
        per_token = {"loss_mask": np.bool_, "rollout_log_probs": np.float32, "weight_versions": np.int64}
        freeze(self, per_token, length=len(self.response_ids))
        trained = self.rollout_log_probs[self.loss_mask]
        if not np.isfinite(trained).all():
            raise ValueError(
                f"Sample {self.index} of group {self.group_id} has the rollout log-prob {trained[~np.isfinite(trained)][0]} on a trainable "
                "token, needs a finite number"
            )
        if self.candidates is not None:
            check_candidates(self, self.response_ids, name=f"Sample {self.index} of group {self.group_id}")
        if self.routed_experts is not None:
            freeze_experts(self)
            check_distinct(self, self.routed_experts)
            num_tokens = len(self.prompt.token_ids) + len(self.response_ids)
            if len(self.routed_experts) > num_tokens:
                raise ValueError(
                    f"Sample {self.index} of group {self.group_id} has experts of {len(self.routed_experts)} tokens, needs at most "
                    f"{num_tokens}, those of its prompt and response"
                )

    @classmethod
    def written(cls, prompt: Prompt, response_ids: Sequence[int] = (), *, text: str, reward: Reward | None = None) -> "Sample":
        """Return a sample of R tokens that no engine made; all are trained on."""
        length = len(response_ids)
        return cls(
            group_id=prompt.id,
            index=0,
            prompt=prompt,
            response_ids=np.array(response_ids, np.int64),
            loss_mask=np.ones(length, np.bool_),
            rollout_log_probs=np.zeros(length, np.float32),
            weight_versions=np.full(length, -1),
            stop_reason=StopReason.STOP,
            response_text=text,
            reward=reward,
        )

    @property
    def truncated(self) -> bool:
        """Return True when the token budget ended the response."""
        return self.stop_reason is StopReason.LENGTH


def trajectories(samples: Iterable[Sample]) -> tuple[tuple[Sample, ...], ...]:
    """Return each trajectory's samples by index; trajectories in order of appearance."""
    found: dict[Hashable, list[Sample]] = {}
    for position, sample in enumerate(samples):
        key = (position,) if sample.trajectory is None else (sample.group_id, sample.trajectory)
        found.setdefault(key, []).append(sample)
    return tuple(tuple(sorted(parts, key=lambda part: part.index)) for parts in found.values())


def last_samples(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Return the last sample of each trajectory, with the trajectory's reward."""
    return tuple(parts[-1] for parts in trajectories(samples))


@dataclass(frozen=True, slots=True)
class Failure:
    """A trajectory without a result after all attempts of its rollout.

    `cause` is error, timeout, contract, environment, tool, replay, context or template, of agents
    also agent, budget or no_request; `headline` one line, equal for failures of one kind and any
    prompt; `trace` a traceback, where there is one.
    """

    cause: str
    headline: str
    trace: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All trajectories from one prompt, failed ones too: the unit of the buffer."""

    id: str
    prompt: Prompt
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        strays = [sample.group_id for sample in self.samples if sample.group_id != self.id]
        if strays:
            raise ValueError(f"Group {self.id} holds samples of group {strays[0]}")

    @property
    def num_made(self) -> int:
        """Return the number of trajectories, of each role where there are roles."""
        return max(Counter(sample.role for sample in last_samples(self.samples)).values(), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """B whole sequences as flat arrays, prompt and response tokens alike.

    `cu_seqlens` [B + 1] are the offsets of the sequences in the arrays of length T. `loss_mask` [T]
    is False on prompts. `rollout_log_probs` [T], nats, and `weight_versions` [T] hold 0 and -1 at
    tokens not made by an engine; log-probs None: not known. `rewards` [B] are NaN without a score.
    `group_ids` [B] are equal for samples of a prompt. `truncated` [B] is True where the token budget
    ended the response. `reward_components` [B, K], named by `component_names` [K], are NaN where a
    part is missing. `routed_experts` [T, L, K] are the engines', known where `routed` [T] is True.
    `candidates` [T] restrict log-probs and entropies to the distribution that was sampled.
    `version` is that of the weights before the step on this batch.

    `trajectory_ids` [B] are equal for the sequences of one trajectory, which have one group and one
    reward; by default each sequence is a trajectory. Baselines and means count a trajectory once,
    with all its tokens.

    Values of the caller's own loop, each [T], are finite on trainable tokens and used unchanged;
    the trainer computes absent ones. `old_log_probs`, nats, of the policy before the first step on
    these tokens; `ref_log_probs`, nats, of the reference; `values`, reward units, of a critic in
    the state before the token; `advantages`, without any baseline, scale or whitening.
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
    reward_components: Doubles = field(default_factory=lambda: np.empty((0, 0)))
    routed_experts: Experts | None = None
    routed: Bools = field(default_factory=lambda: np.empty(0, np.bool_))
    old_log_probs: Floats | None = None
    ref_log_probs: Floats | None = None
    values: Floats | None = None
    advantages: Floats | None = None
    trajectory_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    version: int = 0
    candidates: Candidates | None = None

    def __post_init__(self) -> None:
        if not len(self.trajectory_ids):
            object.__setattr__(self, "trajectory_ids", np.arange(self.num_sequences))
        freeze(self, {"cu_seqlens": np.int64})
        if len(self.cu_seqlens) < 1 or self.cu_seqlens[0] != 0 or (np.diff(self.cu_seqlens) < 1).any():
            raise ValueError("TrainBatch.cu_seqlens needs to start at 0 and to rise: a sequence without tokens cannot be trained on")
        num_tokens = int(self.cu_seqlens[-1])
        given = [name for name in _OPTIONAL_FLOATS if getattr(self, name) is not None]
        freeze(self, _TOKEN_FIELDS | dict.fromkeys(given, np.float32), length=num_tokens)
        for name in given:
            self._check_finite(name)
        freeze(self, _SEQUENCE_FIELDS, length=self.num_sequences)
        freeze_table(self, "reward_components", num_rows=self.num_sequences, num_columns=len(self.component_names))
        self._check_trajectories()
        freeze(self, {"routed": np.bool_}, length=None if self.routed_experts is None else num_tokens)
        if self.routed_experts is not None:
            freeze_experts(self, length=num_tokens)
        if self.candidates is not None:
            check_candidates(self, self.tokens)

    def _check_finite(self, name: str) -> None:
        """Raise ValueError for a trainable token without a number in the field `name` [T]."""
        values = getattr(self, name)
        bad = self.loss_mask & ~np.isfinite(values)
        if bad.any():
            token = int(bad.argmax())
            row = int(np.searchsorted(self.cu_seqlens, token, side="right")) - 1
            raise ValueError(
                f"TrainBatch.{name} is {values[token]} on trainable token {token - self.cu_seqlens[row]} of sequence {row}, "
                "needs a finite number there; only tokens that loss_mask leaves out may hold anything"
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
        """Count each sequence's tokens inside the loss mask, [B]."""
        return np.add.reduceat(self.loss_mask, self.cu_seqlens[:-1], dtype=np.int64) if self.num_sequences else np.empty(0, np.int64)

    def select(self, rows: Ints, *, may_cut: bool = False) -> "TrainBatch":
        """Return the sequences `rows`, in order. ValueError for a cut trajectory unless `may_cut`."""
        chosen = np.zeros(self.num_sequences, np.bool_)
        chosen[rows] = True
        cut = ~chosen & np.isin(self.trajectory_ids, self.trajectory_ids[rows])
        if cut.any() and not may_cut:
            raise ValueError(
                f"TrainBatch.select got rows without {np.flatnonzero(cut)[0]}, needs all sequences of trajectory "
                f"{self.trajectory_ids[cut][0]} or none; choose whole trajectories by trajectory_ids"
            )
        spans = [np.arange(self.cu_seqlens[row], self.cu_seqlens[row + 1]) for row in rows]
        positions = np.concatenate([np.empty(0, np.int64), *spans])
        fields: dict[str, Any] = {name: getattr(self, name)[rows] for name in (*_SEQUENCE_FIELDS, "reward_components")}
        for name in (*_TOKEN_FIELDS, *_OPTIONAL_FLOATS):
            values = getattr(self, name)
            fields[name] = None if values is None else values[positions]
        if self.routed_experts is not None:
            fields |= {"routed": self.routed[positions], "routed_experts": self.routed_experts[positions]}
            # The record copies no array that is read-only.
            fields["routed_experts"].setflags(write=False)
        fields["candidates"] = None if self.candidates is None else self.candidates.take(positions)
        return dataclasses.replace(self, cu_seqlens=np.concatenate([[0], np.cumsum(self.lengths[rows])]), **fields)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The denominators of one optimizer step, counted once over all ranks and micro-batches."""

    num_tokens: int  # trainable ones
    num_trajectories: int  # with at least one trainable token, as `num_sequences`
    num_sequences: int
    num_sequence_tokens: int  # all tokens of the counted sequences, prompts included


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The training data of one data-parallel rank: sequences, optimizer steps, and all rewards.

    `rows` [B_local] are the positions of this shard's sequences in the whole batch, described by
    `all_…` [B_all]: a baseline needs groups, and a mean needs trajectories, held by other ranks.
    `steps` have the rows of each micro-batch within `batch`: equally many on every data-parallel
    rank, some empty.
    """

    batch: TrainBatch
    rows: Ints
    steps: tuple[tuple[Ints, ...], ...]
    totals: tuple[StepTotals, ...]
    all_rewards: Doubles
    all_group_ids: Ints
    all_trajectory_ids: Ints
    all_trainable_tokens: Ints
    all_reward_components: Doubles = field(default_factory=lambda: np.empty((0, 0)))

    def __post_init__(self) -> None:
        freeze(self, {"rows": np.int64}, length=self.batch.num_sequences)
        all_fields = ("all_group_ids", "all_trajectory_ids", "all_trainable_tokens")
        freeze(self, {"all_rewards": np.float64, **dict.fromkeys(all_fields, np.int64)}, length=len(self.all_rewards))
        num_components = len(self.batch.component_names)
        freeze_table(self, "all_reward_components", num_rows=len(self.all_rewards), num_columns=num_components)
