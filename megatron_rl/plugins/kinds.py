"""Kinds of plug-ins: your own code in seven places of a run, each a protocol or a base class.

Calls are by keyword only. A plug-in takes the arguments of its kind and further keyword arguments
with annotations, given by the settings: `reward: {function: my.module:score, args: {threshold:
0.5}}` calls `score(sample=.., threshold=0.5)`.

Legend: B trajectories of a batch; each counts once, whatever the number of samples.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.algorithms.objective import Objective
    from megatron_rl.algorithms.policy_loss import PolicyLossTerms, PolicyTerms
    from megatron_rl.engines.answers import Generation
    from megatron_rl.engines.sampling import Sampling
    from megatron_rl.types import Group, Ints, Prompt, Sample

PluginKind = Literal["reward", "rollout", "environment", "filter", "advantage", "policy_loss", "data_source"]


class Reward(Protocol):
    """`reward.function`: the quality of a sample. Runs in worker processes, sync or async.

    Async ones are called for up to 64 samples at the same time in a worker. A sync function that
    takes `samples` instead gets those of a whole group, the last of each trajectory, and returns a
    result for each.
    """

    def __call__(self, *, sample: "Sample") -> float | Mapping[str, float | str | None]:
        """Return a finite number, or a mapping with the key `reward`; other numbers are recorded.

        The item `answer` is the answer extracted from the response, a text in a form in which equal
        answers are equal, None where there is none. Evaluations vote on it (maj@k).

        `sample`, sent without experts, is the last of a trajectory's samples, and the result is the
        reward of all. The rollout puts needed facts about earlier ones into the last's metadata.
        """


class Generator(Protocol):
    """The engines, from a rollout's side."""

    @property
    def context(self) -> int:
        """Tokens of a prompt and response together: in an engine, and in a trainer's micro-batch.

        A sample with more is a failure of the rollout, as is a call without room for
        `sampling.max_tokens`.
        """

    async def generate(
        self, token_ids: "Ints", *, sampling: "Sampling", num_samples: int = 1, session: str | None = None
    ) -> "tuple[Generation, ...]":
        """Return `num_samples` responses to `token_ids` [P], from one engine.

        Each call is a request, also at the same time as others: it occupies an engine only until the
        answer, goes to another engine on failure, and is aborted when the awaiting task is
        cancelled. Give the requests of one conversation a `session`, a name unique for this prompt:
        they prefer the engine with the computed earlier turns, and their seeds depend on their tokens,
        not on the order of calls.
        """


class Rollout(Protocol):
    """`rollout.function`, an async function: from one prompt to samples.

    `megatron_rl.rollout.groups:single_turn` is one.
    """

    def __call__(
        self,
        *,
        prompt: "Prompt",
        generator: Generator,
        sampling: "Sampling",
        num_samples: int,
        tokenizer: "PreTrainedTokenizerBase",
    ) -> "Awaitable[Sequence[Sample]]":
        """Return samples of `num_samples` trajectories from `prompt`.

        Each has a `group_id`, an `index` (0, 1, ... over all) and response text. Token ids are from
        `generator`, never from text tokenized again. A trajectory is one sample, unless several
        have the same number in `trajectory`; the last by `index` is the end. A turn with another
        history than the tokens before say is a sample with a prompt of its own,
        `dataclasses.replace(prompt, token_ids=.., text=..)`.

        A reward in `Sample.reward` is added to the reward function's. With roles there are
        `num_samples` trajectories for each `Sample.role`, compared with those of the same role.

        A failed call is repeated for each trajectory alone, with `num_samples` 1. A trajectory with
        repeated failures is left out and counted by cause.
        """


class Agent(Protocol):
    """`rollout.agent.function`, an async function: a rollout that knows only an endpoint.

    Runs on an event loop shared with the agents of other trajectories.
    """

    def __call__(self, *, prompt: "Prompt", base_url: str, api_key: str) -> "Awaitable[float | Mapping[str, float] | None]":
        """Play one trajectory: ask the policy at `base_url`, which ends in /v1, with `api_key`.

        Return the reward, as a number or named parts that are summed, or None where reward.function
        gives it. Every answer of the policy belongs to the trajectory, which ends with the call.
        """


