"""Groups of samples as packed blocks for the page: texts, turns, and the numbers of each token.

A block is JSON, compressed and in base64, so that no text of a model is ever markup; the page shows
it as text. Legend: R response tokens, K `TOKEN_VALUES`.
"""

import base64
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_rl.data.token_values import TOKEN_VALUES
from megatron_rl.observe.visible_text import visible
from megatron_rl.report.run_samples import StoredGroup, StoredSample

QUANTITIES = {
    "difference": ("engine - trainer", "log-prob of the engine minus that of the trainer, nats", 1e-3),
    "advantage": ("advantage", "what the token is trained towards, or away from", 0.1),
    "ratio": ("ratio", "the policy's probability over that before the batch, as a log; clipped tokens are underlined", 0.01),
    "entropy": ("entropy", "of the policy at this place, nats", 0.1),
    "surprise": ("surprise", "minus the log-prob with which the engine drew the token, nats", 0.5),
    "kl": ("KL", "to the reference at this token (k3), nats", 0.01),
    "age": ("age", "weight versions between the step and the weights that made the token", 1.0),
}
"""What tokens are coloured by: title, meaning, and the least number with full colour. Absent ones were not recorded."""

_SHOWN_TOKENS, _SHOWN_LETTERS = 3000, 12_000
"""Of a longer sample the first two thirds of these, and the last third."""

Spell = Callable[[Sequence[int]], list[str]]
"""From token ids to the text of each."""


