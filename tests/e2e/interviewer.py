"""An agent that knows only a URL and a key: three questions, a proposal beside them, and a summary of what was said.

As a function of a run, and as a program, which prints its reward last.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import openai

from megatron_rl.types import Prompt


async def play(*, prompt: Prompt, base_url: str, api_key: str, seen: Path | None = None) -> dict[str, float]:
    if seen is not None:
        seen.write_text(base_url)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return await interview(client, list(prompt.messages))


async def interview(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, float]:
    """The parts of the reward: from the lengths of three answers, and of two branches asked at once."""

    async def said(messages: list[Any]) -> Any:
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=20)
        return answer.choices[0].message

    for number in range(2):
        messages += [await said(messages), {"role": "user", "content": f"{number}: and then?"}]
    contents = ("Propose.", "Verify.")
    branches = await asyncio.gather(*(said([*messages[:-1], {"role": "user", "content": content}]) for content in contents))
    summary = await said([{"role": "user", "content": f"Sum up: {branches[0].content!r:.20}"}])
    return {"even": float(len(branches[0].content or "") % 2 == 0), "summary": len(summary.content or "") / 100}


async def main() -> None:
    """Ask without further arguments, by what is in the environment."""
    task = json.loads(Path(os.environ["MEGATRON_RL_PROMPT"]).read_text("utf-8"))
    async with openai.AsyncOpenAI() as client:
        print(json.dumps({"reward": await interview(client, list(task["messages"]))}))


if __name__ == "__main__":
    asyncio.run(main())
