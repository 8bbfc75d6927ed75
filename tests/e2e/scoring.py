"""Log-probs of given tokens by a real engine, which a run never asks for."""

import numpy as np

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.sampling import Sampling
from megatron_rl.types import Floats, Ints


async def score(client: EngineClient, token_ids: Ints) -> Floats:
    """Log-probs [T] at temperature 1 of the sequence `token_ids` [T] under the engine's weights, 0 for the first token."""
    body = {
        "input_ids": token_ids.tolist(),
        "sampling_params": {**Sampling(max_tokens=1).request(), "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await client._call("POST", "/generate", body, timeout_s=120.0, attempts=3)
    scored = answer["meta_info"]["input_token_logprobs"]
    # The server reports the id of the vocabulary's last row as 0 (it takes it for a placeholder); the log-prob is right.
    assert [entry[1] for entry in scored] == np.where(token_ids < client.address.vocab_size - 1, token_ids, 0).tolist()
    return np.array([0.0] + [entry[0] for entry in scored[1:]], np.float32)
