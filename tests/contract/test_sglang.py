"""What the shims for SGLang rest on, read in the installed release. A failure here says that a shim has to be looked at again."""

import base64
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.runtime.engine_model import make_model
from megatron_rl.weights.ipc import _DEVICE_ARGUMENT, allocate_shared, handle_of
from megatron_rl.weights.transport import WeightSpec


def source(path: str) -> str:
    return Path(str(distribution("sglang").locate_file(f"sglang/srt/{path}"))).read_text()


@pytest.mark.parametrize(
    ("path", "text", "shim"),
    [
        ("layers/rotary_embedding/base.py", "from vllm._custom_ops import rotary_embedding", "provide_vllm_operators"),
        ("entrypoints/engine.py", 'mp.set_start_method("spawn", force=True)', "fork_server_processes"),
        ("layers/attention/torch_native_backend.py", "for seq_idx in range(seq_lens.shape[0])", "sglang_attention"),
        ("models/gpt_oss.py", "sinks=self.sinks,", "sglang_attention"),
        ("debug_utils/dumper.py", "from megatron.core import parallel_state as _mpu", "hide_megatron"),
        ("models/registry.py", "in envs.SGLANG_DISABLED_MODEL_ARCHS.get()", "import_needed_models"),
        ("layers/moe/moe_runner/deep_gemm.py", "@torch.compile(", "compile_at_first_call"),
        ("models/qwen2_moe.py", "from sglang.kernels.ops.elementwise.elementwise import (", "gate_shared_experts_in_torch"),
        ("mem_cache/pool_host/common.py", "lambda: alloc_with_host_register,", "allocate_host_memory_unpinned"),
        ("state_capturer/base.py", "[start_len : seqlen - 1]", "read_routed_experts"),
        ("utils/patch_torch.py", f"_REDUCE_TENSOR_ARG_DEVICE_INDEX = {_DEVICE_ARGUMENT}", "weights.ipc"),
        ("managers/tp_worker.py", "serialized_named_tensors[get_parallel().tp_rank]", "weights.ipc"),
        (
            "managers/scheduler_components/logprob_result_processor.py",
            "if x < self.model_config.vocab_size - 1 else 0",
            "EngineClient.score",
        ),
    ],
)
def test_the_reason_for_a_shim_is_still_there(path: str, text: str, shim: str) -> None:
    assert text in source(path), f"{path} of the installed SGLang changed: is {shim} still needed, and still right?"


class Recorder(pickle.Unpickler):
    """Notes what a pickle names."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add((module, name))
        return super().find_class(module, name)


def test_a_shared_memory_handle_names_only_allowed_objects() -> None:
    """SGLang refuses everything that is not in its list, and the server dies of it."""
    flat = allocate_shared(24, torch.device("cpu"))
    recorder = Recorder(base64.b64decode(handle_of(flat, [WeightSpec("a", "bfloat16", (2, 2)), WeightSpec("b", "float32", (4,))])))
    recorder.load()
    names = {*recorder.names, ("torch.multiprocessing.reductions", "rebuild_cuda_tensor")}
    allowed = source("utils/common.py")
    missing = [name for name in sorted(names) if f'("{name[0]}", "{name[1]}")' not in allowed]
    assert not missing, f"the installed SGLang refuses {missing}: weights.ipc has to write something else"
    assert ("types", "SimpleNamespace") in names and ("torch.multiprocessing.reductions", "rebuild_storage_filename") in names


RESOLVE = """
import os, sys
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.utils import resolve_transformers_arch
for path in sys.argv[1:]:
    config = ModelConfig(path, trust_remote_code=False)
    print("found", resolve_transformers_arch(config, config.hf_config.architectures), "RAN" in os.environ)
"""


def test_engines_do_not_run_the_code_that_a_config_json_names(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """SGLang imports what model.path names where it has no class of its own; if it asks one day, `names_code` can go."""
    path = tiny_model(family="ministral")
    config = json.loads((path / "config.json").read_text()) | {"auto_map": {"AutoModel": "modeling.Model"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling.py").write_text("import os\nos.environ['RAN'] = 'yes'\nclass Model: pass\n")
    served = make_model(path, directory=tmp_path / "run", sglang={}, dtype="float32", note=lambda words: None)
    command = [sys.executable, "-c", RESOLVE, str(served.path), str(path)]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout
    found = [line for line in told.splitlines() if line.startswith("found")]
    assert found == ["found ['TransformersForCausalLM'] False", "found ['TransformersForCausalLM'] True"]
