"""What TransformerEngine's layers are, of its pinned release under the installed megatron-core: names, marks, and how kernels are asked.

Its Python sources come from the package index and run here with its compiled module replaced by torch (tests/rehearsal). That they also
train to the same numbers is proved in tests/dist/test_te_layouts.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import Sharding, rules, shard

REHEARSAL = Path(__file__).parents[1] / "rehearsal"
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tied": False},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "glm4_moe": {"family": "glm4_moe"},
    "deepseek_v3": {"family": "deepseek_v3"},
}
MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"num_ranks": 1},
    "tp2": {"num_ranks": 2, "tp": 2},
    "tp2 sp": {"num_ranks": 2, **SP},
    "tp4 sp": {"num_ranks": 4, "tp": 4, "sequence_parallel": True},
    "pp2": {"num_ranks": 2, "pp": 2},
    "pp2 vpp2": {"num_ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"num_ranks": 2, "cp": 2},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"num_ranks": 2, "ep": 2},
    "tp2 sp ep2 etp1": {"num_ranks": 2, **SP, "ep": 2, "etp": 1},
    "tp2 sp ep2 etp2": {"num_ranks": 4, **SP, "ep": 2, "etp": 2},
    "tp2 sp pp2 ep2 etp2": {"num_ranks": 8, **SP, "pp": 2, "ep": 2, "etp": 2},
}
LENGTHS = [8, 12, 4]
BOUNDS = {"values": [0, 8, 20, 24], "dtype": "torch.int32"}
Order = dict[str, Any]
Asked = Callable[[list[Order]], list[dict[str, Any]]]


@pytest.fixture
def asked(te_sources: Path, tmp_path: Path) -> Asked:
    """Carries out orders of `te_build` in one process of its own."""

    def ask(orders: list[Order]) -> list[dict[str, Any]]:
        (tmp_path / "orders.json").write_text(json.dumps(orders), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(REHEARSAL / "te_build.py"), te_sources, tmp_path / "orders.json", tmp_path / "results.json"]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert child.returncode == 0, child.stderr[-4000:]
        return list(json.loads((tmp_path / "results.json").read_text(encoding="utf-8")))

    return ask


def test_every_family_is_built_under_every_layout_with_marks_that_fit(asked: Asked, tiny_model: Callable[..., Path]) -> None:
    """The last rank of each, which has other experts, another stage and another shard than the first."""
    orders, names = [], []
    for family, keywords in FAMILIES.items():
        model = str(tiny_model(name=family, layers=4, **keywords))
        layouts = LAYOUTS | EXPERT_LAYOUTS if family in MIXTURES else LAYOUTS
        for layout, topology in layouts.items():
            if family in MIXTURES and layout == "tp2":
                continue  # refused: experts get their tokens sharded over the tensor parallel ranks
            orders.append({"model": model, "topology": topology, "rank": topology["num_ranks"] - 1})
            names.append(f"{family} {layout}")
    results = asked(orders)
    wrong = [f"{name}: {result['error']}" for name, result in zip(names, results, strict=True) if "error" in result]
    for name, order, result in zip(names, orders, results, strict=True):
        wrong += [f"{name}: {problem}" for problem in problems(order, result.get("parameters", {}))]
    assert not wrong, "\n".join(wrong)


def problems(order: Order, parameters: Mapping[str, Any]) -> list[str]:
    """Parameters of a rank whose shape, dtype or marks do not follow from the weight table and the layout."""
    import torch

    topology, spec, found = order["topology"], read_model_spec(Path(order["model"])), []
    for rule in rules(spec):
        parameter = parameters.get(rule.megatron)
        if parameter is None or rule.float32:
            continue
        replicated = rule.sharding is Sharding.REPLICATED
        tp = topology.get("etp", topology.get("tp", 1)) if rule.of_expert else topology.get("tp", 1)
        rows = sum(tensor.shape[0] for tensor in rule.tensors)
        rows = spec.padded_vocab_size(tp) if rule.sharding is Sharding.VOCABULARY else rows
        whole = torch.empty(rows, *rule.tensors[0].shape[1:], device="meta")
        local = shard(rule.sharding, whole, tp_rank=0, tp=tp)
        wanted = {
            "shape": list(local.shape),
            "dtype": "torch.bfloat16",
            "tensor_model_parallel": not replicated,
            "sequence_parallel": topology.get("sequence_parallel", False) and replicated,
            "allreduce": not (rule.of_expert and topology.get("ep", 1) > 1),
        }
        got = {
            **parameter,
            "sequence_parallel": bool(parameter["sequence_parallel"]),
            "allreduce": parameter["allreduce"] is not False,
        }
        found += [f"{rule.megatron}: {name} is {got[name]}, needs {value}" for name, value in wanted.items() if got[name] != value]
    return found or ([] if len(parameters) > 5 else [f"only {len(parameters)} parameters"])


def test_a_forward_pass_asks_the_kernels_for_packed_causal_attention(asked: Asked, tiny_model: Callable[..., Path]) -> None:
    """And for no other: an attention that is not there is an error, never the slow one that has the whole matrix of scores."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    models = {
        "plain": tiny_model(name="plain"),
        "window": tiny_model(name="window", use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "yarn": tiny_model(name="yarn", rope_scaling=yarn),
        "partial": tiny_model(name="partial", family="glm4_moe"),
        "latent": tiny_model(name="latent", family="deepseek_v3"),
    }
    orders = {name: {"model": str(path), "topology": LAYOUTS["one"], "rank": 0, "lengths": LENGTHS} for name, path in models.items()}
    orders["cp2"] = {**orders["plain"], "topology": LAYOUTS["cp2"], "rank": 1}
    # flash-attn is not installed.
    orders["flash"] = {**orders["plain"], "megatron": {"attention_backend": "flash"}}
    results = dict(zip(orders, asked(list(orders.values())), strict=True))
    error = results.pop("flash")["error"]
    assert error.startswith("UserError: Transformer Engine's attention that model.megatron.attention_backend names"), error
    assert not [result["error"] for result in results.values() if "error" in result]
    kernels = {name: result["kernels"] for name, result in results.items()}
    check_context_parallel(kernels.pop("cp2"))
    check_attention({name: arguments["attention"] for name, arguments in kernels.items()})
    assert "rotary" not in kernels.pop("latent"), "this project's latent attention rotates"
    for name, arguments in kernels.items():
        rotary = arguments["rotary"]
        assert (rotary["cu_seqlens"], rotary["interleaved"], rotary["cp_size"], rotary["cp_rank"]) == (BOUNDS, False, 1, 0), name
        assert rotary["angles"]["dtype"] == "torch.float32" and rotary["angles"]["shape"][-1] == (8 if name == "partial" else 16), name


