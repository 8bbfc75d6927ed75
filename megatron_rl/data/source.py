"""From rows, of a file or of a data source of your own, to prompts and supervised groups.

R response tokens.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from megatron_rl.config.settings import DataSettings
from megatron_rl.data.row_files import Row
from megatron_rl.data.row_source import FileRows, NamedRow, OwnRows, RowSource
from megatron_rl.data.tokenizer import unknown_id
from megatron_rl.errors import UserError, counted
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Below this number every prompt is tokenized at the start, so that too long prompts are found
# before any launch.
_CHECKED_ROWS = 100_000
_ENCODED_AT_ONCE = 1024


class PromptSource:
    """The prompts of a data file, or with `path` None of `data.source`, in an order fixed by the
    seed.

    A string prompt is tokenized unchanged. Chat messages are rendered by the tokenizer's chat
    template, up to the start of the assistant's answer. The tokenizer adds no special tokens to
    either: the model sees exactly the row and the template.

    `need_response` requires in each row the target of supervised training. Token ids are below
    `vocab_size`. Raises UserError, with file and line, for any unusable row. In files above 100,000
    rows a prompt's tokens are checked when the prompt is taken; all of a row of `data.source`
    likewise.
    """

    def __init__(
        self,
        path: Path | None,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        settings: DataSettings,
        seed: int,
        need_response: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._unknown = unknown_id(tokenizer)
        self._settings = settings
        # The rows of a file; an endless custom source allows no check in advance.
        self._known: Sequence[Row] = ()
        self._source: RowSource
        if path is None:
            self._source = OwnRows(settings=settings, seed=seed, need_response=need_response)
        else:
            self._source = file = FileRows(path, settings=settings, seed=seed, need_response=need_response)
            self._known = file.rows
        if len(self._known) <= _CHECKED_ROWS:
            for first in range(0, len(self._known), _ENCODED_AT_ONCE):
                self._encode(self._known[first : first + _ENCODED_AT_ONCE])

    def label_note(self) -> str | None:
        """Return the number of rows without a label and the first such row; None when every row has
        one.
        """
        origins = [row.origin for row in self._known if row.label is None]
        if not origins:
            return None
        which = f"no row of {self._path} has" if len(origins) == len(self._known) else f"{len(origins)} of {len(self._known)} rows lack"
        first = "" if len(origins) == len(self._known) else f", the first is {origins[0]}"
        return f"{which} the field {self._settings.label_field!r}{first}: the reward function gets label None for them"

    def repeat_note(self) -> str | None:
        """Return a note when a step takes more rows than the file has; None otherwise or for
        endless sources.
        """
        rows, taken = len(self._known), self._settings.prompts_per_step
        if self._path is None or rows >= taken:
            return None
        return (
            f"{self._path} has {counted(rows, 'row')}, and a step takes data.prompts_per_step {taken}: every step has some of them more "
            "than once; give more rows, or lower data.prompts_per_step"
        )

    def probes(self) -> list[Prompt]:
        """The first prompt with a label and the first without one, for trying a reward function. Does not move the source."""
        rows = self._known or self._source.first(1)
        unlabelled = [row.label is None for row in rows]
        firsts = sorted(unlabelled.index(kind) for kind in (False, True) if kind in unlabelled)
        return [self._prompts([rows[index]], first=index)[0] for index in firsts]

    @property
    def num_taken(self) -> int:
        """Prompts taken so far, over all epochs."""
        return self._source.num_taken

    def next_prompts(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts; no other prompt of the run has the id of one."""
        return [prompt for prompt, _ in self._next(count)]

    def again(self, names: Sequence[str]) -> list[Prompt]:
        """Return the prompts of these ids as the present settings read them, if different; move
        nothing.
        """
        return [prompt for prompt, _ in self._made_from(self._source.again(names))]

    def next_supervised(self, count: int) -> list[Group]:
        """The next `count` rows as groups of one sample: the target and the end-of-sequence token, every token trained on.

        Raises UserError for a row without a target and for a tokenizer without an end-of-sequence token.
        """
        return [_supervised_group(prompt, self._target_ids(row), text=row.response or "") for prompt, row in self._next(count)]

    def all(self) -> list[Prompt]:
        """Every prompt once in the order of the file, for evaluation. Ids are eval-ROW. Does not move the source."""
        return self.first(len(self._known))

    def first(self, count: int) -> list[Prompt]:
        """Return at most `count` first prompts, as `all`, for probes. Does not move the source."""
        return self._prompts(self._source.first(count))

    def state(self) -> dict[str, Any]:
        """Return the cursor of the source, as JSON values."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises UserError when the data, the seed or data.shuffle are other ones than then."""
        self._source.restore(state)

    def _prompts(self, rows: Sequence[Row], *, first: int = 0) -> list[Prompt]:
        """Prompts of rows from number `first` on, outside of training."""
        encoded = self._encode(rows)
        return [
            _prompt(f"eval-{number}", row, text=text, token_ids=ids)
            for number, (row, (text, ids)) in enumerate(zip(rows, encoded, strict=True), start=first)
        ]

    def _next(self, count: int) -> list[tuple[Prompt, Row]]:
        return self._made_from(self._source.take(count))

    def _made_from(self, named: Sequence[NamedRow]) -> list[tuple[Prompt, Row]]:
        encoded = self._encode([row for _, row in named])
        return [(_prompt(name, row, text=text, token_ids=ids), row) for (name, row), (text, ids) in zip(named, encoded, strict=True)]

    def _encode(self, rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
        """Return text and token ids of each row's prompt. The tokenizer adds no special tokens.

        A chat template brings special tokens of its own.
        """
        texts = [self._text(row) for row in rows]
        # The tokenizer does not take an empty list.
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        limit = self._settings.max_prompt_tokens
        for row, ids in zip(rows, encoded, strict=True):
            if not ids:
                raise UserError(f"{row.origin}: the prompt has no tokens, needs at least one")
            if set(ids) == {self._unknown}:
                raise UserError(
                    f"{row.origin}: all tokens of the prompt are {self._unknown}, which stands for unknown text, needs one that the "
                    "tokenizer knows; use the model's own tokenizer, or leave the row out"
                )
            if self._vocab_size is not None and max(ids) >= self._vocab_size:
                raise UserError(
                    f"{row.origin}: the prompt has the token {max(ids)}, needs one below vocab_size {self._vocab_size} of the model's "
                    "config.json; use the tokenizer of this model"
                )
            if len(ids) > limit:
                raise UserError(
                    f"{row.origin}: the prompt has {len(ids)} tokens, the limit is {limit}; shorten it or raise data.max_prompt_tokens"
                )
        return list(zip(texts, encoded, strict=True))

    def _text(self, row: Row) -> str:
        if isinstance(row.prompt, str):
            return row.prompt
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"{row.origin}: the prompt is a chat but the tokenizer has no chat template; use a string prompt or add a template"
            )
        if row.prompt[-1]["role"] == "assistant":
            raise UserError(
                f"{row.origin}: the last message is the assistant's, needs one that the policy answers; remove it, or move it to the field "
                f"{self._settings.response_field!r}"
            )
        tools = row.metadata.get("tools")
        render = partial(self._tokenizer.apply_chat_template, list(row.prompt), add_generation_prompt=True, tokenize=False)
        try:
            text: str = render(tools=tools)
            unread = bool(tools) and text == render()
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{row.origin}: the chat template refuses this prompt ({error}); correct its roles and their order, or its tools"
            ) from error
        if unread:
            raise UserError(
                f"{row.origin}: has 'tools', of which the tokenizer's chat template shows the model nothing, needs a template that does; "
                "give the tokenizer one, or rename the field"
            )
        return text

    def _target_ids(self, row: Row) -> list[int]:
        """Token ids [R] of the row's response, closed by the end-of-sequence token."""
        if row.response is None:
            raise UserError(
                f"{row.origin}: no field {self._settings.response_field!r}, which supervised training needs; see data.label_key"
            )
        end = self._tokenizer.eos_token_id
        if end is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, which supervised training needs; set eos_token in its configuration"
            )
        ids = list(self._tokenizer(row.response, add_special_tokens=False)["input_ids"])
        return ids if ids and ids[-1] == end else [*ids, end]


def _prompt(name: str, row: Row, *, text: str, token_ids: list[int]) -> Prompt:
    return Prompt(id=name, token_ids=np.array(token_ids), text=text, label=row.label, metadata=row.metadata)


def _supervised_group(prompt: Prompt, response_ids: list[int], *, text: str) -> Group:
    """Return a group of one sample whose R tokens no engine made; all are trained on."""
    length = len(response_ids)
    sample = Sample(
        group_id=prompt.id,
        index=0,
        prompt=prompt,
        response_ids=np.array(response_ids),
        loss_mask=np.ones(length, np.bool_),
        rollout_log_probs=np.zeros(length, np.float32),
        weight_versions=np.full(length, -1),
        stop_reason=StopReason.STOP,
        response_text=text,
        reward=Reward(RewardOutcome.SCORED, 0.0),
    )
    return Group(id=prompt.id, prompt=prompt, samples=(sample,))
