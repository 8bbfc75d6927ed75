"""The prompts of a run: those to train on, in order, and those held out for evaluation."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_rl.config.settings import Settings
from megatron_rl.data.source import PromptSource
from megatron_rl.data.tokenizer import load_tokenizer, vocabulary_size
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrompts:
    """The `source` of data.train, the prompts `held_out` in data.eval, and `notes` about the rows of both."""

    tokenizer: "PreTrainedTokenizerBase"
    source: PromptSource
    held_out: tuple[Prompt, ...]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, settings: Settings, *, trains: bool = True) -> "RunPrompts":
        """Read the tokenizer and both files, of which the training file is as good as any to a run that `trains` nothing.

        Raises UserError, with file and line, for what cannot be used.
        """
        data, seed = settings.data, settings.run.seed
        tokenizer = load_tokenizer(settings.model.path)
        open_source = partial(PromptSource, tokenizer=tokenizer, settings=data, seed=seed, vocab_size=vocabulary_size(settings.model.path))
        source = open_source(data.train if trains else data.eval)
        held_out = [] if data.eval is None else [open_source(data.eval)]
        labels = [file.label_note() for file in (source, *held_out)]
        notes = [source.repeat_note(), *labels] if trains else labels[1:]
        return cls(
            tokenizer=tokenizer,
            source=source,
            held_out=tuple(prompt for file in held_out for prompt in file.all()),
            notes=tuple(note for note in notes if note is not None),
        )

    def for_reward(self) -> list[Prompt]:
        """The prompts on which a reward function is tried: the first held-out one, and of data.train one with and one without a label."""
        return [*self.held_out[:1], *self.source.probes()]

    def for_parity(self, count: int) -> list[Prompt]:
        """At most `count` prompts, at least one: held-out ones, or without data.eval those of the training file."""
        return list(self.held_out[:count]) or self.source.first(count)
