import pytest

from megatron_rl.config.gpus import GIB, GPUS, find_gpu
from megatron_rl.errors import UserError


def test_memory_is_a_little_less_than_the_name_says() -> None:
    for name, gpu in GPUS.items():
        nominal = int(name.split("-")[1]) * 1e9
        assert 0.95 * nominal <= gpu.memory_bytes <= 1.08 * nominal, name
        assert gpu.per_node == 8 and gpu.host_bytes >= 512 * GIB


def test_names_are_found_in_any_case() -> None:
    assert find_gpu("h100-80") is GPUS["H100-80"]


def test_an_unknown_name_gets_the_closest() -> None:
    with pytest.raises(UserError, match=r"'H200-140' is not known.*did you mean H200-141"):
        find_gpu("H200-140")
    with pytest.raises(UserError, match=r"known are A100-40.*give one of them"):
        find_gpu("???")
