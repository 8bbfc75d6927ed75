"""Reward functions of slime and verl as ours, unchanged: `reward.function` and the path of theirs in `reward.args`."""

import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable
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


def slime(*, sample: Sample, path: str, key: str | None = None) -> Any:
    """Return the reward, or an awaitable of it, of slime's `(args, sample)` at `path`.

    `key` chooses one number of a mapping, as --reward-key does. Their sample has prompt, response,
    label, metadata, tokens, response_length, index and status; `args` has nothing.
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
    return _rewards(found, key=key or "score")


def verl(*, sample: Sample, path: str) -> Any:
    """Return the reward, or an awaitable of it, of verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` at `path`.

    The row's fields `data_source` and `extra_info` come from the prompt's metadata.
    """
    metadata = dict(sample.prompt.metadata)
    found = _load(path)(
        data_source=metadata.get("data_source", ""),
        solution_str=sample.response_text,
        ground_truth=sample.prompt.label,
        extra_info=metadata.get("extra_info") or {},
    )
    return _rewards(found, key="score")


async def _awaited(found: Awaitable[Any], *, key: str) -> Any:
    return _rewards(await found, key=key)


def _rewards(found: Any, *, key: str) -> Any:
    """Return a reward and its components from a number or a mapping with `key`; of an awaitable, an awaitable."""
    if inspect.isawaitable(found):
        return _awaited(found, key=key)
    if not isinstance(found, dict):
        return {"reward": float(found)}
    others = {name: float(value) for name, value in found.items() if name != key and isinstance(value, bool | int | float)}
    return {**others, "reward": float(found[key])}
