"""Named sets of held-out prompts, and what a set takes from the run where it says nothing."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from megatron_rl.config.section import FilePath, Section

_Settings = TypeVar("_Settings", bound=Section)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class EvalSampling(Section):
    """Sampling in an evaluation, where answers are not trained on; rollout.sampling's where not set."""

    temperature: float | None = Field(None, ge=0, le=100, description="Softmax temperature; 0 takes the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1, description="Draw from the likeliest tokens, which have this probability together.")
    top_k: int | None = Field(None, ge=0, description="Draw from so many likeliest tokens; 0 draws from all.")
    min_p: float | None = Field(None, ge=0, lt=1, description="Draw from tokens with this share of the likeliest's probability.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Lowers a token's logit by this for each time it was generated.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Lowers the logit of every generated token by this, once.")
    repetition_penalty: float | None = Field(None, gt=0, le=2, description="Divides the logit of every earlier token by this.")
    logit_bias: dict[int, float] | None = Field(None, description="Numbers to add to the logits of tokens, by token id in quotes.")
    max_response_tokens: int | None = Field(None, ge=1, description="Token budget of one answer of an engine.")
    stop: tuple[str, ...] | None = Field(None, description="Strings that end a response.")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="Tokens that end a response besides end-of-sequence."
    )

    @field_validator("logit_bias")
    @classmethod
    def _some_bias(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        for token, bias in (value or {}).items():
            if token < 0 or not -100 <= bias <= 100:
                raise ValueError(f"adds {bias} to the logit of token {token}, needs numbers from -100 to 100 for ids >= 0")
        return value

    def over(self, sampling: _Settings) -> _Settings:
        """Return the section rollout.sampling with these values in place of its own, as far as it has them."""
        own = self.model_dump(exclude_none=True)
        return sampling.model_copy(update={name: value for name, value in own.items() if name in type(sampling).model_fields})


class EvalReward(Section):
    """The reward function of one set; the deadline is reward.timeout_s."""

    function: str = Field(description="package.module:function, sync or async.")
    args: dict[str, Any] = Field(default_factory=dict, description="Own arguments of the function, by the names that it gives them.")

    def of(self, reward: _Settings) -> _Settings:
        """Return the section `reward` with this function."""
        return reward.model_copy(update={"function": self.function, "args": self.args})


class EvalSet(Section):
    """One set of held-out prompts; a path alone stands for its `data`."""

    data: FilePath = Field(description="File of held-out rows.")
    samples: int = Field(1, ge=1, le=2**10, description="Answers to each prompt.")
    interval: int | None = Field(None, ge=0, description="Steps between evaluations of this set; eval.interval when not set.")
    reward: EvalReward | None = Field(None, description="Reward function of this set; the run's when not set.")
    sampling: EvalSampling = Field(default_factory=EvalSampling)
    keep_best: str | None = Field(None, description="Keep the checkpoint with the largest of this metric, such as accuracy or pass@4.")
    stop_after: int | None = Field(None, ge=1, description="End the run after so many evaluations without a better keep_best.")

    def reward_of(self, reward: _Settings) -> _Settings:
        """Return the section `reward`, with the function of this set where it has one."""
        return reward if self.reward is None else self.reward.of(reward)

    @model_validator(mode="after")
    def _best(self) -> Self:
        powers = [2**power for power in range(1, self.samples.bit_length())]
        known = ("accuracy", "reward", *(f"{kind}@{k}" for kind in ("pass", "maj") for k in powers), *(f"pass^{k}" for k in powers))
        if self.keep_best is not None and self.keep_best not in known:
            raise ValueError(f"has keep_best {self.keep_best}, needs one of {', '.join(known)}, as samples is {self.samples}")
        if self.stop_after is not None and self.keep_best is None:
            raise ValueError(f"has stop_after {self.stop_after} without keep_best, needs the metric that is to rise; set keep_best")
        return self


class EvalSettings(Section):
    """Evaluation on held-out prompts."""

    interval: int = Field(10, ge=0, description="Steps between evaluations, besides step 0 and the last; 0 evaluates never.")
    sets: dict[str, EvalSet] = Field(
        default_factory=dict,
        description="Sets of held-out rows by name: a file, or a mapping of data, samples, interval, reward and sampling.",
    )

    @field_validator("sets")
    @classmethod
    def _names(cls, value: dict[str, EvalSet]) -> dict[str, EvalSet]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"has the name {name!r}, needs letters, digits, '-' and '_': metrics and files are named after it")
        return value

    def interval_of(self, name: str) -> int:
        """Return the steps between evaluations of a set."""
        own = self.sets[name].interval
        return self.interval if own is None else own

    def due(self, *, steps: int, num_steps: int) -> tuple[str, ...]:
        """Return the sets to evaluate after `steps` of `num_steps` steps: before the first, at intervals, after the last."""
        ends = steps in (0, num_steps)
        return tuple(name for name in self.sets if (every := self.interval_of(name)) and (ends or steps % every == 0))

    def keeps(self, *, steps: int, num_steps: int) -> bool:
        """Return True where a set with `keep_best` is due, which needs a checkpoint of these steps."""
        return any(self.sets[name].keep_best for name in self.due(steps=steps, num_steps=num_steps))

    def longest_sampling(self, sampling: _Settings) -> _Settings:
        """Return the sampling with the largest token budget of an answer: the rollout's `sampling`, or that of a set."""
        every = (sampling, *(each.sampling.over(sampling) for each in self.sets.values()))
        return max(every, key=lambda one: vars(one)["max_response_tokens"])

    def has_stop_strings(self, sampling: Section) -> bool:
        """Return True where engines look for strings in answers, in evaluations or by the rollout's `sampling`."""
        return any(vars(one)["stop"] for one in (sampling, *(each.sampling for each in self.sets.values())))

    def described(self, *, sampling: Section, reward: str | None) -> dict[str, str]:
        """Return a line for each set with all values; those of the run's `sampling` and `reward` are in parentheses."""
        return {name: self._line(name, {**sampling.model_dump(exclude={"entropy"}), "reward": reward}) for name in self.sets}

    def _line(self, name: str, run: Mapping[str, Any]) -> str:
        one = self.sets[name]
        own: dict[str, Any] = {
            **one.sampling.model_dump(exclude_none=True),
            **({} if one.reward is None else {"reward": one.reward.function}),
        }
        parts = [f"{one.data}", f"{one.samples} per prompt"]
        every = self.interval_of(name)
        parts.append(f"every {every} steps" if one.interval is not None else f"(every {every} steps)")
        values = {**run, **own}
        parts += [f"{key} {value}" if key in own else f"({key} {value})" for key, value in values.items() if value not in (None, ())]
        return ", ".join(parts)


def expand_sets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section eval, in plain values, with each path alone as the data of its set."""
    sets = values.get("sets")
    if not isinstance(sets, Mapping):
        return dict(values)
    return {**values, "sets": {name: {"data": one} if isinstance(one, str) else one for name, one in sets.items()}}