class Filter(Protocol):
    """`rollout.filter.function`: selection of the groups for a step, once for each finished group."""

    def __call__(self, *, group: "Group") -> str | None:
        """Return None to keep the group, or a reason for the buffer to note beside the group.

        `group` has a scored sample, and was not left out by objective.zero_variance.
        """


class Advantage(Protocol):
    """`objective.advantage` of kind plug_in: from rewards to advantages."""

    def __call__(self, *, rewards: "Tensor", group_ids: "Tensor", lengths: "Tensor") -> "Tensor":
        """Return one advantage per trajectory, [B] float64, for all its tokens.

        `rewards` [B] float64; `group_ids` [B], equal for trajectories of one prompt, in any order;
        `lengths` [B], trainable tokens. Called for a group alone to find one with all advantages 0.
        """


class PolicyLoss(Protocol):
    """`objective.policy_loss` of kind plug_in: the minimised value per token."""

    def __call__(self, *, objective: "Objective", terms: "PolicyTerms") -> "PolicyLossTerms":
        """Return the losses [T] of the policy term, before any mean, and the events to count."""


class DataSource(Protocol):
    """`data.source`, a class: the endless source of training rows, in the driver alone.

    Rows follow from the seed and the arguments, whatever the number of rows in a request.
    """

    state: Any  # the position, as a value with a form in JSON; set to another process's, a source goes on there

    def __init__(self, *, seed: int) -> None:
        """Start at the first row. `seed` is run.seed."""

    def next_rows(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Return the next `count` rows, each with the fields of a line of data.train.

        Fields are prompt, label, for supervised training response, and others: metadata.
        """


@runtime_checkable
class Curriculum(Protocol):
    """A `DataSource` whose rows also follow from rewards."""

    def see(self, rewards: Mapping[int, float]) -> None:
        """Take the mean rewards of the prompts trained on since the last checkpoint, by number.

        Rows are numbered from 0. Called before each checkpoint; `state` holds what is kept of them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of plug-in: settings for name and own arguments, and the arguments of a call."""

    setting: str
    args_setting: str
    arguments: tuple[str, ...]


AGENT = Kind(setting="rollout.agent.function", args_setting="rollout.args", arguments=("prompt", "base_url", "api_key"))
"""The other signature of a rollout."""
GROUP_REWARD = Kind(setting="reward.function", args_setting="reward.args", arguments=("samples",))
"""The other signature of a reward, for all trajectories of a group together."""
BUILT_IN_REWARDS: Mapping[str, str] = MappingProxyType({
    **{name: f"megatron_rl.rewards.{name}:score" for name in ("math", "code", "reasoning_gym")},
    **{name: f"megatron_rl.rewards.text:{name}" for name in ("exact", "regex", "choice", "tags", "overlong")},
    **{name: f"megatron_rl.rewards.servers:{name}" for name in ("remote", "judge")},
    **{name: f"megatron_rl.rewards.mixture:{name}" for name in ("mixture", "by_row")},
})  # fmt: skip
"""Names of our own rewards, each short for a path."""
KINDS: Mapping[PluginKind, Kind] = MappingProxyType({
    "reward": Kind(setting="reward.function", args_setting="reward.args", arguments=("sample",)),
    "rollout": Kind(
        setting="rollout.function", args_setting="rollout.args",
        arguments=("prompt", "generator", "sampling", "num_samples", "tokenizer"),
    ),
    "environment": Kind(setting="rollout.environment", args_setting="rollout.args", arguments=()),
    "filter": Kind(setting="rollout.filter.function", args_setting="rollout.filter.args", arguments=("group",)),
    "advantage": Kind(
        setting="objective.advantage", args_setting="objective.advantage.args", arguments=("rewards", "group_ids", "lengths"),
    ),
    "policy_loss": Kind(setting="objective.policy_loss", args_setting="objective.policy_loss.args", arguments=("objective", "terms")),
    "data_source": Kind(setting="data.source", args_setting="data.args", arguments=("seed",)),
})  # fmt: skip
