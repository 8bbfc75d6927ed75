"""What TransformerEngine's layers are, of every pinned pair with megatron-core: names, marks, and how kernels are asked.

The Python sources come from the package index and run here with TransformerEngine's compiled module replaced by torch (tests/rehearsal).
That they also train to the same numbers is proved in tests/dist/test_te_layouts.py.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from te_sources import ALLOWED, NEWEST, PAIRS, Pair

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import Sharding, rules, shard
from megatron_rl.system.versions import installed_version
from tests.tiny_families import FAMILIES

REHEARSAL = Path(__file__).parents[1] / "rehearsal"
NOT_ON_TE = {
    "glm": "rotated pairs of neighbouring channels",
    "glm4": "norms behind attention and MLP",
    "olmo2": "norms behind attention and MLP",
    "olmo3": "norms behind attention and MLP",
    "gemma3": "norms behind attention and MLP",
    "gpt_oss": "attention sinks",
}
"""Why a family runs on torch's layers alone."""
SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"num_ranks": 1},
    "tp2": {"num_ranks": 2, "tp": 2},
    "tp2 sp": {"num_ranks": 2, **SP},
    "tp4 sp": {"num_ranks": 4, "tp": 4, "sequence_parallel": True},
    "pp2": {"num_ranks": 2, "pp": 2},
    "pp2 vpp2": {"num_ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"num_ranks": 2, "cp": 2},
    "tp2 sp pp2 cp2": {"num_ranks": 8, **SP, "pp": 2, "cp": 2},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"num_ranks": 2, "ep": 2},
    "tp2 sp ep2 etp1": {"num_ranks": 2, **SP, "ep": 2, "etp": 1},
    "tp2 sp ep2 etp2": {"num_ranks": 4, **SP, "ep": 2, "etp": 2},
    "tp2 sp pp2 ep2 etp2": {"num_ranks": 8, **SP, "pp": 2, "ep": 2, "etp": 2},
}
LENGTHS = [8, 12, 4]
BOUNDS = {"values": [0, 8, 20, 24], "dtype": "torch.int32"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# Models whose forward pass is run, beside one of every family.
VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "yarn": {"rope_scaling": YARN},
}
Order = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one process with a pair found: the layers of every family and layout, and the kernels that forward passes asked for."""

    pair: Pair
    versions: Mapping[str, str]
    built: Mapping[tuple[str, str], tuple[Order, Mapping[str, Any]]]
    forwards: Mapping[str, Mapping[str, Any]]
    printed: str


@pytest.fixture(scope="module", params=[*PAIRS, *(pytest.param(pair, marks=[pytest.mark.slow]) for pair in ALLOWED)], ids=str)
def rehearsal(
    request: pytest.FixtureRequest,
    te_sources: Callable[[Pair], tuple[str, ...]],
    written_models: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Rehearsal:
    """All orders, carried out by `te_build` in one process. The last rank of each layout has other experts, another stage and another
    shard than the first.
    """
    directory = tmp_path_factory.mktemp("rehearsal")
    models = {family: str(written_models(family=family, layers=4)) for family in FAMILIES}
    variants = {name: str(written_models(layers=4, **options)) for name, options in VARIANTS.items()}
    built = {
        (family, layout): {"model": model, "topology": topology, "rank": topology["num_ranks"] - 1}
        for family, model in models.items()
        for layout, topology in (LAYOUTS | (EXPERT_LAYOUTS if spec_of(model).moe else {})).items()
    }
    forwards = {
        name: {"model": model, "topology": LAYOUTS["one"], "rank": 0, "lengths": LENGTHS}
        for name, model in (models | variants).items()
        if name not in NOT_ON_TE
    }
    forwards["cp2"] = {**forwards["qwen3"], "topology": LAYOUTS["cp2"], "rank": 1}
    # Apex is not installed.
    forwards["flash"] = {**forwards["qwen3"], "megatron": {"attention_backend": "flash"}}
    forwards["apex"] = {**forwards["qwen3"], "megatron": {"gradient_accumulation_fusion": True}}
    found, printed = carry_out([*built.values(), *forwards.values()], directory, sources=te_sources(request.param))
    results = found["results"]
    return Rehearsal(
        pair=request.param,
        versions=found["versions"],
        built={key: (order, result) for (key, order), result in zip(built.items(), results[: len(built)], strict=True)},
        forwards=dict(zip(forwards, results[len(built) :], strict=True)),
        printed=printed,
    )


def carry_out(
    orders: Sequence[Order], directory: Path, *, sources: Sequence[str], capability: Sequence[int] = (9, 0)
) -> tuple[dict[str, Any], str]:
    """Return the results of `te_build` on a GPU of this capability, and the text that it printed."""
    asked = {"sources": sources, "capability": capability, "orders": orders}
    (directory / "orders.json").write_text(json.dumps(asked), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(REHEARSAL / "te_build.py"), directory / "orders.json", directory / "results.json"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    found: dict[str, Any] = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    return found, child.stdout + child.stderr


@cache
def spec_of(model: str) -> ModelSpec:
    return read_model_spec(Path(model))


def test_the_pair_is_what_ran(rehearsal: Rehearsal) -> None:
    assert rehearsal.versions["megatron-core"] == rehearsal.pair.megatron_core
    assert rehearsal.versions["transformer-engine"] == rehearsal.pair.transformer_engine


def test_nothing_is_printed_at_every_build(rehearsal: Rehearsal) -> None:
    lines = [line for line in rehearsal.printed.splitlines() if line.strip()]
    assert len(lines) < 20, rehearsal.printed


def test_every_family_fits_every_layout_or_is_refused(rehearsal: Rehearsal) -> None:
    wrong = []
    for (family, layout), (order, result) in rehearsal.built.items():
        sentence = refusal(family, order)
        if sentence is not None:
            found = [] if result.get("error") == f"UserError: {sentence}" else [f"{result.get('error')}, needs to be refused: {sentence}"]
        else:
            found = [result["error"]] if "error" in result else problems(order, result["parameters"])
        wrong += [f"{family} {layout}: {problem}" for problem in found]
    assert not wrong, "\n".join(wrong)


def refusal(family: str, order: Order) -> str | None:
    """The sentence that refuses a family under a layout, None where TransformerEngine has both."""
    spec, topology = spec_of(order["model"]), order["topology"]
    if family in NOT_ON_TE:
        return f"the checkpoint has {NOT_ON_TE[family]}, not with Transformer Engine; set model.attention=torch"
    if spec.moe and topology.get("tp", 1) > 1 and not topology.get("sequence_parallel", False):
        return (
            f"training.topology.tp is {topology['tp']} without sequence parallelism, but experts get their tokens sharded over the tensor "
            "parallel ranks; set training.topology.sequence_parallel to true"
        )
    if spec.sliding_layers and topology.get("cp", 1) > 1:
        return (
            f"the checkpoint has sliding windows and training.topology.cp is {topology['cp']}, which Transformer Engine does not compute "
            "for packed sequences; set model.attention=torch, or cp to 1"
        )
    return None


def problems(order: Order, parameters: Mapping[str, Any]) -> list[str]:
    """Parameters of a rank whose shape, dtype or marks do not follow from the weight table and the layout."""
    import torch

    topology, spec, found = order["topology"], spec_of(order["model"]), []
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


def test_a_forward_pass_requests_packed_causal_attention(rehearsal: Rehearsal) -> None:
    """And for no other: an attention that is not there is an error, never the slow one that has the whole matrix of scores."""
    results = dict(rehearsal.forwards)
    error = results.pop("flash")["error"]
    # The GPU stack has the kernels of the newest, which want a real GPU.
    has_kernels = installed_version("flash-attn-4") is not None and rehearsal.pair.transformer_engine == PAIRS[-1].transformer_engine
    wanted = "UserError: Transformer Engine's attention that model.megatron.attention_backend names"
    assert error.startswith("AssertionError: Only SM" if has_kernels else wanted), error
    fused = results.pop("apex")["error"]
    assert re.search(r"UserError: model\.megatron\.gradient_accumulation_fusion is True, .* Apex .* not installed; remove it", fused), fused
    assert not {name: result["error"] for name, result in results.items() if "error" in result}
    kernels = {name: result["kernels"] for name, result in results.items()}
    check_context_parallel(kernels.pop("cp2"))
    check_attention({name: arguments["attention"] for name, arguments in kernels.items()})
    assert "rotary" not in kernels.pop("deepseek_v3"), "this project's latent attention rotates"
    rotated = {"glm4_moe": 8, "phi3": 12}
    for name, arguments in kernels.items():
        rotary = arguments["rotary"]
        assert (rotary["cu_seqlens"], rotary["interleaved"], rotary["cp_size"], rotary["cp_rank"]) == (BOUNDS, False, 1, 0), name
        assert rotary["angles"]["dtype"] == "torch.float32" and rotary["angles"]["shape"][-1] == rotated.get(name, 16), name


def check_attention(attentions: dict[str, dict[str, Any]]) -> None:
    """The arguments of cuDNN's attention, by model."""
    windows = {"window": 5, "mistral": 48, "ministral": 48, "phi3": 70}
    for name, attention in attentions.items():
        wanted = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal", "dropout": 0.0, "max_seqlen_q": 12, "max_seqlen_kv": 12}
        assert {key: attention[key] for key in wanted} == wanted, name
        assert attention["cu_seqlens_q"] == attention["cu_seqlens_kv"] == attention["cu_seqlens_q_padded"] == BOUNDS, name
        assert attention["q"]["dtype"] == "torch.bfloat16", name
        assert attention["window_size"] == [windows[name] - 1 if name in windows else -1, 0], name
    yarn_factor = 0.1 * 1.3862943611198906 + 1
    scales = {"yarn": 0.25 * yarn_factor**2, "deepseek_v3": 24**-0.5}
    assert {name: attention["attn_scale"] for name, attention in attentions.items()} == pytest.approx(
        {name: scales.get(name, 0.25) for name in attentions}
    )
    plain, latent = ([attentions[name][tensor]["shape"] for tensor in "qkv"] for name in ("qwen3", "deepseek_v3"))
    assert plain == [[24, 4, 16], [24, 2, 16], [24, 2, 16]]
    assert latent == [[24, 4, 24], [24, 4, 24], [24, 4, 8]], "megatron-core 0.18 and newer would pad the values"


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


