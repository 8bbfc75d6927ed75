"""Settings of the rows to train on."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.config.section import FilePath, Section


class Pool(Section):
    """Rows by the mean reward of their last answers, which come again in a share of the epochs."""

    min_reward: float | None = Field(None, description="Least mean reward of the pool; any when not set.")
    max_reward: float | None = Field(None, description="Highest mean reward of the pool; any when not set.")
    chance: float = Field(..., ge=0.01, le=1, description="Chance of each of its rows to come in an epoch.")

    @model_validator(mode="after")
    def _some_reward(self) -> "Pool":
        if self.min_reward is not None and self.max_reward is not None and self.min_reward > self.max_reward:
            raise ValueError(f"has min_reward {self.min_reward} and max_reward {self.max_reward}, needs min_reward <= max_reward")
        return self

    def fits(self, reward: float) -> bool:
        """Return True for a mean reward of the pool."""
        return (self.min_reward is None or reward >= self.min_reward) and (self.max_reward is None or reward <= self.max_reward)


class DataFiles(Section):
    """One source of rows."""

    path: FilePath = Field(description="File, pattern such as rows-*.jsonl, or directory that Hugging Face's datasets saved.")
    weight: float = Field(1.0, gt=0, le=1e6, description="Share of training rows from this source, relative to the others'.")
    rows: str = Field(":", pattern=r"^-?\d{0,12}:-?\d{0,12}$", description="FIRST:END of its rows, from 0; negative ones from the end.")
    pools: tuple[Pool, ...] = Field(
        (), description="Pools {min_reward, max_reward, chance} by difficulty; the first that fits a row counts, other rows always come."
    )
    prompt_key: str | None = Field(None, description="data.prompt_key of this source.")
    label_key: str | None = Field(None, description="data.label_key of this source.")

    @property
    def chosen(self) -> slice:
        """The rows as a slice."""
        return slice(*(int(part) if part else None for part in self.rows.split(":")))

    @property
    def keys(self) -> dict[str, str]:
        """The fields of its rows that differ from those of `data`."""
        return self.model_dump(include={"prompt_key", "label_key"}, exclude_none=True)


class DataSettings(Section):
    """Prompts to train on. Rows are JSON lines, a JSON array, parquet, or a saved dataset."""

    train: FilePath | tuple[DataFiles, ...] | None = Field(
        None,
        description="File of training rows, or a list of sources {path, weight, rows, pools, prompt_key, label_key}; not with source.",
    )
    source: str | None = Field(None, description="Your own source of training rows, package.module:Class, in place of data.train.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of your own source, by the names that it gives them.")
    prompt_key: str = Field(
        "prompt", description="Field with the prompt: a string, chat messages for the chat template, or token ids; a path a.b is nested."
    )
    label_key: str | None = Field(
        None,
        description="Field, or path such as reward_model.ground_truth, with the reference answer that reward functions get, or with the "
        "target text of supervised training; label, or response, when not set.",
    )
    prompts_per_step: int = Field(64, ge=1, description="Prompts (groups) in one rollout batch.")
    samples_per_prompt: int = Field(8, ge=1, description="Responses generated for each prompt.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Tokens of a prompt at most.")
    overlong: Literal["error", "drop", "truncate"] = Field(
        "error", description="Longer prompts: an error, left out and counted, or cut to their last tokens; of files, not of data.source."
    )
    system_prompt: str | None = Field(None, description="System message of chat prompts without one of their own.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as enable_thinking; a row's field of this name wins."
    )
    max_bad_rows: int = Field(
        0,
        ge=0,
        description="Unusable rows of data.train to leave out, listed in logs/bad_rows.txt; with 0 the first one is an error.",
    )
    shuffle: bool = Field(True, description="Shuffle data.train in every epoch by the run's seed.")

    @property
    def sources(self) -> tuple[DataFiles, ...]:
        """The sources of data.train; none with data.source."""
        if isinstance(self.train, tuple):
            return self.train
        return () if self.train is None else (DataFiles(path=self.train),)

    @property
    def label_field(self) -> str:
        """Field with the reference answer."""
        return self.label_key or "label"

    @property
    def response_field(self) -> str:
        """Field with the supervised target."""
        return self.label_key or "response"

    @field_validator("train")
    @classmethod
    def _some_source(cls, value: Any) -> Any:
        if value == ():
            raise ValueError("is an empty list, needs at least one source; add {path: FILE}, or leave it out")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(value.keys() & {"messages", "tools", "add_generation_prompt", "tokenize", "conversation"}):
            raise ValueError(f"has {taken[0]}, which the run gives the template itself; remove it")
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> "DataSettings":
        if self.train is None and self.source is None:
            raise ValueError(
                "data.train is missing (file of training rows); set it in the file, or with data.train=VALUE, or name a source of your "
                "own in data.source"
            )
        if self.train is not None and self.source is not None:
            raise ValueError(
                f"data.train is {self.train} and data.source is {self.source}, but rows come from one of them; remove the other, or give "
                "the source its file in data.args"
            )
        if self.args and self.source is None:
            raise ValueError(f"data.args has {', '.join(self.args)}, but data.source is not set; set it, or remove data.args")
        if self.source is not None and self.overlong != "error":
            raise ValueError(f"data.overlong is {self.overlong}, but data.source {self.source} drops or cuts its rows itself; remove it")
        if self.source is not None and not self.shuffle:
            raise ValueError(f"data.shuffle is false, but data.source {self.source} has an order of its own; remove data.shuffle")
        return self
