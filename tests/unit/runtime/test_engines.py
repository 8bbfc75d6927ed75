"""The actor of an engine is small: what it imports is what it needs."""

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.engines.answers import MixtureShape
from megatron_rl.engines.engine import Engine

# What a Ray process does when it becomes this actor: import the class, then read the arguments of its constructor.
BECOME_THE_ACTOR = """
import pickle, sys
import megatron_rl.runtime.engines
pickle.load(sys.stdin.buffer)
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "sglang", "transformers", "ray"}))
"""


def test_the_actor_of_an_engine_imports_no_torch_and_no_megatron() -> None:
    make_engine = partial(
        Engine,
        Path("model"),
        settings=RolloutSettings(),
        device_kind="cpu",
        dtype="float32",
        seed=1,
        log_path=Path("engine.log"),
        mixture=MixtureShape(num_layers=2, num_dense_layers=0, num_experts=4, experts_per_token=2),
        colocated=False,
    )
    command = [sys.executable, "-c", BECOME_THE_ACTOR]
    done = subprocess.run(command, input=pickle.dumps(make_engine), capture_output=True, timeout=120, check=True)
    assert done.stdout.decode().split() == ["ray"]