def check_attention(attentions: dict[str, dict[str, Any]]) -> None:
    """The arguments of cuDNN's attention, by model."""
    for name, attention in attentions.items():
        wanted = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal", "dropout": 0.0, "max_seqlen_q": 12, "max_seqlen_kv": 12}
        assert {key: attention[key] for key in wanted} == wanted, name
        assert attention["cu_seqlens_q"] == attention["cu_seqlens_kv"] == attention["cu_seqlens_q_padded"] == BOUNDS, name
        assert attention["q"]["dtype"] == "torch.bfloat16", name
        assert attention["window_size"] == ([4, 0] if name == "window" else [-1, 0]), name
    scales = {name: attention["attn_scale"] for name, attention in attentions.items()}
    yarn_factor = 0.1 * 1.3862943611198906 + 1
    assert scales == pytest.approx({"plain": 0.25, "window": 0.25, "yarn": 0.25 * yarn_factor**2, "partial": 0.25, "latent": 24**-0.5})
    plain, latent = ([attentions[name][tensor]["shape"] for tensor in "qkv"] for name in ("plain", "latent"))
    assert plain == [[24, 4, 16], [24, 2, 16], [24, 2, 16]]
    assert latent == [[24, 4, 24], [24, 4, 24], [24, 4, 12]]


def check_context_parallel(kernels: dict[str, dict[str, Any]]) -> None:
    """Ranks give the whole lengths, and their own place among the ranks."""
    rotary, attention = kernels["rotary"], kernels["attention over ranks"]
    assert (rotary["cu_seqlens"], rotary["cp_size"], rotary["cp_rank"]) == (BOUNDS, 2, 1)
    assert (attention["cu_seqlens_q"], attention["cu_seqlens_q_padded"], attention["max_seqlen_q"]) == (BOUNDS, BOUNDS, 12)
    wanted = {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "softmax_scale": 0.25,
        "cp_comm_type": "p2p",
        "use_fused_attention": True,
    }
    assert {name: attention[name] for name in wanted} == wanted
    assert (attention["cp_group"], attention["q"]["shape"]) == ({"group of": 2}, [12, 4, 16])
