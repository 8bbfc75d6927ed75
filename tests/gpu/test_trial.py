"""The lines of `megatron-rl doctor --gpu`, on the GPUs of this machine."""

from collections.abc import Iterator

import pytest
import torch

from megatron_rl.config.settings import RuntimeSettings
from megatron_rl.runtime.ray_session import prepare_environment

prepare_environment(RuntimeSettings())

from megatron_rl.doctor.node import Node  # noqa: E402 (Ray reads the environment when it is imported)
from megatron_rl.doctor.trial import LINES  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    tried = Node("cuda", num_gpus=torch.cuda.device_count(), directory=tmp_path_factory.mktemp("trial"))
    yield tried
    tried.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("title", LINES)
def test_a_line_holds_on_the_gpus(node: Node, title: str) -> None:
    broken: list[str] = [str(check) for check in LINES[title](node) if check.level == "broken"]
    assert not broken, "\n".join(broken)
