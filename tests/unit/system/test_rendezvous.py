"""Where a store listens, seen in the kernel's table of this process's sockets."""

import socket
import threading

import psutil
import pytest

from megatron_rl.system.rendezvous import join_store, serve_store


def listening() -> set[tuple[str, int]]:
    return {tuple(link.laddr) for link in psutil.Process().net_connections(kind="tcp") if link.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_store_listens_on_its_address_alone(address: str) -> None:
    before = listening()
    store = serve_store(address, timeout_s=10)
    opened = listening() - before
    assert [port for _, port in opened] == [store.port]
    assert {host for host, _ in opened} <= ({address} if address[0].isdigit() else {"127.0.0.1", "::1"})


def test_those_who_meet_see_what_the_others_wrote() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores: dict[str, object] = {}
    serving = threading.Thread(
        target=lambda: stores.update(served=serve_store("127.0.0.1", port=port, num_clients=2, timeout_s=30)), daemon=True
    )
    serving.start()
    joined = join_store("127.0.0.1", port=port, num_clients=2, timeout_s=30)
    joined.set("key", "value")
    serving.join(timeout=30)
    assert stores["served"].get("key") == b"value"  # type: ignore[attr-defined]
