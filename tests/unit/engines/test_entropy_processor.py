"""The processor of entropy-aware sampling: when a request names it, what the name is, and what it makes of a batch."""

import asyncio
import json
import pickletools
from typing import Any

import numpy as np
import torch
from aiohttp import web
from client_parts import ONE, answer, talk
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from shaped_draws import draw_by_definition

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.entropy_processor import PARAMETER, PROCESSOR, EntropyProcessor
from megatron_rl.engines.sampling import Sampling


async def answers_all(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response([answer() for _ in body["input_ids"]])


def test_a_processor_is_named_for_entropy_aware_samples_alone() -> None:
    """In one call with plain ones, whose part of it is null; a call without such samples has no word of it."""
    shaped = Sampling(max_tokens=3, entropy=EntropyAware(thresholds=(0.5, 0.5)))

    async def both(client: EngineClient) -> Any:
        await asyncio.gather(*(client.generate(np.array([1]), sampling=sampling) for sampling in (ONE, shaped)))
        return await client.generate(np.array([1]), sampling=ONE)

    _, ((_, mixed), (_, plain)) = talk(answers_all, both)
    assert mixed["custom_logit_processor"] == [None, PROCESSOR] and "custom_logit_processor" not in plain
    assert [PARAMETER in each.get("custom_params", {}) for each in mixed["sampling_params"]] == [False, True]


def test_the_named_processor_is_a_name_of_this_package() -> None:
    pickled = bytes.fromhex(json.loads(PROCESSOR)["callable"])
    assert [(code.name, argument) for code, argument, _ in pickletools.genops(pickled)] == [
        ("GLOBAL", "megatron_rl.engines.entropy_processor EntropyProcessor"), ("STOP", None)
    ]  # fmt: skip
    assert CustomLogitProcessor.from_str(PROCESSOR).__class__ is EntropyProcessor


def test_rows_are_shaped_by_their_own_requests() -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(12, 9)) * np.linspace(0.2, 6, 12)[:, None], dtype=torch.float32)
    cases = [(EntropyAware(thresholds=(1.5, 0.3)), 0.7), (EntropyAware(thresholds=(0.5, 0.6)), 1.4)] * 6
    parameters = [Sampling(max_tokens=1, temperature=each, entropy=entropy).request()["custom_params"] for entropy, each in cases]
    shaped = EntropyProcessor()(logits.clone(), [{"__req__": None, **each} for each in parameters])
    for row, made, (entropy, temperature) in zip(logits.tolist(), shaped, cases, strict=True):
        wanted, _ = draw_by_definition(row, entropy, temperature=temperature)
        np.testing.assert_allclose(torch.log_softmax(made / temperature, -1).numpy(), wanted, atol=1e-5)
