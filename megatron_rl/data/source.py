"""Prompts and supervised groups from rows, of files or of a data source. R response tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.data.row_files import Row
from megatron_rl.data.row_source import FileRows, MeanReward, NamedRow, OwnRows
from megatron_rl.data.row_table import BadRows, Rows
from megatron_rl.data.tokenizer import load_tokenizer, unknown_id, vocabulary_size
from megatron_rl.errors import UserError, counted
from megatron_rl.system.files import disk_errors, write_atomic
from megatron_rl.types import Bools, Group, Ints, Message, Prompt, Reward, RewardOutcome, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Below this number every prompt is tokenized at the start, so that too long prompts are found
# before any launch.
_CHECKED_ROWS = 100_000
_ENCODED_AT_ONCE = 1024


class PromptSource:
    """The prompts of data files, or without `sources` of `data.source`.

    A string prompt is tokenized unchanged. Chat messages are rendered by the tokenizer's chat
    template, up to the start of the assistant's answer. The tokenizer adds no special tokens to
    either. `need_response` requires the target of supervised training, and `vocab_size` lower ids.

    Raises UserError, with file and line, for any unusable row. The prompts of more than 100,000
    rows, unless long ones are dropped, and whole rows of `data.source` are checked when taken.
    """

    def __init__(
        self,
        sources: Sequence[DataFiles],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        settings: DataSettings,
        seed: int,
        need_response: bool = False,
        vocab_size: int | None = None,
        max_bad_rows: int = 0,
    ) -> None:
        if need_response and any(files.pools for files in sources):
            raise UserError("data.train has pools, which choose rows by rewards, but supervised training has none; remove the pools")
        self.name = ", ".join(str(files.path) for files in sources)
        self.max_prompt_tokens = settings.max_prompt_tokens
        self._settings = settings
        self._tokenizer, self._vocab_size, self._unknown = tokenizer, vocab_size, unknown_id(tokenizer)
        self._variables = template_variables(tokenizer)
        self.rows: FileRows | OwnRows  # the rows in order, with the cursor that a checkpoint keeps
        # The rows of files; an endless custom source allows no check in advance.
        self.known = Rows()
        self.lengths: Ints = np.empty(0, np.int64)
        self.num_overlong = 0
        self.bad = BadRows(max_bad_rows)
        if not sources:
            self.rows = OwnRows(settings=settings, seed=seed, need_response=need_response)
            return
        self.rows = file = FileRows(sources, settings=settings, seed=seed, need_response=need_response, bad=self.bad)
        if len(file.rows) <= _CHECKED_ROWS or settings.overlong == "drop" or self.bad.limit:
            firsts = range(0, len(file.rows), _ENCODED_AT_ONCE)
            self.lengths = np.concatenate([self._lengths(file.rows[first : first + _ENCODED_AT_ONCE]) for first in firsts])
            overlong = self.lengths > settings.max_prompt_tokens
            self.num_overlong = int(overlong.sum())
            self.drop(self.lengths < 0 if settings.overlong != "drop" else overlong | (self.lengths < 0))
        self.known = file.rows

    def _lengths(self, rows: Sequence[Row]) -> Ints:
        """Return the numbers of tokens [rows] of the prompts, -1 for those that cannot be used."""
        try:
            return np.array([len(ids) for _, ids in self._encode(rows)])
        except UserError as error:
            if len(rows) == 1:
                self.bad.add(error)
                return np.array([-1])
            if not self.bad.limit:
                raise
            return np.concatenate([self._lengths([row]) for row in rows])

    @property
    def _tried(self) -> Ints:
        """The places of rows with a label, where rows are checked at the start."""
        return np.flatnonzero(self.known.is_labelled) if len(self.known) <= _CHECKED_ROWS else np.empty(0, np.int64)

    def labelled(self) -> Iterator[Prompt]:
        """Yield the prompts of rows with a label, named by their origin and without their tokens."""
        for row in map(self.known.__getitem__, self._tried):
            yield Prompt(row.origin, np.zeros(1, np.int64), "", label=row.label, metadata=row.metadata)

    def leave_out(self, reasons: Sequence[str | None]) -> None:
        """Leave out those of the `labelled` that have a reason. Raises UserError beyond data.max_bad_rows."""
        dropped = np.zeros(len(self.known), np.bool_)
        for place, reason in zip(self._tried, reasons, strict=True):
            if reason is not None:
                self.bad.add(UserError(reason))
                dropped[place] = True
        self.drop(dropped)

    def drop(self, dropped: Bools) -> None:
        """Leave out the rows of files in a mask [rows], before any row is taken."""
        if dropped.any():
            assert isinstance(self.rows, FileRows), "rows of files"
            self.rows.drop(dropped)
            self.known, self.lengths = self.rows.rows, self.lengths[~dropped] if self.lengths.size else self.lengths

    def notes(self, *, labelled: bool = True) -> list[str]:
        """Return notes about long prompts, repeated prompts and, where they should be `labelled`, rows without a label."""
        verb = {"error": "refused", "drop": "left out", "truncate": "cut to their last tokens"}[self._settings.overlong]
        long = f"{counted(self.num_overlong, 'prompt')} of {self.name} of more than {self.max_prompt_tokens} tokens: {verb}"
        bad = f"{counted(len(self.bad.reasons), 'row')} of {self.name} left out, the first: {''.join(self.bad.reasons[:1])}"
        found = [long] * bool(self.num_overlong) + [bad] * bool(self.bad.reasons)
        return [*found, *self._repetition_note(), *(self._label_note() if labelled else [])]

    def _repetition_note(self) -> list[str]:
        """Return a note about rows that repeat the text of a prompt, where there are some."""
        _, firsts, inverse = np.unique(self.known.keys, return_index=True, return_inverse=True)
        again = np.flatnonzero(firsts[inverse] != np.arange(len(inverse)))
        if not again.size:
            return []
        where = f"{self.known[again[0]].origin} is that of {self.known[firsts[inverse[again[0]]]].origin}"
        return [f"{len(again)} of {counted(len(self.known), 'row')} of {self.name} repeat the text of a prompt: {where}"]

    def _label_note(self) -> list[str]:
        """Return a note about rows without a label, where there are some."""
        lacking = np.flatnonzero(~self.known.is_labelled)
        if not lacking.size:
            return []
        which, first = f"no row of {self.name} has", ""
        if len(lacking) < len(self.known):
            which, first = f"{len(lacking)} of {len(self.known)} rows lack", f", the first is {self.known[lacking[0]].origin}"
        return [f"{which} the field {self._settings.label_field!r}{first}: what scores them gets label None"]

    def repeat_note(self) -> str | None:
        """Return a note when a step takes more rows than there are."""
        rows, taken = len(self.known), self._settings.prompts_per_step
        if not self.name or rows >= taken:
            return None
        return (
            f"{self.name} has {counted(rows, 'row')}, and a step takes data.prompts_per_step {taken}: every step has some of them more "
            "than once; give more rows, or lower data.prompts_per_step"
        )

    def probes(self) -> list[Prompt]:
        """Return the first prompt with a label and the first without one. Moves nothing."""
        rows = self.known or self.rows.first(1)
        labelled = self.known.is_labelled if self.known else np.array([rows[0].label is not None])
        firsts = sorted(int(np.argmax(labelled == kind)) for kind in (False, True) if (labelled == kind).any())
        return self._prompts([(f"eval-{index}", rows[index]) for index in firsts])

    def next_prompts(self, count: int, *, mean_reward: MeanReward = lambda name: None) -> list[Prompt]:
        """Return the next `count` prompts, for `mean_reward` so far; no other prompt of the run has the id of one."""
        return self._prompts(self.rows.take(count, mean_reward))

    def follow(self, names: Sequence[str]) -> list[Prompt]:
        """Return the next prompts, which an earlier process took under these ids."""
        return self._prompts(self.rows.follow(names))

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
        return self.first(len(self.known), name)

    def first(self, count: int, name: str = "eval") -> list[Prompt]:
        """Return at most `count` first prompts, as `all`. Moves nothing."""
        return self._prompts([(f"{name}-{number}", row) for number, row in enumerate(self.rows.first(count))])

    def _prompts(self, named: Sequence[NamedRow]) -> list[Prompt]:
        prompts = []
        for (name, row), (text, ids) in zip(named, self._encode([row for _, row in named]), strict=True):
            kept = ids[-self.max_prompt_tokens :]
            prompts.append(
                Prompt(
                    id=name,
                    token_ids=np.array(kept),
                    text=text if len(kept) == len(ids) else self._tokenizer.decode(kept),
                    label=row.label,
                    metadata=row.metadata,
                    messages=messages_of(row, system_prompt=self._settings.system_prompt),
                )
            )
        return prompts

    def _encode(self, rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
        """Return text and token ids of each row's prompt, as long as they are where data.overlong allows."""
        texts = [self._text(row) for row in rows]
        # The tokenizer does not take an empty list.
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        taken = [(text, list(row.token_ids) or ids) for row, text, ids in zip(rows, texts, encoded, strict=True)]
        limit, overlong = self.max_prompt_tokens, self._settings.overlong
        for row, (_, ids) in zip(rows, taken, strict=True):
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
            if len(ids) > limit and overlong == "error":
                got = f"{row.origin}: the prompt has {len(ids)} tokens"
                raise UserError(f"{got}, the limit is {limit}; shorten it, raise data.max_prompt_tokens, or set data.overlong")
        return taken

    def _text(self, row: Row) -> str:
        messages = messages_of(row, system_prompt=self._settings.system_prompt)
        if not messages:
            if self._settings.system_prompt is not None:
                raise UserError(
                    f"{row.origin}: the prompt is no chat, which data.system_prompt needs; write messages, or remove the setting"
                )
            return self._tokenizer.decode(row.token_ids) if row.token_ids else str(row.prompt)
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"{row.origin}: the prompt is a chat but the tokenizer has no chat template; use a string prompt or add a template"
            )
        if messages[-1]["role"] == "assistant":
            raise UserError(
                f"{row.origin}: the last message is the assistant's, needs one that the policy answers; remove it, or move it to the field "
                f"{self._settings.response_field!r}"
            )
        tools = row.metadata.get("tools")
        options = {"add_generation_prompt": True, "tokenize": False, **self._template_kwargs(row)}
        render = partial(self._tokenizer.apply_chat_template, list(messages), **options)
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

    def _template_kwargs(self, row: Row) -> dict[str, Any]:
        """Return the arguments of the chat template. Raises UserError for one that the template does not read."""
        own = row.metadata.get("chat_template_kwargs") or {}
        if not isinstance(own, Mapping):
            raise UserError(f"{row.origin}: chat_template_kwargs is {own!r:.60}, needs an object")
        kwargs = {**self._settings.chat_template_kwargs, **own}
        unread = [name for name in kwargs if name not in self._variables]
        if unread:
            raise UserError(
                f"{row.origin}: the chat template does not read {unread[0]!r} of chat_template_kwargs, needs one of "
                f"{', '.join(sorted(self._variables)) or 'none'}; remove or rename it"
            )
        return kwargs

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


