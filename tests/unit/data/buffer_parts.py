"""Steps that take groups from a buffer, as its tests ask for them."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_rl.data.buffer import Buffer
from megatron_rl.types import Group, Prompt, Sample


def done(buffer: Buffer, limit: int) -> list[Group]:
    """The first `limit` done groups."""
    return buffer.groups([group.id for group in buffer.waiting() if group.state == "done"][:limit])


def unfinished(buffer: Buffer, among: int) -> set[str]:
    """The ids of groups that are not done yet, of the first `among` not consumed."""
    return {group.id for group in buffer.waiting()[:among] if group.state != "done"}


def take_done(buffer: Buffer, limit: int, *, step: int, rejections: Mapping[str, str] = MappingProxyType({})) -> list[Group]:
    """Up to `limit` done groups, consumed by `step`."""
    groups = done(buffer, limit)
    buffer.consume({group.id: rejections.get(group.id) for group in groups}, step=step)
    return groups


def finished_samples(buffer: Buffer, prompt: Prompt) -> tuple[Sample, ...]:
    """The samples that are kept of a prompt in flight."""
    group = buffer.finished(prompt)
    return () if group is None else group.samples


def assert_same(got: Any, expected: Any) -> None:
    """Field by field, arrays to the bit and with their type."""
    assert type(got) is type(expected)
    if isinstance(got, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    elif isinstance(got, tuple):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(got):
        for field in dataclasses.fields(got):
            assert_same(getattr(got, field.name), getattr(expected, field.name))
    else:
        assert got == expected


def fill(buffer: Buffer, groups: list[Group]) -> None:
    buffer.add_prompts(group.prompt for group in groups)
    assert [prompt.id for prompt in buffer.take_pending(len(groups))] == [group.id for group in groups]
    for group in groups:
        buffer.put_done(group)
