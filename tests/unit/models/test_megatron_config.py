"""megatron-core's TransformerConfig for a checkpoint in a layout."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import attention_name, has_fused_attention, resolve_attention
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.models.unavailable_fields import without_kernels
from megatron_rl.models.upstream_fields import checked_fields

DATA = Path(__file__).parents[2] / "data"
QWEN3 = DATA / "configs" / "Qwen3-4B.json"
FUSED_ATTENTION = json.loads((DATA / "fused_attention.json").read_text(encoding="utf-8"))
SPEC = parse_model_spec(json.loads(QWEN3.read_text(encoding="utf-8")), origin=QWEN3.name)


def config_of(overrides, **topology):
    return transformer_config(SPEC, topology=TopologySettings(**topology), dtype=torch.float32, overrides=overrides)


def test_config_follows_checkpoint_topology_and_overrides():
    config = config_of({"recompute_granularity": "selective", "moe_aux_loss_coeff": 0.5}, num_ranks=4, tp=2, pp=2, sequence_parallel=True)
    assert (config.num_layers, config.num_query_groups, config.kv_channels, config.layernorm_epsilon) == (36, 8, 128, 1e-6)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.sequence_parallel) == (2, 2, True)
    assert (config.recompute_granularity, config.moe_aux_loss_coeff) == ("selective", 0.5)
    assert config.perform_initialization


@pytest.mark.parametrize(
    ("overrides", "message"),
    (
        ({"recompute_granularty": "full"}, "recompute_granularty is not a field .*did you mean model.megatron.recompute_granularity"),
        ({"num_layers": 6}, "num_layers is 6, but the checkpoint needs 36"),
        ({"num_moe_experts": 8}, "num_moe_experts is 8, but the checkpoint needs None"),
        ({"tensor_model_parallel_size": 2}, "is 2, but the trainer, with this topology, dtype and device, needs 1"),
        ({"window_size": [128, 0]}, "window_size is .*, but the checkpoint needs None"),
        ({"perform_initialization": False}, "perform_initialization is False"),
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss is False, but the trainer"),
        ({"num_layers_in_first_pipeline_stage": "two"}, "is two: Input should be a valid integer"),
        ({"qk_layernorm": None}, "qk_layernorm is null: Input should be a valid boolean"),
        ({"recompute_granularity": "full"}, "megatron-core refuses this model configuration"),
        ({"use_ring_exchange_p2p": True}, "use_ring_exchange_p2p is True, but the trainer"),
    ),
)
def test_overrides_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        config_of(overrides)


def test_silently_wrong_pipeline_combinations_are_refused(monkeypatch):
    topology = TopologySettings(num_ranks=2, pp=2, vpp=2)
    config = transformer_config(SPEC, topology=topology, dtype=torch.float32, overrides={})
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    wrong = [{"overlap_p2p_comm": False}, {"batch_p2p_comm": True}]
    if not torch.cuda.is_available():
        assert not config.deallocate_pipeline_outputs
        wrong.append({"deallocate_pipeline_outputs": True})
    for overrides in wrong:
        with pytest.raises(UserError, match="but the trainer"):
            transformer_config(SPEC, topology=topology, dtype=torch.float32, overrides=overrides)


def test_routing_that_depends_on_the_layout_is_refused():
    experts = parse_model_spec(json.loads((QWEN3.parent / "Qwen3-30B-A3B.json").read_text(encoding="utf-8")), origin="config.json")
    with pytest.raises(UserError, match=r"moe_router_topk_limited_devices is 1, which lets training.topology.ep decide"):
        transformer_config(
            experts,
            topology=TopologySettings(num_ranks=2, ep=2),
            dtype=torch.float32,
            overrides={"moe_router_topk_limited_devices": 1},
        )


@pytest.mark.parametrize(
    ("topology", "message"),
    (
        ({"ep": 2}, r"training\.topology has ep 2, but the model has no experts; unset ep$"),
        ({"num_ranks": 2, "etp": 2}, r"has etp 2, but the model has no experts; unset etp$"),
        ({"num_ranks": 4, "ep": 2, "etp": 2}, r"has ep 2 and etp 2, but the model has no experts; unset ep and etp$"),
    ),
)
def test_expert_layouts_of_a_model_without_experts_are_refused(topology, message):
    with pytest.raises(UserError, match=message):
        config_of({}, **{"num_ranks": 2, **topology})


def choice_of(choice, spec=SPEC, *, capability=(9, 0), installed=True, cp=1, **overrides):
    return resolve_attention(choice, spec, overrides=overrides, cp=cp, capability=capability, installed=installed)


def test_attention_choice():
    assert choice_of("torch") == "torch"
    assert (choice_of("auto", installed=False), choice_of("auto", capability=None)) == ("torch", "torch")
    assert (choice_of("auto"), choice_of("transformer_engine")) == ("transformer_engine", "transformer_engine")
    with pytest.raises(UserError, match="not installed"):
        choice_of("transformer_engine", installed=False)


@pytest.mark.parametrize("capability", FUSED_ATTENTION["capabilities"], ids=str)
def test_fused_attention_is_had_where_transformer_engine_says(capability):
    """The answers of its own compiled function, for the heads of published models."""
    for case in FUSED_ATTENTION["cases"]:
        trains = capability in case["trains"]
        assert has_fused_attention(tuple(capability), qk=case["qk"], v=case["v"]) == trains, case["case"]
    assert not has_fused_attention(tuple(capability), qk=24, v=12), "channels of a head are multiples of 8"


def test_a_gpu_without_fused_attention_gets_torch_or_its_setting(model_spec):
    qwen, deepseek, gpt_oss = (model_spec(name) for name in ("Qwen3-4B", "DeepSeek-V3", "gpt-oss-120b"))
    chosen = {
        capability: [choice_of("auto", spec, capability=capability) for spec in (qwen, deepseek)]
        for capability in ((8, 0), (9, 0), (10, 0))
    }
    fused = ["transformer_engine"] * 2
    assert chosen == {(8, 0): ["torch"] * 2, (9, 0): fused, (10, 0): fused}
    assert choice_of("auto", gpt_oss) == "torch", "its sinks are not Transformer Engine's"
    assert choice_of("auto", qwen, capability=(8, 0), attention_backend="flash") == "transformer_engine"
    for asked in ({"choice": "transformer_engine"}, {"choice": "auto", "attention_backend": "fused"}):
        with pytest.raises(UserError, match=r"heads of 192 .* 128 .* 8\.0; set model\.attention=torch, or .*attention_backend=flash"):
            choice_of(spec=deepseek, capability=(8, 0), **asked)


def test_windows_over_context_parallel_ranks_are_left_to_torch():
    windowed = dataclasses.replace(SPEC, sliding_window=5, sliding_layers=(0,))
    assert (choice_of("auto", windowed), choice_of("auto", windowed, cp=2)) == ("transformer_engine", "torch")
    with pytest.raises(UserError, match=r"sliding windows and training\.topology\.cp is 2, .* set model\.attention=torch, or cp to 1"):
        choice_of("transformer_engine", windowed, cp=2)


def test_overlapped_messages_without_virtual_stages_are_refused():
    with pytest.raises(UserError, match=r"overlap_p2p_comm is True, but the trainer, .* needs False"):
        config_of({"overlap_p2p_comm": True, "batch_p2p_comm": False}, num_ranks=2, pp=2)


@pytest.mark.parametrize(
    "overrides",
    [
        {"fp8": "hybrid"},
        {"fp4": "e2m1"},
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
        {"moe_token_dispatcher_type": "flex"},
        {"moe_router_fusion": True},
        {"fused_single_qkv_rope": True},
        {"use_te_activation_func": True},
        {"gradient_accumulation_fusion": True},
        {"enable_cuda_graph": True},
        {"cuda_graph_impl": "local"},
        {"cuda_graph_scope": "x"},
        {"hybrid_context_parallel": True},
        {"heterogeneous_block_specs": True},
        {"config_logger_dir": "x"},
        {"test_mode": True},
        {"moe_aux_loss_coeff": [0.5]},
        {"moe_aux_loss_coeff": -0.5},
        {"fp32_residual_connection": True},
    ],
    ids=str,
)
def test_fields_that_would_fail_at_the_build_are_refused(overrides):
    """Found by building and training a tiny model with every value of every field."""
    with pytest.raises(UserError, match=r"^(model\.megatron\.|megatron-core refuses)"):
        transformer_config(SPEC, topology=TopologySettings(), dtype=torch.bfloat16, overrides=overrides)


def test_kernels_of_transformer_engine_are_left_to_it():
    config = transformer_config(
        SPEC, topology=TopologySettings(), dtype=torch.bfloat16, overrides={"moe_router_fusion": True}, attention="transformer_engine"
    )
    assert config.moe_router_fusion
    assert without_kernels({"moe_router_fusion": True, "recompute_granularity": "full"}) == {"recompute_granularity": "full"}


def te_config(*, dtype=torch.bfloat16, **overrides):
    return transformer_config(SPEC, topology=TopologySettings(), dtype=dtype, overrides=overrides, attention="transformer_engine")


@pytest.mark.parametrize("narrow", [{"fp8": "hybrid"}, {"fp4": "e2m1"}])
def test_products_that_need_other_token_counts_are_refused(narrow):
    (name,) = narrow
    with pytest.raises(UserError, match=rf"model\.megatron\.{name} is .*, and a micro-batch has as many as its sequences; remove it"):
        te_config(**narrow)
    te_config(fp8=None)


def test_overlap_whose_buffers_nobody_makes_is_refused():
    with pytest.raises(UserError, match=r"model\.megatron\.tp_comm_overlap is True, which is not supported: .*buffers.*; remove it"):
        te_config(tp_comm_overlap=True)


def test_transformer_engine_has_one_attention_before_the_run(monkeypatch):
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    assert te_config().attention_backend is AttnBackend.fused
    assert te_config(attention_backend="flash").attention_backend is AttnBackend.flash
    assert te_config(attention_backend="unfused", dtype=torch.float32).attention_backend is AttnBackend.unfused
    for backend in ("auto", "local"):
        with pytest.raises(UserError, match=f"attention_backend is {backend}, .* set it to fused"):
            te_config(attention_backend=backend)
    with pytest.raises(UserError, match=r"model\.dtype is float32, but Transformer Engine's fused attention computes bfloat16"):
        te_config(dtype=torch.float32)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    assert te_config().attention_backend is AttnBackend.fused
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    with pytest.raises(UserError, match=r"NVTE_FLASH_ATTN is 1, but .* fused needs 0; unset it"):
        te_config()


def test_the_attention_is_printed_with_its_kernel():
    assert attention_name("torch", {"attention_backend": "flash"}) == "torch"
    assert attention_name("transformer_engine", {}) == "transformer_engine, fused"
    assert attention_name("transformer_engine", {"attention_backend": "flash"}) == "transformer_engine, flash"


@pytest.mark.parametrize("value", [True, "1e-3", [1]])
def test_a_number_is_no_boolean_and_no_text(value):
    with pytest.raises(UserError, match=r"training\.optimizer\.lr is .*: Input should be a valid number"):
        checked_fields("training.optimizer", {"lr": value}, OptimizerConfig)
    assert checked_fields("training.optimizer", {"lr": 1}, OptimizerConfig) == {"lr": 1.0}
