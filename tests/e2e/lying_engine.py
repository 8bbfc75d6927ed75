"""A rollout whose driver sees answers of the first engine without their log-probs from the second step on."""

from collections.abc import Sequence
from typing import Any

from megatron_rl.engines.client import EngineClient
from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Sample

liars: list[str] = []
_ask = EngineClient._ask


async def _lied(self: EngineClient, asked: Sequence[dict[str, Any]]) -> list[Any]:
    answers = await _ask(self, asked)
    if answers[0]["meta_info"]["weight_version"] != "0" and not liars:
        liars.append(self.address.url)
    if self.address.url in liars:
        for answer in answers:
            del answer["meta_info"]["output_token_logprobs"]
    return answers


async def rollout(**arguments: Any) -> Sequence[Sample]:
    """One turn, on engines of which one lies."""
    EngineClient._ask = _lied  # type: ignore[method-assign]
    return await single_turn(**arguments)
