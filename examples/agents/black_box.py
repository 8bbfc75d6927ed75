"""A program that knows a URL, a key and a file with a question, and nothing else of the run.

It asks until it gets a number, at most three times, and prints its own reward as the last line:
0.1 for a number, and 0.9 more for the right one.
"""

import json
import os
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Play one trajectory."""
    task = json.loads(Path(os.environ["MEGATRON_RL_PROMPT"]).read_text("utf-8"))
    client, messages = OpenAI(), list(task["messages"])
    said = ""
    for _ in range(3):
        message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        said = (message.content or "").strip()
        if said.isdecimal():
            break
        messages += [message, {"role": "user", "content": "A number, please."}]
    print(json.dumps({"reward": {"number": 0.1 * said.isdecimal(), "right": 0.9 * (said == task["label"])}}))


main()
