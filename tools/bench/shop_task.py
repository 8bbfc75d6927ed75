"""A shop with tools as environment and as agent, and a policy that calls one: what `rollout.py` measures.

The policy is made here. Attention and layers add nothing, and the output layer says which token follows another. So answers have the
same lengths in every turn, while the engine works as for any model of these sizes, and tools are called in the form of the template.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.agents.shop import Shop, rows
from megatron_rl.plugins.environment import Reply
from megatron_rl.rollout.environment_call import tools_of
from megatron_rl.types import Message, Prompt

sys.path.append(str(Path(__file__).parents[2]))

from tests.unit.rollout.chat_parts import chat_tokenizer

TURNS = 4
CALL = '\n{"name": "price", "arguments": {"good": "egg"}}\n'
TOOLS = [{"type": "function", "function": tool.description} for tool in tools_of(Shop).values()]


class LoopShop(Shop):
    """The shop on the driver's event loop, without a process."""

    async def step(self, *, message: Message) -> Reply:  # type: ignore[override]
        """Answer as the shop."""
        return super().step(message=message)


async def play(*, prompt: Prompt, base_url: str, api_key: str) -> float:
    """Do as the shop's environment, by the endpoint alone."""
    messages: list[Any] = list(prompt.messages or ())
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        for _ in range(TURNS):
            body = {"model": "policy", "messages": messages, "tools": TOOLS}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                message = (await response.json())["choices"][0]["message"]
            calls, price = message.get("tool_calls") or (), str(prompt.metadata["prices"]["egg"])
            messages += [message, *({"role": "tool", "tool_call_id": call["id"], "name": "price", "content": price} for call in calls)]
            if not calls:
                break
    return 0.0


def write_task(directory: Path) -> None:
    """Write `model` and `rows.jsonl`: an answer is 16 letters, x or y, and the end or a call of a tool, each as likely."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([CALL])
    letters = "abcdefghijklmnop"
    follows = {token: ["a"] for token in tokenizer.get_vocab()} | {one: [two] for one, two in itertools.pairwise(letters)}
    follows |= {"p": ["x", "y"], "x": ["<tool_call>", "<|im_end|>"], "y": ["<tool_call>", "<|im_end|>"]}
    follows |= {"<tool_call>": [CALL], CALL: ["</tool_call>"], "</tool_call>": ["<|im_end|>"]}
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=288, intermediate_size=576, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # A hidden state is its token's own direction, of length sqrt(hidden_size) behind the norm; other tokens are 30 nats below.
        model.model.embed_tokens.weight.copy_(torch.eye(config.vocab_size, config.hidden_size))
        model.lm_head.weight.zero_()
        for token, after in follows.items():
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(after), tokenizer.convert_tokens_to_ids(token)] = (
                30 / config.hidden_size**0.5
            )
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    endless = rows(0)
    (directory / "rows.jsonl").write_text("".join(json.dumps(next(endless)) + "\n" for _ in range(4096)))
