"""`python -m megatron_rl.engines.sglang_server`: the SGLang server.

Standard input has ServerArgs fields as a JSON object: a process list would show the API key. The
kernel kills this process with its parent, and SGLang's processes with this one.
"""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from megatron_rl.engines.on_cpu import sglang_shims
from megatron_rl.engines.server_args import ROUTER
from megatron_rl.system.deadlines import ENGINE_STORE_S
from megatron_rl.system.leftovers import die_with_parent
from megatron_rl.system.stacks import answer_stack_requests

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def serve_rendezvous(arguments: dict[str, Any]) -> "TCPStore | None":
    """Serve the ranks' store on the server's own address; rank 0 would open it to every interface.

    The result keeps the store alive; None with a dp_size above 1, when SGLang wants a free port, and
    where the first of an engine's nodes serves it.
    """
    if arguments.get("dp_size", 1) > 1:
        return None
    from megatron_rl.system.rendezvous import serve_store

    address, found, port = arguments.get("dist_init_addr", arguments["host"]).partition(":")
    store = None
    if not arguments.get("node_rank"):
        store = serve_store(address, port=int(port if found else arguments.get("nccl_port") or 0), timeout_s=ENGINE_STORE_S)
        port = str(store.port)
    if not found:
        arguments["nccl_port"] = int(port)
    # Rank 0 joins a store and serves none; in torch 2.14 only at MASTER_ADDR and MASTER_PORT.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": address, "MASTER_PORT": port}
    return store


def main() -> None:
    """Serve until a signal, or until the parent is gone."""
    die_with_parent()
    answer_stack_requests()
    sglang_shims.hide_megatron()
    arguments = json.load(sys.stdin)
    on_cpu = arguments["device"] == "cpu"
    seeded = bool(arguments.get("enable_deterministic_inference"))
    deterministic = on_cpu and seeded
    if on_cpu:
        sglang_shims.provide_vllm_operators()
        sglang_shims.fork_server_processes()
        sglang_shims.take_cpu_for_the_device()
        if not arguments.get("enable_torch_compile"):
            sglang_shims.compile_at_first_call()
    if deterministic:
        # SGLang compiles the seeded sampling again for each batch size.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    sglang_shims.refuse_deadly_requests()
    sglang_shims.hide_the_key_in_logs()
    load_plugins()
    if seeded:
        sglang_shims.draw_each_request_by_its_own_seed()
    if on_cpu:
        from megatron_rl.engines.on_cpu.sglang_attention import register

        sglang_shims.import_needed_models(arguments)
        register(invariant=deterministic)
        sglang_shims.allocate_host_memory_unpinned()
        sglang_shims.gate_shared_experts_in_torch()
    products = None
    if deterministic:
        from megatron_rl.engines.on_cpu.deterministic_cpu import invariant_products

        sglang_shims.allow_deterministic_inference()
        # The scheduler is a fork of this process.
        products = invariant_products()
    if arguments.pop(ROUTER, None) is not None:
        sglang_shims.name_the_engine(f"http://{arguments['host']}:{arguments['port']}")
    store = serve_rendezvous(arguments)
    try:
        run_server(ServerArgs(**arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        del store, products


if __name__ == "__main__":
    main()
