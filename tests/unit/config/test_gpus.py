from collections.abc import Callable

import pytest

from megatron_rl.config import gpus
from megatron_rl.config.gpus import GIB, GPUS, find_gpu
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError

MakeSettings = Callable[..., Settings]


def check_on_gpus(settings: Settings, *, environment: dict[str, str]) -> None:
    colocate = settings.runtime.colocate
    gpus.check_on_gpus(settings.rollout.sglang, settings.weight_transport, colocate=colocate, environment=environment)


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
    with pytest.raises(UserError, match=r"known are L4-24.*give one of them"):
        find_gpu("???")


def test_ranks_and_engines_on_one_gpu_share_memory_or_a_disk(settings_with: MakeSettings) -> None:
    colocated = "runtime.colocate=true"
    assert (settings_with().weight_transport, settings_with(colocated).weight_transport) == ("broadcast", "ipc")
    assert settings_with(colocated, "weights.transport=disk").weight_transport == "disk"
    with pytest.raises(UserError, match="which means ipc, or set it to disk"):
        check_on_gpus(settings_with(colocated, "weights.transport=broadcast"), environment={})
    for allowed in ((), (colocated,), (colocated, "weights.transport=disk")):
        check_on_gpus(settings_with(*allowed), environment={})


def test_expandable_segments_cannot_be_shared_with_an_engine(settings_with: MakeSettings) -> None:
    colocated, options = "runtime.colocate=true", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    with pytest.raises(UserError, match=r"max_split_size_mb:64,expandable_segments:True in the environment.*set weights.transport to disk"):
        check_on_gpus(settings_with(colocated), environment=options)
    check_on_gpus(settings_with(colocated, "weights.transport=disk"), environment=options)
    check_on_gpus(settings_with(colocated), environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})


@pytest.mark.parametrize(
    ("argument", "variables"), [("enable_nccl_nvls", ["NCCL_NVLS_ENABLE"]), ("enable_symm_mem", ["NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"])]
)
def test_an_engine_does_not_set_up_nccl_otherwise_than_the_ranks(settings_with: MakeSettings, argument: str, variables: list[str]) -> None:
    words = f"rollout.sglang.{argument}=true"
    with pytest.raises(UserError) as found:
        check_on_gpus(settings_with(words), environment={"NCCL_CUMEM_ENABLE": "0"})
    wrong = str(found.value).splitlines()[-len(variables) :]
    assert str(found.value).count("with which SGLang sets") == len(variables)
    for name, said in zip(variables, wrong, strict=True):
        assert f"{argument} is true, with which SGLang sets {name} to 1" in said and f"have 0; set {name}=1" in said
    check_on_gpus(settings_with(words), environment=dict.fromkeys(variables, "1"))
    check_on_gpus(settings_with(words, "weights.transport=disk"), environment={})
    check_on_gpus(settings_with(f"rollout.sglang.{argument}=false"), environment={})
