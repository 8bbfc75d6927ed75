"""The Ray actor of an engine, thin: it starts one SGLang server and watches it.

Neither this module nor what it imports knows torch or Megatron: the actor needs none of it, and importing it takes ten times as long as
everything else that the actor does, and ten times the memory.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import ray

from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import Engine, EngineAddress

HEALTH_INTERVAL_S = 0.5


def enter_directory(directory: Path) -> None:
    """Work where the driver does, so that relative paths mean the same on every node. Raises UserError where it does not exist."""
    if not directory.is_dir():
        raise UserError(
            f"{ray.util.get_node_ip_address()} has no directory {directory}, from which this run was started and to which its relative "
            f"paths belong; start it from a directory that all nodes share"
        )
    os.chdir(directory)


@ray.remote(concurrency_groups={"watch": 1})
class EngineWorker:
    """One SGLang server, a child process of this actor, on the GPUs that Ray gave it or, beside ranks, on `shared_gpus`."""

    def __init__(self, make_engine: Callable[..., Engine], *, directory: Path, shared_gpus: tuple[int, ...] = ()) -> None:
        enter_directory(directory)
        gpus = shared_gpus or tuple(int(gpu) for gpu in ray.get_gpu_ids())
        self._engine = make_engine(host=ray.util.get_node_ip_address(), gpu_ids=gpus)
        self._stopping = False

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Beside the other calls: return when the engine was stopped on purpose; raise with the tail of its log when it died."""
        while not self._stopping:
            self._engine.check()
            time.sleep(HEALTH_INTERVAL_S)

    def start(self) -> EngineAddress:
        """Start the server and wait until it serves."""
        return self._engine.start()

    def stop(self) -> None:
        """Stop the server and reap it."""
        self._stopping = True
        self._engine.stop()
