"""An agent that knows only a URL and a key: three questions, a proposal beside them, and a summary of what was said.

As a function of a run, and as a program, which prints its reward last.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai

from megatron_rl.types import Prompt


async def play(*, prompt: Prompt, base_url: str, api_key: str, seen: Path | None = None) -> dict[str, float]:
    if seen is not None:
        seen.write_text(base_url)
    # Imported here: the program needs it not.
    import anthropic

    async with (
        openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client,
        anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as other,
    ):
        return await interview(client, list(prompt.messages), sum_up=partial(summary_of_its_own, other))


async def summary_of_its_own(client: Any, content: str) -> str:
    """A stream in the other dialect, with a model and a temperature that are not the run's."""
    asked: dict[str, Any] = {"model": "of-its-own", "messages": [{"role": "user", "content": content}]}
    counted = await client.messages.count_tokens(**asked)
    async with client.messages.stream(**asked, max_tokens=20, extra_body={"temperature": 0.5}) as stream:
        message = await stream.get_final_message()
    assert counted.input_tokens == message.usage.input_tokens > 0 and message.usage.output_tokens > 0
    return "".join(block.text for block in message.content if block.type == "text")


async def ask_in_turn(*, prompt: Prompt, base_url: str, api_key: str, seconds: float = 0.0) -> dict[str, float]:
    """Three questions one after the other, each `seconds` after an answer. They depend on all answers before, and on nothing else."""
    messages: list[Any] = list(prompt.messages or ())
    lengths: list[int] = []
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            message = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            await asyncio.sleep(seconds)
            lengths.append(len(message.content or ""))
            messages += [message, {"role": "user", "content": f"{sum(lengths)}: and then?"}]
    return {"even": float(lengths[-1] % 2 == 0), "sum": sum(lengths) / 100}


async def interview(
    client: openai.AsyncOpenAI, messages: list[Any], *, sum_up: Callable[[str], Awaitable[str]] | None = None
) -> dict[str, float]:
    """The parts of the reward: from the lengths of three answers, and of two branches asked at once; `sum_up` asks for the last."""

    async def said(messages: list[Any]) -> Any:
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=20)
        return answer.choices[0].message

    for number in range(2):
        messages += [await said(messages), {"role": "user", "content": f"{number}: and then?"}]
    contents = ("Propose.", "Verify.")
    branches = await asyncio.gather(*(said([*messages[:-1], {"role": "user", "content": content}]) for content in contents))
    content = f"Sum up: {branches[0].content!r:.20}"
    summary = (await said([{"role": "user", "content": content}])).content if sum_up is None else await sum_up(content)
    return {"even": float(len(branches[0].content or "") % 2 == 0), "summary": len(summary or "") / 100}


async def main() -> None:
    """Ask without further arguments, by what is in the environment."""
    task = json.loads(Path(os.environ["MEGATRON_RL_PROMPT"]).read_text("utf-8"))
    async with openai.AsyncOpenAI() as client:
        print(json.dumps({"reward": await interview(client, list(task["messages"]))}))


if __name__ == "__main__":
    asyncio.run(main())
