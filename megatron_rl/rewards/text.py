"""Rewards of the text alone: equality, patterns, a chosen letter, tags, length. Quick, and without a model of the task."""

import re

from megatron_rl.types import Sample

_CHOICE = r"(?:\\boxed\s*\{{\s*(?:\\text\s*\{{)?|\banswer\s*(?:is\b\s*:?|:)\s*)[\s*$(\[]*([{letters}])(?![\w'])"


def final_text(sample: Sample) -> str:
    """Return the response, or nothing of one that the token budget cut: what it holds is no final answer."""
    return "" if sample.truncated else sample.response_text


def final_answer(sample: Sample, extract: str | None) -> str:
    """Return the first group of the last match of the pattern `extract`, nothing without one; the response where it is None.

    A point of the pattern matches the end of a line, too.
    """
    text = final_text(sample)
    if extract is None:
        return text
    found = [match.group(1) if match.re.groups else match.group() for match in re.finditer(extract, text, re.DOTALL)]
    return (found[-1] if found else None) or ""


def exact(*, sample: Sample, extract: str | None = None, ignore_case: bool = False) -> dict[str, float | str]:
    """Return reward 1.0 when the answer is the label, apart from spaces at both ends and repeated ones.

    The answer is the response, or the last match of `extract`, such as `<answer>(.*?)</answer>`.
    """
    answer, wanted = (_words(text, ignore_case) for text in (final_answer(sample, extract), _label(sample)))
    return {"reward": float(answer == wanted), "answer": answer}


def regex(*, sample: Sample, pattern: str | None = None) -> float:
    """Return 1.0 when `pattern`, or the label where there is none, matches somewhere in the response, else 0.0."""
    return float(re.search(_label(sample) if pattern is None else pattern, final_text(sample)) is not None)


def choice(*, sample: Sample, letters: str = "ABCDEFGHIJ") -> dict[str, float | str]:
    """Return reward 1.0 when the chosen letter is the label, as `B` or `(B)`.

    The letter is the last one in a box or behind "answer is" or "answer:", or all of the response.
    """
    text, wanted = final_text(sample), _label(sample).strip("() .").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise ValueError(f"the label is {_label(sample)!r:.60}, needs one of the letters {letters}")
    alone = re.fullmatch(rf"[\s*$(\[]*([{letters}])[\s*$)\].:]*", text)
    found = [alone.group(1)] if alone else re.findall(_CHOICE.format(letters=letters), re.sub(r"(?i)answer", "answer", text))
    answer = found[-1] if found else ""
    return {"reward": float(answer == wanted), "answer": answer}


def tags(*, sample: Sample, names: tuple[str, ...] = ("think", "answer")) -> float:
    """Return 1.0 when the response is `<think>..</think><answer>..</answer>` with each tag once, else 0.0; spaces may be around."""
    rest = final_text(sample)
    if any(rest.count(tag) != 1 for name in names for tag in (f"<{name}>", f"</{name}>")):
        return 0.0
    for name in names:
        before, _, rest = rest.partition(f"<{name}>")
        _, end, rest = rest.partition(f"</{name}>")
        if before.strip() or not end:
            return 0.0
    return float(not rest.strip())


def overlong(*, sample: Sample, max_tokens: int, buffer_tokens: int) -> float:
    """Return the penalty of n tokens of the policy, trained or not, from 0.0 at max_tokens - buffer_tokens to -1.0 at max_tokens.

    -(n - (max_tokens - buffer_tokens)) / buffer_tokens between both (DAPO, https://arxiv.org/abs/2503.14476, eq. 13).
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"overlong has buffer_tokens {buffer_tokens} and max_tokens {max_tokens}, needs 1 to max_tokens")
    excess = int((sample.loss_mask | (sample.weight_versions >= 0)).sum()) - (max_tokens - buffer_tokens)
    return 0.0 - min(max(excess / buffer_tokens, 0.0), 1.0)


def _label(sample: Sample) -> str:
    label = sample.prompt.label
    if label is None or not label.strip():
        raise ValueError(f"this prompt has the label {label!r}, needs the right answer; set data.label_key to the field that holds it")
    return label


def _words(text: str, ignore_case: bool) -> str:
    words = " ".join(text.split())
    return words.casefold() if ignore_case else words