FUSED = {(8, 0): (), (9, 0): ("latent", "wide"), (10, 0): ("latent",)}
DEEPSEEK_HEADS = {"family": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_each_gpu_has_an_attention_that_trains_there(
    capability: tuple[int, int],
    te_sources: Callable[[Pair], tuple[str, ...]],
    written_models: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Of DeepSeek-V3's heads and of heads of 256 channels, chosen for the GPU and asked for."""
    wide = {"num_attention_heads": 4, "head_dim": 256}
    models = [str(written_models(layers=4, **options)) for options in (DEEPSEEK_HEADS, wide)]
    orders = [
        {"model": model, "attention": attention, "topology": LAYOUTS["one"], "rank": 0, "lengths": LENGTHS}
        for model in models
        for attention in ("auto", "transformer_engine")
    ]
    found, _ = carry_out(orders, tmp_path, sources=te_sources(NEWEST), capability=capability)
    latent, latent_asked, wide_heads, wide_asked = found["results"]
    assert "error" not in latent and "error" not in wide_heads, found["results"]
    fused = [answer in FUSED[capability] for answer in ("latent", "wide")]
    assert ["attention" in result["kernels"] for result in (latent, wide_heads)] == fused
    for asked, trains, heads in ((latent_asked, fused[0], "192 .* 128"), (wide_asked, fused[1], "256 .* 256")):
        assert ("error" not in asked) == trains, asked
        needed = rf"heads of {heads} .* {capability[0]}\.{capability[1]}; set model\.attention=torch, or .*flash"
        assert trains or re.search(needed, asked["error"]), asked["error"]
