"""An endpoint with one open session, whose policy says what a test wrote down, and waits where a test lets it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from chat_parts import THINKING_TEMPLATE, Policy, chat_tokenizer

from megatron_rl.config.settings import AgentSettings, RolloutSettings, SamplingSettings
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.rollout.conversation import Conversation
from megatron_rl.rollout.endpoint import Endpoint, Session
from megatron_rl.rollout.renderers import choose_renderer
from megatron_rl.types import Ints, Prompt, Sample

PROMPT = Prompt(id="p", token_ids=np.array([1]), text="Hi.", label="4")
USER = {"role": "user", "content": "Hi."}
RETRY = {"x_stainless_retry_count": "1"}
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


class Gate(Policy):
    """A policy that answers once `opened`, and whose aborts end once `aborted`; `num_running` and `num_cancelled` are its requests."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.opened = asyncio.Event()
        self.aborted = asyncio.Event()
        self.opened.set()
        self.aborted.set()
        self.num_running = self.num_cancelled = 0

    async def generate(
        self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1, session: str | None = None
    ) -> tuple[Generation, ...]:
        self.num_running += 1
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            await self.aborted.wait()
            raise
        finally:
            self.num_running -= 1
        return await super().generate(token_ids, sampling=sampling, num_samples=num_samples, session=session)


class Served:
    """The open session of a test: its URL, key and policy, and plain HTTP requests to it."""

    def __init__(self, endpoint: Endpoint, session: Session, policy: Gate, client: aiohttp.ClientSession) -> None:
        self.endpoint, self.session, self.policy, self.client = endpoint, session, policy, client
        self.url, self.key = endpoint.url, session.key

    async def post(self, path: str, body: object, *, key: str | None = None, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of an answer; texts and bytes are sent as they are."""
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        sent = {"Authorization": f"Bearer {key or self.key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.client.post(self.url + path, data=data, headers=sent) as response:
            return response.status, json.loads(await response.text())

    async def chat(self, *messages: Mapping[str, Any], headers: Mapping[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
        body = {"model": "policy", "messages": list(messages) or [USER], **fields}
        return await self.post("/v1/chat/completions", body, **(headers or {}))

    def samples(self) -> tuple[Sample, ...]:
        return self.session.conversation.samples(PROMPT, trajectory=0)


def error_of(answer: tuple[int, Any], *words: str) -> int:
    """The status of an error in OpenAI's form with these words."""
    status, body = answer
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert all(word in body["error"]["message"] for word in words), body
    return status


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def served(
    texts: Sequence[str] | Callable[[str], str],
    *,
    max_turns: int = 64,
    max_tokens: int = 200,
    context: int = 4096,
    template: str = THINKING_TEMPLATE,
    top_p: float = 1.0,
    **agent: Any,
) -> AsyncIterator[Served]:
    """Serve a session of a run with these settings."""
    settings = RolloutSettings(
        agent=AgentSettings(command=("unused",), **agent), max_turns=max_turns, sampling=SamplingSettings(top_p=top_p)
    )
    tokenizer = chat_tokenizer(template)
    policy = Gate(tokenizer, texts, context=context)
    renderer = choose_renderer(tokenizer, model_type="qwen3")
    conversation = Conversation(renderer, policy, tokenizer=tokenizer, session="s")
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(tokenizer.eos_token_id,))
    async with Endpoint(settings) as endpoint, endpoint.open(conversation, sampling) as session, aiohttp.ClientSession() as client:
        yield Served(endpoint, session, policy, client)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))
