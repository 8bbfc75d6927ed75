"""A tiny random Qwen3, a server of it, and its log-probs by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from shaped_draws import draw_by_definition
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import server_arguments

VOCAB = 64
TEMPERATURE = 0.7


def make_model(directory: Path, *, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    return model


def make_engine(model: Path, log: Path, *, shapes_logits: bool = False, **options: Any) -> Engine:
    # At this level SGLang writes its arguments to the log.
    described: dict[str, Any] = {"model_path": model, "device_kind": "cpu", "dtype": "float32", "seed": 7}
    arguments = server_arguments({"log_level": "info"}, shapes_logits=shapes_logits, **described)
    return Engine(arguments, log_path=log, **options)


def prompts_of_many_lengths() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in (1, 2, 3, 5, 8, 9, 30, 33, 70, 120)]


async def load(client: EngineClient, path: Path, *, version: int) -> None:
    """Load weights as a sync does: a server that has just answered may still count the request as running, and then keeps its cache."""
    await client.pause("retract")
    await client.load_weights(path, version=version)
    await client.resume()


def reference_log_probs(model: Qwen3ForCausalLM, tokens: list[int], *, temperature: float) -> np.ndarray:
    """Log-prob of each token but the first, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def drawn_log_probs(model: Qwen3ForCausalLM, tokens: list[int], sampling: Sampling) -> tuple[np.ndarray, list[str]]:
    """Log-prob of each token but the first under `sampling`, in a float64 loop over the logits of transformers, and its quadrant."""
    if sampling.entropy is None:
        return reference_log_probs(model, tokens, temperature=sampling.temperature), []
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0, :-1].double().tolist()
    drawn = [draw_by_definition(row, sampling.entropy, temperature=sampling.temperature) for row in rows]
    return np.array([row[token] for (row, _), token in zip(drawn, tokens[1:], strict=True)]), [name for _, name in drawn]
