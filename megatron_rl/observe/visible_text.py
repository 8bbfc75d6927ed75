"""Texts of models and users, shown as text wherever they go: no character of theirs acts."""

import sys
import textwrap
import unicodedata
from collections.abc import Iterator

from rich.cells import chop_cells

from megatron_rl.types import Sample

_ACTING = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode's categories: controls, formats as bidirectional ones, halves of pairs, private and no characters, separators."""

_MOST_LETTERS = 4000  # of a part of a sample in a terminal


def visible(text: str, *, only_ascii: bool = False) -> str:
    r"""Return the text with `\x1b`, `\u202e` and the like for characters that act or cannot be seen.

    Line ends and tabs stay; `only_ascii` writes all others beyond ASCII in this way, too.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if _stays(letter, only_ascii) else escaped(letter) for letter in text)


def escaped(letter: str) -> str:
    r"""Return the escape of one character, such as `\u202e`."""
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _stays(letter: str, only_ascii: bool) -> bool:
    if letter.isascii():
        return letter.isprintable() or letter in "\n\t"
    return not only_ascii and unicodedata.category(letter) not in _ACTING


def sample_lines(**parts: str | None) -> Iterator[str]:
    """Yield the parts of a sample that there are, with their names, within 80 columns; of long ones both ends.

    Where the output's encoding is no form of Unicode, all is ASCII.
    """
    only_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
    for name, text in parts.items():
        if not text and name != "answer":
            continue
        text, half = text or "", _MOST_LETTERS // 2
        if len(text) > _MOST_LETTERS:
            text = f"{text[:half]}\n[... {len(text) - _MOST_LETTERS:,} characters left out ...]\n{text[-half:]}"
        for number, line in enumerate(visible(text, only_ascii=only_ascii).expandtabs(4).split("\n")):
            wrapped = textwrap.wrap(line, 68, replace_whitespace=False, drop_whitespace=False)
            pieces = [piece for each in wrapped for piece in chop_cells(each, 68)] or [""]
            yield from (f"{name if not number + place else '':>10}  {piece}".rstrip() for place, piece in enumerate(pieces))


def lines_of(sample: Sample, *, step: int) -> Iterator[str]:
    """Yield a sample of `step` with prompt, label and reward, for a terminal."""
    reward = sample.reward
    words = "no reward" if reward is None else f"reward {reward.value:.4g}" if reward.value is not None else reward.outcome.value
    ended = f"{len(sample.response_ids)} tokens, ended by {sample.stop_reason.value}"
    yield from textwrap.wrap(f"step {step}: {words}, {ended}, group {sample.group_id!r}", 80)
    yield from sample_lines(prompt=sample.prompt.text, label=sample.prompt.label, answer=sample.response_text)
