"""Stores for processes to meet, on one address alone.

torch's TCPStore has no secret and would listen on every interface of the machine.
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def serve_store(address: str, *, port: int = 0, num_clients: int | None = None, timeout_s: float) -> TCPStore:
    """Return a store listening on `address` alone, at `port` or a free one (see its `port`).

    With `num_clients`, this process included, wait until all have come, at most `timeout_s`
    seconds.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(place)
        port = int(listening.getsockname()[1])
    except BaseException:
        listening.close()
        raise
    return TCPStore(
        address,
        port,
        world_size=num_clients,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=num_clients is not None,
        # The store owns the socket from now on.
        master_listen_fd=listening.detach(),
    )


def join_store(address: str, *, port: int, num_clients: int, timeout_s: float) -> TCPStore:
    """Return the store of another process at this address."""
    return TCPStore(address, port, world_size=num_clients, is_master=False, timeout=timedelta(seconds=timeout_s))
