"""Reward functions of slime and verl as ours, unchanged: `reward.function` and the path of theirs in `reward.args`."""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.types import Sample, StopReason

_STATES = {StopReason.LENGTH: "truncated", StopReason.ABORT: "aborted"}


@functools.cache
def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"reward.args.path is {path}, needs package.module:function of your reward ({error}); correct it") from error
    return found


async def slime(*, sample: Sample, path: str, key: str | None = None) -> dict[str, float]:
    """Return the reward of slime's `(args, sample)` at `path`; `key` chooses one of a mapping, as --reward-key does.

    Their sample has prompt, response, label, metadata, tokens, response_length, index and status;
    `args` has nothing.
    """
    status = SimpleNamespace(value=_STATES.get(sample.stop_reason, "completed"))
    theirs = SimpleNamespace(
        prompt=sample.prompt.text,
        response=sample.response_text,
        label=sample.prompt.label,
        metadata=dict(sample.prompt.metadata),
        tokens=[*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()],
        response_length=len(sample.response_ids),
        loss_mask=sample.loss_mask.astype(int).tolist(),
        index=sample.index,
        status=status,
        reward=None,
    )
    found = _load(path)(SimpleNamespace(), theirs)
    return _rewards(await found if inspect.isawaitable(found) else found, key=key or "score")


async def verl(*, sample: Sample, path: str) -> dict[str, float]:
    """Return the reward of verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` at `path`.

    The row's fields `data_source` and `extra_info` come from the prompt's metadata.
    """
    metadata = dict(sample.prompt.metadata)
    found = _load(path)(
        data_source=metadata.get("data_source", ""),
        solution_str=sample.response_text,
        ground_truth=sample.prompt.label,
        extra_info=metadata.get("extra_info") or {},
    )
    return _rewards(await found if inspect.isawaitable(found) else found, key="score")


def _rewards(found: Any, *, key: str) -> dict[str, float]:
    """Return a reward and its components from a number or a mapping with `key`."""
    if not isinstance(found, dict):
        return {"reward": float(found)}
    others = {name: float(value) for name, value in found.items() if name != key and isinstance(value, bool | int | float)}
    return {**others, "reward": float(found[key])}