def messages_of(row: Row, *, system_prompt: str | None) -> tuple[Message, ...]:
    """Return the row's chat messages, with `system_prompt` before those without a system message; none for text and tokens."""
    if isinstance(row.prompt, str):
        return ()
    has_own = system_prompt is None or row.prompt[0]["role"] == "system"
    return row.prompt if has_own else ({"role": "system", "content": system_prompt}, *row.prompt)


def template_variables(tokenizer: "PreTrainedTokenizerBase") -> frozenset[str]:
    """Return the names that the tokenizer's chat template reads and the caller may give."""
    templates: Any = tokenizer.chat_template or ""
    text = "".join(templates.values()) if isinstance(templates, dict) else templates
    try:
        # Marks of transformers around the assistant's answers.
        text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
        names = find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text))
    except TemplateError:  # reported by the first prompt that is rendered
        return frozenset()
    return (
        frozenset(names)
        - {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
        - set(tokenizer.special_tokens_map)
    )


def overlap_note(train: PromptSource, held_out: PromptSource) -> str | None:
    """Return a note about texts of held-out prompts among those to train on; None without any."""
    both = np.flatnonzero(np.isin(held_out.known.keys, train.known.keys))
    if not both.size:
        return None
    which = f"{len(both)} of {counted(len(held_out.known), 'prompt')} of {held_out.name} have a text that is also trained on"
    first = int(np.argmax(train.known.keys == held_out.known.keys[both[0]]))
    return f"{which}, the first is {held_out.known[both[0]].origin}, in {train.known[first].origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrompts:
    """The prompts of a run: the `source` of data.train where it `trains`, and those of eval.sets `held_out`, by set.

    `files` are those of the held-out prompts, by set. `tried` have the prompts that the run's reward
    function scores. `notes` are about the rows of all files.
    """

    tokenizer: "PreTrainedTokenizerBase"
    source: PromptSource
    trains: bool
    held_out: Mapping[str, tuple[Prompt, ...]]
    files: Mapping[str, PromptSource]
    tried: tuple[PromptSource, ...]
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
        files = {path: open_source([DataFiles(path=path)]) for path in dict.fromkeys(each.data for each in sets.values())}
        held_out, tried = list(files.values()), {each.data for each in sets.values() if each.reward is None}
        train = [open_source(data.sources, need_response=supervised, max_bad_rows=data.max_bad_rows)] if trains else []
        notes = [file.repeat_note() for file in train] + [overlap_note(file, other) for file in train for other in held_out]
        of_run_reward = [file for path, file in files.items() if path in tried]
        return cls(
            tokenizer=tokenizer,
            source=(train + held_out)[0],
            trains=trains,
            held_out={name: tuple(files[each.data].all(name)) for name, each in sets.items()},
            files={name: files[each.data] for name, each in sets.items()},
            tried=(*of_run_reward, *train),
            notes=(
                *(note for note in notes if note is not None),
                *(note for file in train + held_out for note in file.notes(labelled=not supervised)),
            ),
        )

    @property
    def probes(self) -> tuple[Prompt, ...]:
        """Return prompts of all files for a trial of the run's reward function, with and without a label."""
        return tuple(prompt for file in self.tried for prompt in file.probes())

    def list_bad_rows(self, path: Path) -> None:
        """Write the rows of data.train that are left out with their reasons to `path`, where there are some."""
        if reasons := self.source.bad.reasons:
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, "\n".join([*reasons, ""]))

    def for_parity(self, count: int) -> list[Prompt]:
        """Return 1 to `count` prompts: held-out ones, or without eval.sets those to train on."""
        return [prompt for prompts in self.held_out.values() for prompt in prompts][:count] or self.source.first(count)
