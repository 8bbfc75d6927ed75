"""Prompts and supervised groups from rows, of a file or of a data source. R response tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.config.settings import DataSettings
from megatron_rl.data.row_files import Row
from megatron_rl.data.row_source import FileRows, NamedRow, OwnRows
from megatron_rl.data.tokenizer import load_tokenizer, unknown_id, vocabulary_size
from megatron_rl.errors import UserError, counted
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Below this number every prompt is tokenized at the start, so that too long prompts are found
# before any launch.
_CHECKED_ROWS = 100_000
_ENCODED_AT_ONCE = 1024


class PromptSource:
    """The prompts of a data file, or with `path` None of `data.source`.

    A string prompt is tokenized unchanged. Chat messages are rendered by the tokenizer's chat
    template, up to the start of the assistant's answer. The tokenizer adds no special tokens to
    either. `need_response` requires the target of supervised training, and `vocab_size` lower ids.

    Raises UserError, with file and line, for any unusable row. The prompts of files above 100,000
    rows, and whole rows of `data.source`, are checked when taken.
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
        self._path, self._settings = path, settings
        self._tokenizer, self._vocab_size, self._unknown = tokenizer, vocab_size, unknown_id(tokenizer)
        self.rows: FileRows | OwnRows  # the rows in order, with the cursor that a checkpoint keeps
        # The rows of a file; an endless custom source allows no check in advance.
        self._known: Sequence[Row] = ()
        if path is None:
            self.rows = OwnRows(settings=settings, seed=seed, need_response=need_response)
        else:
            self.rows = file = FileRows(path, settings=settings, seed=seed, need_response=need_response)
            self._known = file.rows
        if len(self._known) <= _CHECKED_ROWS:
            for first in range(0, len(self._known), _ENCODED_AT_ONCE):
                self._encode(self._known[first : first + _ENCODED_AT_ONCE])

    def label_note(self) -> str | None:
        """Return a note about rows without a label; None when every row has one."""
        origins = [row.origin for row in self._known if row.label is None]
        if not origins:
            return None
        which, first = f"no row of {self._path} has", ""
        if len(origins) < len(self._known):
            which, first = f"{len(origins)} of {len(self._known)} rows lack", f", the first is {origins[0]}"
        return f"{which} the field {self._settings.label_field!r}{first}: the reward function gets label None for them"

    def repeat_note(self) -> str | None:
        """Return a note when a step takes more rows than the file has."""
        rows, taken = len(self._known), self._settings.prompts_per_step
        if self._path is None or rows >= taken:
            return None
        return (
            f"{self._path} has {counted(rows, 'row')}, and a step takes data.prompts_per_step {taken}: every step has some of them more "
            "than once; give more rows, or lower data.prompts_per_step"
        )

    def probes(self) -> list[Prompt]:
        """Return the first prompt with a label and the first without one. Moves nothing."""
        rows = self._known or self.rows.first(1)
        unlabelled = [row.label is None for row in rows]
        firsts = sorted(unlabelled.index(kind) for kind in (False, True) if kind in unlabelled)
        return self._prompts([(f"eval-{index}", rows[index]) for index in firsts])

    def next_prompts(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts; no other prompt of the run has the id of one."""
        return self._prompts(self.rows.take(count))

    def again(self, names: Sequence[str]) -> list[Prompt]:
        """Return the prompts of these ids as the present settings read them, if different."""
        return self._prompts(self.rows.again(names))

    def next_supervised(self, count: int) -> list[Group]:
        """Return the next `count` rows as groups of one sample, every token trained on.

        A sample is the target and the end-of-sequence token. Raises UserError for a row without a
        target and for a tokenizer without an end-of-sequence token.
        """
        named, reward = self.rows.take(count), Reward(RewardOutcome.SCORED, 0.0)
        groups = []
        for prompt, (_, row) in zip(self._prompts(named), named, strict=True):
            sample = Sample.written(prompt, self._target_ids(row), text=row.response or "", reward=reward)
            groups.append(Group(id=prompt.id, prompt=prompt, samples=(sample,)))
        return groups

    def all(self, name: str = "eval") -> list[Prompt]:
        """Return every prompt in the order of the file, with ids NAME-ROW. Moves nothing."""
        return self.first(len(self._known), name)

    def first(self, count: int, name: str = "eval") -> list[Prompt]:
        """Return at most `count` first prompts, as `all`. Moves nothing."""
        return self._prompts([(f"{name}-{number}", row) for number, row in enumerate(self.rows.first(count))])

    def _prompts(self, named: Sequence[NamedRow]) -> list[Prompt]:
        return [
            Prompt(
                id=name,
                token_ids=np.array(ids),
                text=text,
                label=row.label,
                metadata=row.metadata,
                messages=() if isinstance(row.prompt, str) else row.prompt,
            )
            for (name, row), (text, ids) in zip(named, self._encode([row for _, row in named]), strict=True)
        ]

    def _encode(self, rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
        """Return text and token ids of each row's prompt."""
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
                got = f"{row.origin}: the prompt has {len(ids)} tokens"
                raise UserError(f"{got}, the limit is {limit}; shorten it or raise data.max_prompt_tokens")
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
        except (TemplateError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RecursionError) as error:
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
        """Return token ids [R] of the row's response, closed by the end-of-sequence token."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrompts:
    """The prompts of a run: the `source` of data.train, and those of eval.sets `held_out`, by set.

    `probes` are prompts of all files for the trial of the run's reward function, with and without a
    label. `notes` are about the rows of all files.
    """

    tokenizer: "PreTrainedTokenizerBase"
    source: PromptSource
    held_out: Mapping[str, tuple[Prompt, ...]]
    probes: tuple[Prompt, ...]
    notes: tuple[str, ...]

    @classmethod
    def read(
        cls,
        model: Path,
        data: DataSettings,
        *,
        sets: Mapping[str, EvalSet] = MappingProxyType({}),
        seed: int,
        trains: bool = True,
        supervised: bool = False,
    ) -> "RunPrompts":
        """Read the tokenizer in `model` and all files; without `trains` those of `sets` alone."""
        tokenizer = load_tokenizer(model)
        open_source = partial(PromptSource, tokenizer=tokenizer, settings=data, seed=seed, vocab_size=vocabulary_size(model))
        files = {path: open_source(path) for path in dict.fromkeys(each.data for each in sets.values())}
        held_out, tried = list(files.values()), {each.data for each in sets.values() if each.reward is None}
        train = [open_source(data.train, need_response=supervised)] if trains else []
        notes = [file.repeat_note() for file in train] + [file.label_note() for file in train + held_out if not supervised]
        of_run_reward = [file for path, file in files.items() if path in tried]
        return cls(
            tokenizer=tokenizer,
            source=(train + held_out)[0],
            held_out={name: tuple(files[each.data].all(name)) for name, each in sets.items()},
            probes=tuple(prompt for file in of_run_reward + train for prompt in file.probes()),
            notes=tuple(note for note in notes if note is not None),
        )

    def for_parity(self, count: int) -> list[Prompt]:
        """Return 1 to `count` prompts: held-out ones, or without eval.sets those to train on."""
        return [prompt for prompts in self.held_out.values() for prompt in prompts][:count] or self.source.first(count)
