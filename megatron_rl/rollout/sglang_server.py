"""`python -m megatron_rl.rollout.sglang_server`: the SGLang server, told what to do on standard input.

The first line is a JSON object: `arguments`, ServerArgs fields by their own names (so that the API key never shows in a
process list), and `scratch`, the server's directory for temporary files. Standard input then stays open as a lifeline:
when it ends, the parent is gone and the server goes too.
"""

import contextlib
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_rl.deadlines import ENGINE_STORE_S
from megatron_rl.rollout.sglang_shims import (
    allocate_host_memory_unpinned,
    allow_deterministic_inference,
    compile_nothing,
    fork_server_processes,
    gate_shared_experts_in_torch,
    provide_vllm_operators,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STDIN = 0


def read_order() -> dict[str, Any]:
    """The JSON object on the first line of standard input, read without Python's buffer so that the rest stays unread."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(STDIN, 1 << 16)
        if not chunk:
            raise SystemExit("standard input ended before the line with its orders; the engine starts this program, not a person")
        line += chunk
    return dict(json.loads(line))


def follow_parent(scratch: str) -> None:
    """Wait until standard input ends, then end this process group and remove what it would leave behind.

    At once: SGLang's own way out takes 5 seconds and saves nothing.
    """
    while os.read(STDIN, 1 << 16):
        pass
    for child in psutil.Process().children(recursive=True):
        # A child may end while it is looked at, and its end must not keep this process from its own.
        with contextlib.suppress(OSError):
            for path in {line.split()[-1] for line in Path(f"/proc/{child.pid}/maps").read_text().splitlines()}:
                if path.startswith("/dev/shm/sgl"):
                    Path(path).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def serve_rendezvous(arguments: dict[str, Any]) -> "TCPStore | None":
    """Serve the store at which the ranks of this server meet on its own address: rank 0 would open it to every interface.

    It lives as long as what is returned. None, and nothing changes, with a dp_size above 1 (of attention): SGLang then checks that
    nobody listens at the port yet.
    """
    if arguments.get("dp_size", 1) > 1:
        return None
    from megatron_rl.rendezvous import serve_store

    store = serve_store(arguments["host"], port=arguments.get("nccl_port") or 0, timeout_s=ENGINE_STORE_S)
    arguments["nccl_port"] = store.port
    # Lets torch's rank 0 join a store as all others do instead of serving it.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    return store


def main() -> None:
    """Serve until a signal, or until the parent is gone."""
    order = read_order()
    threading.Thread(target=follow_parent, args=[order["scratch"]], daemon=True, name="follow-parent").start()
    arguments = order["arguments"]
    on_cpu = arguments["device"] == "cpu"
    deterministic = on_cpu and bool(arguments.get("enable_deterministic_inference"))
    if on_cpu:
        provide_vllm_operators()
        fork_server_processes()
    if deterministic:
        compile_nothing()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if on_cpu:
        from megatron_rl.rollout.sglang_attention import register

        register(invariant=deterministic)
        allocate_host_memory_unpinned()
        gate_shared_experts_in_torch()
    products = None
    if deterministic:
        from megatron_rl.rollout.deterministic_cpu import invariant_products

        allow_deterministic_inference()
        # The scheduler is a fork of this process.
        products = invariant_products()
    store = serve_rendezvous(arguments)
    try:
        run_server(ServerArgs(**arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        del store, products


if __name__ == "__main__":
    main()
