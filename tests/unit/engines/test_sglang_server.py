"""Where the ranks of an SGLang server meet, without a server: torch's own rendezvous stands for SGLang's ranks."""

import os
import socket

import psutil
import pytest
from torch import distributed

from megatron_rl.engines.engine import free_port
from megatron_rl.engines.sglang_server import serve_rendezvous


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back the variables of SGLang's processes."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")


def listening() -> set[tuple[str, int]]:
    return {tuple(link.laddr) for link in psutil.Process().net_connections(kind="tcp") if link.status == psutil.CONN_LISTEN}


def test_rank_zero_joins_the_servers_store() -> None:
    arguments = {"host": "127.0.0.1", "tp_size": 2}
    before = listening()
    store = serve_rendezvous(arguments)
    assert store is not None and arguments["nccl_port"] == store.port
    joined, rank, size = next(iter(distributed.rendezvous(f"tcp://127.0.0.1:{arguments['nccl_port']}", 0, 1)))
    joined.set("key", "value")
    assert (rank, size, store.get("key")) == (0, 1, b"value")
    # torch 2.14 serves a store of its own, at a port in use, unless these name the store that it is to join.
    assert (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) == ("127.0.0.1", store.port)
    assert listening() - before == {("127.0.0.1", store.port)}


def test_servers_on_several_nodes_meet_at_the_store_of_the_first() -> None:
    before, port = listening(), free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX))
    servers = [{"host": f"127.0.0.{rank + 1}", "node_rank": rank, "dist_init_addr": f"127.0.0.1:{port}"} for rank in (0, 1)]
    stores = []
    for arguments in servers:
        stores.append(serve_rendezvous(arguments))
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", str(port)) and "nccl_port" not in arguments
    assert stores[0] is not None and stores[1] is None and listening() - before == {("127.0.0.1", port)}


def test_where_sglang_wants_the_port_free_nothing_changes() -> None:
    arguments = {"host": "127.0.0.1", "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    before = dict(arguments)
    assert serve_rendezvous(arguments) is None
    assert arguments == before and not os.environ["TORCHELASTIC_USE_AGENT_STORE"]
