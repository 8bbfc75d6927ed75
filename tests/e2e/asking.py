"""A program that knows only a URL and a key: it asks once, and says whom and with which reward."""

import json
import os
import urllib.request
from pathlib import Path

task = json.loads(Path(os.environ["MEGATRON_RL_PROMPT"]).read_text("utf-8"))
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["text"]}]}).encode()
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"]
with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", data=body, headers=headers)) as response:
    said = json.load(response)["choices"][0]["message"]["content"]
print(f"asked {url}\n{json.dumps({'reward': float(said == task['label'])})}")
