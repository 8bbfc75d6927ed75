"""Texts of models and users, shown as text wherever they go: no character of theirs acts."""

import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping

from megatron_rl.types import Sample

_ACTING = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode's categories: controls, formats as bidirectional ones, halves of pairs, private and no characters, separators."""


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


def sample_lines(title: str, parts: Mapping[str, str], *, width: int = 80, most: int = 4000) -> Iterator[str]:
    """Yield `title` and each named part, indented and within `width` columns; of longer ones than `most` both ends.

    Where the output's encoding is no form of Unicode, all is ASCII.
    """
    only_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
    yield visible(title, only_ascii=only_ascii)
    for name, text in parts.items():
        cut = f"\n({len(text) - most:,} characters left out)\n"
        shown = text if len(text) <= most else text[: most // 2] + cut + text[-(most // 2) :]
        for number, line in enumerate(visible(shown, only_ascii=only_ascii).expandtabs(4).split("\n")):
            pieces = textwrap.wrap(line, width - 12, replace_whitespace=False, drop_whitespace=False) or [""]
            for place, piece in enumerate(pieces):
                yield f"{name if not number + place else '':>10}  {piece}".rstrip()


def lines_of(sample: Sample, *, step: int) -> Iterator[str]:
    """Yield a sample of `step` with prompt, label and reward, for a terminal."""
    reward = sample.reward
    words = "no reward" if reward is None else f"reward {reward.value:.4g}" if reward.value is not None else reward.outcome.value
    title = f"step {step}: {words}, {len(sample.response_ids)} tokens, ended by {sample.stop_reason.value}, group {sample.group_id}"
    yield from sample_lines(title, {"prompt": sample.prompt.text, "label": sample.prompt.label or "", "answer": sample.response_text})
