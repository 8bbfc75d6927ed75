"""One gloo rank with megatron's parallel state, for tests that build the real model in this process; hangups."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def _groups_of_one(tmp_path_factory: pytest.TempPathFactory):
    """World size 1 and megatron's groups, which sleep at every start and end; everything is gone after the module."""
    # Imported here: tests of rooms that need no model should not wait for megatron-core.
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_rl.system.device import local_device, prepare_megatron

    prepare_megatron(local_device())
    torch.set_num_threads(1)
    rendezvous = tmp_path_factory.mktemp("groups") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def hangup_heard() -> Iterator[None]:
    """Take SIGHUP also where nohup has started the tests and so told them, and all their children, to ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def one_rank(_groups_of_one: None) -> None:
    """One rank, seeded."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(1)
