"""Agents of tests: functions, and with a name on the command line a program."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai

from megatron_rl.types import Prompt


async def ask(base_url: str, api_key: str, *contents: str, **fields: Any) -> str:
    """The last answer of a conversation with these messages of a user."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = []
        for content in contents:
            messages.append({"role": "user", "content": content})
            answer = await client.chat.completions.create(model="policy", messages=messages, **fields)
            messages.append(answer.choices[0].message)
    return str(messages[-1].content)


async def count(*, prompt: Prompt, base_url: str, api_key: str, bonus: float = 0.0) -> dict[str, float]:
    said = await ask(base_url, api_key, prompt.text)
    return {"right": float(said == prompt.label), "bonus": bonus}


async def fan_out(*, prompt: Prompt, base_url: str, api_key: str) -> float:
    """Two proposals at once, and a choice between them."""
    both = await asyncio.gather(*(ask(base_url, api_key, f"Propose {number}.") for number in range(2)))
    return float(await ask(base_url, api_key, f"Choose: {', '.join(both)}") == prompt.label)


async def at_once(*, prompt: Prompt, base_url: str, api_key: str) -> float:
    """Three questions at once, the third of them with a second turn, and nothing behind them."""
    asked = [("Ask 2.",), ("Ask 1.",), ("Ask 0.", "And?")]
    return float(len(await asyncio.gather(*(ask(base_url, api_key, *each) for each in asked))))


async def silent(*, prompt: Prompt, base_url: str, api_key: str) -> None:
    if prompt.label == "nothing":
        return None
    await ask(base_url, api_key, "Hi.")
    return {"text": "4", "infinite": float("inf"), "raise": {}.get}[prompt.label or ""] if prompt.label != "4" else None  # type: ignore[return-value]


async def failing(*, prompt: Prompt, base_url: str, api_key: str) -> float:
    """Fails in the way of its label."""
    if prompt.label == "raise":
        await ask(base_url, api_key, "Hi.")
        raise KeyError("missing")
    if prompt.label == "hang":
        await asyncio.sleep(1000)
    if prompt.label == "exit":
        raise SystemExit(3)
    if prompt.label == "budget":
        await ask(base_url, api_key, "Hi.", "Hi.", "Hi.")
    if prompt.label == "context":
        await ask(base_url, api_key, "Hi." * 5000)
    if prompt.label == "swallowed":
        try:
            await ask(base_url, api_key, "Hi.")
        except openai.OpenAIError:
            await asyncio.sleep(1000)
    return 1.0


def main(name: str) -> None:
    task = json.loads(Path(os.environ["MEGATRON_RL_PROMPT"]).read_text("utf-8"))
    if name == "environment":
        print(json.dumps(dict(os.environ)), file=sys.stderr)
        Path(task["metadata"]["file"]).write_text(json.dumps({"task": task, "variables": dict(os.environ)}))
    if name == "children":
        # One in the process group, one that has left it, both with the pipe of the output.
        for new_session in (False, True):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=new_session)
        Path(task["metadata"]["file"]).write_text(str(os.getpid()))
    if name == "memory":
        bytearray(6 * 2**30)
    if name == "status":
        print("it went wrong", file=sys.stderr)
        sys.exit(3)
    if name == "killed":
        os.kill(os.getpid(), 9)
    if name == "hang":
        Path(task["metadata"]["file"]).write_text(str(os.getpid()))
        time.sleep(1000)
    client = openai.OpenAI()
    answer = client.chat.completions.create(model="policy", messages=task["messages"])
    print(f"said {answer.choices[0].message.content}\n{task['metadata'].get('last', json.dumps({'reward': 1.5}))}\n")


if __name__ == "__main__":
    main(sys.argv[1])
