"""Starting Ray on a machine that is too busy for it. A process that sleeps stands for Ray's node."""

import subprocess
from collections.abc import Callable

import pytest
import ray

from megatron_rl.errors import DeadlineError
from megatron_rl.runtime import cluster
from megatron_rl.runtime.cluster import ray_cluster

BUSY = Exception("The current node timed out during startup. This could happen because some of the raylet failed to startup.")
Nodes = list["subprocess.Popen[bytes]"]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nodes]:
    """`starts(None, error)`: the first start of a node succeeds, the second raises; returns the nodes that were started."""

    def plan(*outcomes: Exception | None) -> Nodes:
        nodes: Nodes = []

        def init(**_arguments: object) -> None:
            nodes.append(subprocess.Popen(["sleep", "600"]))
            outcome = outcomes[len(nodes) - 1]
            if outcome is not None:
                raise outcome

        monkeypatch.setattr(ray, "init", init)
        return nodes

    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "SHUTDOWN_GRACE_S", 0.1)
    return plan


def test_a_node_that_does_not_come_up_is_started_once_more(starts: Callable[..., Nodes]) -> None:
    nodes = starts(BUSY, None)
    with ray_cluster(address=None, num_processes=1):
        assert [node.poll() is None for node in nodes] == [False, True]
    assert [node.poll() is None for node in nodes] == [False, False]


def test_two_nodes_that_do_not_come_up_are_one_sentence(starts: Callable[..., Nodes]) -> None:
    nodes = starts(BUSY, BUSY)
    sentence = r"did not come up within the 30 s that Ray allows, 2 times; .* load of \d+ on \d+ CPUs"
    with pytest.raises(DeadlineError, match=sentence), ray_cluster(address=None, num_processes=1):
        raise AssertionError("the block runs without Ray")
    assert [node.poll() is None for node in nodes] == [False, False]


def test_another_failure_is_rays_own_and_leaves_nothing(starts: Callable[..., Nodes]) -> None:
    nodes = starts(RuntimeError("no space left on device"))
    with pytest.raises(RuntimeError, match="no space left"), ray_cluster(address=None, num_processes=1):
        raise AssertionError("the block runs without Ray")
    assert [node.poll() is None for node in nodes] == [False]
