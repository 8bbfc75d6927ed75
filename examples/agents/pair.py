"""Two agents with one policy: three proposals at the same time, a verifier beside each, and the first accepted one counts.

Every answer is a branch of the trajectory, and all branches get its reward: proposals that are right pay off only where the
verifier accepts them, and a verifier pays off only where it refuses the others.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import openai

from megatron_rl.types import Prompt

NUM_PROPOSALS = 3


async def play(*, prompt: Prompt, base_url: str, api_key: str) -> float:
    """Return 1 when the accepted proposal is the label, 0 for another one and where all are refused."""
    # The endpoint is on loopback, without TLS. To read the certificates for it nevertheless would take 36 ms for each trajectory.
    unsecured = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=unsecured) as client:
        answer = await client.chat.completions.create(model="policy", messages=list(prompt.messages), n=NUM_PROPOSALS)
        proposals = [choice.message.content or "" for choice in answer.choices]
        accepted = await asyncio.gather(*(verify(client, question=prompt.messages[0]["content"], proposal=each) for each in proposals))
    first = next((proposal for proposal, yes in zip(proposals, accepted, strict=True) if yes), None)
    return float(first == prompt.label)


async def verify(client: openai.AsyncOpenAI, *, question: str, proposal: str) -> bool:
    """Return True when the verifier says yes to the proposal."""
    messages: Any = [{"role": "user", "content": verifiers_question(question, proposal)}]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content == "yes"


def verifiers_question(question: str, proposal: str) -> str:
    """Return what the verifier is asked, which has another role than the one who proposes."""
    return f"{question} {proposal}. Right?"


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless questions for the largest of four digits."""
    draw = random.Random(seed)
    while True:
        digits = [draw.randint(0, 9) for _ in range(4)]
        question = f"Largest of {' '.join(map(str, digits))}?"
        yield {"prompt": [{"role": "user", "content": question}], "label": str(max(digits))}
