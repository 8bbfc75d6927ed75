"""Groups of samples as packed blocks for the page: texts, turns, and the numbers of each token.

A block is JSON, compressed and in base64, so that no text of a model is ever markup; the page shows
it as text. Legend: R response tokens.
"""

import base64
import gzip
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.data.token_values import TOKEN_VALUES
from megatron_rl.observe.visible_text import visible
from megatron_rl.report.run_samples import StoredGroup, array, load_decoder

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
    decode = load_decoder(directories)
    if decode is None:
        return None

    def spell(ids: Sequence[int]) -> list[str]:
        """Give each token the text that it adds; a letter of several tokens comes with the last of them."""
        texts, first, begin = [], 0, 0
        for end in range(1, len(ids) + 1):
            before = decode(ids[first:begin])
            added = decode(ids[first:end])[len(before) :]
            whole = not added.endswith("\ufffd") or end - begin >= 4
            texts.append(added if whole else "")
            if whole:
                first, begin = begin, end
        return texts

    return spell


def group_block(group: StoredGroup, labels: Sequence[str], spell: Spell | None) -> dict[str, Any]:
    """Return what the page shows of a group."""
    row = group.row
    chat = json.loads(row["messages"]) if row["messages"] else None
    prompt = row["prompt_text"] if chat is None else "\n\n".join(f"{each.get('role')}: {each.get('content') or ''}" for each in chat)
    return {
        "id": visible(row["id"]),
        "step": row["consumed_step"],
        "labels": list(labels),
        "prompt": _cut(prompt),
        "label": _cut(row["label"]),
        "rejection": _cut(row["rejection"]),
        "failures": [_cut(words) for words in group.failures],
        "metadata": _cut(row["metadata"]),
        "samples": [_sample(sample, group, spell) for sample in group.samples],
    }


def _sample(sample: sqlite3.Row, group: StoredGroup, spell: Spell | None) -> dict[str, Any]:
    parent, shared = _parent(sample, group)
    shown: dict[str, Any] = {
        "index": sample["sample_index"],
        "trajectory": sample["trajectory"],
        "parent": parent,
        "shared": shared,
        "reward": sample["reward"],
        "outcome": sample["outcome"],
        "stop": sample["stop_reason"],
        "length": sample["num_tokens"],
        "role": _cut(sample["role"]),
        "message": _cut(sample["reward_message"]),
        "parts": _cut(sample["reward_components"]),
        "prompt": _cut(sample["own_prompt_text"]),
        "text": _cut(sample["response_text"]),
        "metadata": _cut(sample["metadata"]),
    }
    return shown | _tokens(sample, spell, step=group.row["consumed_step"]) if spell is not None else shown


def _parent(sample: sqlite3.Row, group: StoredGroup) -> tuple[int | None, int]:
    """Return the earlier sample of the trajectory with the longest common beginning, and its length in tokens."""

    def whole(one: sqlite3.Row) -> NDArray[Any] | None:
        prompt, ids = array(one, "own_prompt_ids"), array(one, "response_ids")
        return None if ids is None else np.concatenate([array(group.row, "prompt_ids") if prompt is None else prompt, ids])

    mine, best = whole(sample), (0, -1)
    for other in group.samples:
        is_earlier = other["sample_index"] < sample["sample_index"] and other["trajectory"] == sample["trajectory"] is not None
        theirs = whole(other) if is_earlier else None
        if mine is not None and theirs is not None:
            length = min(len(mine), len(theirs))
            differs = np.flatnonzero(mine[:length] != theirs[:length])
            best = max(best, (int(differs[0]) if len(differs) else length, other["sample_index"]))
    return (best[1], best[0]) if best[0] else (None, 0)


def quantities(sample: sqlite3.Row, *, step: int) -> dict[str, NDArray[np.float64]]:
    """Return the recorded of QUANTITIES [R] of a sample, NaN where a token has none; nothing where the text alone is kept."""
    engine, versions, values = (array(sample, name) for name in ("rollout_log_probs", "weight_versions", "token_values"))
    if engine is None or versions is None:
        return {}
    engine = np.where(versions >= 0, engine, np.nan).astype(np.float64)
    # Step s trains on weights of version s - 1.
    found = {"surprise": -engine, "age": np.where(versions >= 0, step - 1.0 - versions, np.nan)}
    if values is not None:
        known = dict(zip(TOKEN_VALUES, values.reshape(len(TOKEN_VALUES), -1).astype(np.float64), strict=True))
        away = np.clip(known["ref_log_probs"] - known["log_probs"], -30.0, 30.0)
        found |= {"difference": engine - known["old_log_probs"], "ratio": known["log_probs"] - known["old_log_probs"]}
        found |= {"kl": np.exp(away) - 1.0 - away, "advantage": known["advantages"], "entropy": known["entropy"]}
    return {name: found[name] for name in QUANTITIES if name in found and np.isfinite(found[name]).any()}


def _tokens(sample: sqlite3.Row, spell: Spell, *, step: int) -> dict[str, Any]:
    """Return the texts, numbers and turns of a sample's tokens, without the middle of a long one; nothing without tokens."""
    ids, mask, versions, values = (array(sample, name) for name in ("response_ids", "loss_mask", "weight_versions", "token_values"))
    if ids is None or mask is None or versions is None or not len(ids):
        return {}
    head = len(ids) if len(ids) <= _SHOWN_TOKENS else _SHOWN_TOKENS * 2 // 3
    places = np.r_[0:head, max(head, len(ids) - _SHOWN_TOKENS + head) : len(ids)]
    made = versions[places] >= 0
    begins = np.flatnonzero(np.diff(made, prepend=~made[:1]))
    return {
        "tokens": [visible(text) for part in (places[:head], places[head:]) for text in spell(ids[part].tolist())],
        "ids": ids[places].tolist(),
        "gap": [head, len(ids) - len(places)],
        "mask": _short(mask[places].astype(np.float64)),
        "clipped": 0 if values is None else _short(np.nan_to_num(values.reshape(len(TOKEN_VALUES), -1)[-1][places])),
        "turns": [(int(begin), bool(made[begin])) for begin in begins],
        "numbers": {name: _short(numbers[places]) for name, numbers in quantities(sample, step=step).items()},
    }


def _short(values: NDArray[Any]) -> Any:
    """Return numbers with three digits, null for none, and one number where all are the same."""
    if (values == values[0]).all():
        values = values[:1]
    rounded = [float(f"{value:.3g}") if math.isfinite(value) else None for value in values.tolist()]
    whole = [int(value) if value is not None and value == int(value) else value for value in rounded]
    return whole[0] if len(set(whole)) == 1 else whole


def _cut(text: str | None) -> str:
    """Return a text to show, without the middle of a long one; nothing of an absent or empty one."""
    shown = visible("" if text in (None, "{}") else str(text))
    if len(shown) <= _SHOWN_LETTERS:
        return shown
    head, tail = _SHOWN_LETTERS * 2 // 3, _SHOWN_LETTERS // 3
    return f"{shown[:head]}\n[... {len(shown) - _SHOWN_LETTERS:,} characters left out ...]\n{shown[-tail:]}"