def pack(value: Any) -> str:
    """Return a JSON value as a block."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode()


def load_spelling(directories: Sequence[Path]) -> Spell | None:
    """Return the spelling by the tokenizer of the first directory that has one; None without."""
    files = (directory / "tokenizer.json" for directory in directories)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    decode = tokenizers.Tokenizer.from_file(str(file)).decode

    def spell(ids: Sequence[int]) -> list[str]:
        """Give each token the text that it adds; a letter of several tokens comes with the last of them."""
        texts, first, begin = [], 0, 0
        for end in range(1, len(ids) + 1):
            before = decode(ids[first:begin], skip_special_tokens=False)
            added = decode(ids[first:end], skip_special_tokens=False)[len(before) :]
            whole = not added.endswith("\ufffd") or end - begin >= 4
            texts.append(added if whole else "")
            if whole:
                first, begin = begin, end
        return texts

    return spell


def group_block(group: StoredGroup, labels: Sequence[str], spell: Spell | None) -> dict[str, Any]:
    """Return what the page shows of a group."""
    return {
        "id": group.id,
        "step": group.step,
        "labels": list(labels),
        "prompt": _cut(_chat(group.messages) if group.messages else group.prompt),
        "label": _cut(group.label or ""),
        "rejection": group.rejection,
        "failures": [_cut(words) for words in group.failures],
        "metadata": "" if group.metadata == "{}" else _cut(group.metadata),
        "samples": [_sample(sample, group, spell) for sample in group.samples],
    }


def _chat(messages: str) -> str:
    return "\n\n".join(f"{each.get('role')}: {each.get('content') or ''}" for each in json.loads(messages))


def _sample(sample: StoredSample, group: StoredGroup, spell: Spell | None) -> dict[str, Any]:
    parent, shared = _parent(sample, group)
    shown: dict[str, Any] = {
        "index": sample.index,
        "trajectory": sample.trajectory,
        "role": sample.role,
        "parent": parent,
        "shared": shared,
        "reward": sample.reward,
        "outcome": sample.outcome,
        "message": _cut(sample.message),
        "parts": sample.components if sample.components != "{}" else "",
        "stop": sample.stop,
        "length": sample.num_tokens,
        "prompt": None if sample.own_prompt is None else _cut(sample.own_prompt),
        "text": _cut(sample.text),
        "metadata": "" if sample.metadata == "{}" else _cut(sample.metadata),
    }
    if sample.ids is not None and spell is not None and len(sample.ids):
        shown |= _tokens(sample, group, spell)
    return shown


def _parent(sample: StoredSample, group: StoredGroup) -> tuple[int | None, int]:
    """Return the earlier sample of the trajectory with the longest common beginning, and its length in tokens."""

    def whole(one: StoredSample) -> NDArray[np.int32] | None:
        prompt = group.prompt_ids if one.own_prompt_ids is None else one.own_prompt_ids
        return None if one.ids is None else np.concatenate([prompt, one.ids])

    mine, best = whole(sample), (0, -1)
    for other in group.samples:
        theirs = whole(other) if other.index < sample.index and other.trajectory == sample.trajectory is not None else None
        if mine is not None and theirs is not None:
            length = min(len(mine), len(theirs))
            differs = np.flatnonzero(mine[:length] != theirs[:length])
            best = max(best, (int(differs[0]) if len(differs) else length, other.index))
    return (best[1], best[0]) if best[1] >= 0 and best[0] else (None, 0)


def quantities(sample: StoredSample, *, step: int) -> dict[str, NDArray[np.float64]]:
    """Return the recorded of QUANTITIES [R] of a sample with tokens, NaN where a token has none."""
    assert sample.ids is not None and sample.engine is not None and sample.versions is not None, "it has tokens"
    made = sample.versions >= 0
    engine = np.where(made, sample.engine, np.nan).astype(np.float64)
    found = {"surprise": -engine, "age": np.where(made, step - 1.0 - sample.versions, np.nan)}
    if sample.values is not None:
        known = dict(zip(TOKEN_VALUES, sample.values.astype(np.float64), strict=True))
        now, old, reference = known["log_probs"], known["old_log_probs"], known["ref_log_probs"]
        away = np.clip(reference - now, -30.0, 30.0)
        found |= {"difference": engine - old, "ratio": now - old, "kl": np.exp(away) - 1.0 - away}
        found |= {"advantage": known["advantages"], "entropy": known["entropy"]}
    return {name: found[name] for name in QUANTITIES if name in found and np.isfinite(found[name]).any()}


def _tokens(sample: StoredSample, group: StoredGroup, spell: Spell) -> dict[str, Any]:
    """Return the texts and numbers of a sample's tokens, without the middle of a long one, and its turns."""
    assert sample.ids is not None and sample.mask is not None and sample.versions is not None, "asked for before"
    places = np.arange(len(sample.ids))
    head = len(places) if len(places) <= _SHOWN_TOKENS else _SHOWN_TOKENS * 2 // 3
    kept = np.concatenate([places[:head], places[head:][-(_SHOWN_TOKENS - head) :] if head < len(places) else places[:0]])
    texts = [visible(text) for part in (kept[:head], kept[head:]) for text in spell(sample.ids[part].tolist())]
    numbers = {name: _short(values[kept]) for name, values in quantities(sample, step=group.step).items()}
    clipped = None if sample.values is None else sample.values[TOKEN_VALUES.index("clipped")][kept]
    return {
        "tokens": texts,
        "ids": sample.ids[kept].tolist(),
        "gap": [head, len(places) - len(kept)],
        "mask": _short(sample.mask[kept].astype(np.float64)),
        "clipped": _short(np.nan_to_num(clipped)) if clipped is not None else 0,
        "turns": list(_turns(sample.versions[kept] >= 0)),
        "numbers": numbers,
    }


def _turns(made: NDArray[np.bool_]) -> Iterator[tuple[int, bool]]:
    """Yield the first token of each run of tokens of the policy, True, or of environment and template."""
    for begin in np.flatnonzero(np.diff(made, prepend=~made[:1])):
        yield int(begin), bool(made[begin])


def _short(values: NDArray[Any]) -> Any:
    """Return numbers with three digits, null for none, and one number where all are the same."""
    rounded = [float(f"{value:.3g}") if np.isfinite(value) else None for value in values.tolist()]
    whole = [int(value) if value is not None and value == int(value) else value for value in rounded]
    return whole[0] if len(set(whole)) == 1 else whole


def _cut(text: str) -> str:
    """Return a text to show, without the middle of a long one."""
    shown = visible(text)
    if len(shown) <= _SHOWN_LETTERS:
        return shown
    head, tail = _SHOWN_LETTERS * 2 // 3, _SHOWN_LETTERS // 3
    return f"{shown[:head]}\n[... {len(shown) - _SHOWN_LETTERS:,} characters left out ...]\n{shown[-tail:]}"
