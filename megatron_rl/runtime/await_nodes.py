"""`python -m megatron_rl.runtime.await_nodes ADDRESS NODES`: wait until a Ray cluster has so many nodes with a GPU."""

import sys
import time

import ray

from megatron_rl.errors import DeadlineError, MegatronRLError
from megatron_rl.system.deadlines import NODES_START_S

POLL_S = 2.0


def await_nodes(address: str, num_nodes: int, *, timeout_s: float = NODES_START_S) -> None:
    """Join the Ray cluster at `address`, also one still starting; return when `num_nodes` nodes have a GPU.

    Prints each new number of nodes. Raises DeadlineError after `timeout_s` seconds.
    """
    deadline, told = time.monotonic() + timeout_s, None
    try:
        while True:
            try:
                if not ray.is_initialized():
                    ray.init(address=address, log_to_driver=False, logging_level="error")
                found = sum(node["Alive"] and node["Resources"].get("GPU", 0) > 0 for node in ray.nodes())
            except ConnectionError:
                found = 0
            if found != told:
                print(f"nodes with GPUs at {address}: {found} of {num_nodes}", flush=True)
                told = found
            if found >= num_nodes:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(f"{found} of {num_nodes} nodes joined {address} within {timeout_s:.0f} s; start Ray on the others")
            time.sleep(POLL_S)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    try:
        await_nodes(sys.argv[1], int(sys.argv[2]))
    except MegatronRLError as error:
        sys.exit(f"await_nodes: {error}")
