"""What the shims for SGLang rest on, read in the installed release. A failure here says that a shim has to be looked at again."""

from importlib.metadata import distribution
from pathlib import Path

import pytest


def source(path: str) -> str:
    return Path(str(distribution("sglang").locate_file(f"sglang/srt/{path}"))).read_text()


@pytest.mark.parametrize(
    ("path", "text", "shim"),
    [
        ("layers/rotary_embedding/base.py", "from vllm._custom_ops import rotary_embedding", "provide_vllm_operators"),
        ("entrypoints/engine.py", 'mp.set_start_method("spawn", force=True)', "fork_server_processes"),
        ("layers/attention/torch_native_backend.py", "for seq_idx in range(seq_lens.shape[0])", "sglang_attention"),
        ("mem_cache/pool_host/common.py", "lambda: alloc_with_host_register,", "allocate_host_memory_unpinned"),
        ("state_capturer/base.py", "[start_len : seqlen - 1]", "read_routed_experts"),
        (
            "managers/scheduler_components/logprob_result_processor.py",
            "if x < self.model_config.vocab_size - 1 else 0",
            "EngineClient.score",
        ),
    ],
)
def test_the_reason_for_a_shim_is_still_there(path: str, text: str, shim: str) -> None:
    assert text in source(path), f"{path} of the installed SGLang changed: is {shim} still needed, and still right?"
