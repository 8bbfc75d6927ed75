"""One gloo rank with megatron's parallel state, for tests that build the real model in this process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.device import local_device, prepare_megatron


@pytest.fixture
def one_rank(tmp_path: Path):
    """Initialise world size 1 and megatron's groups; everything is gone afterwards."""
    from megatron.core import parallel_state, tensor_parallel

    prepare_megatron(local_device())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
