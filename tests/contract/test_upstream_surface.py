"""What is relied on of every pinned release of megatron-core and SGLang, against what the installed ones have and what is used here.

A release that differs from the file of its version in tests/data/upstream fails with a sentence for each difference. A new release gets a
file: `python tests/rehearsal/upstream_surface.py megatron-core FOLDER > tests/data/upstream/megatron-core-VERSION.json`.
"""

import ast
import json
import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from upstream_surface import TARGETS, Surface, changes, surface

from megatron_rl.rollout.server_args import CPU_DEFAULTS, GPU_DEFAULTS, RECORD_ROUTING
from megatron_rl.versions import known_releases

RECORDED = Path(__file__).parents[1] / "data" / "upstream"
PACKAGE = Path(__file__).parents[2] / "megatron_rl"
PINNED = sorted(
    {
        f"{release.distribution}-{release.version}"
        for python in ((3, 10), (3, 11), (3, 12))
        for release in known_releases("cuda", python=python)
        if release.distribution in TARGETS
    }
)
# Keywords of a call here -> the target that takes them, in every pinned release.
CALLS = {
    "initialize_model_parallel": "megatron/core/parallel_state.py:initialize_model_parallel",
    "get_megatron_optimizer": "megatron/core/optimizer/__init__.py:get_megatron_optimizer",
    "clip_grad_by_total_norm_fp32": "megatron/core/optimizer/clip_grads.py:clip_grad_by_total_norm_fp32",
    "OptimizerParamScheduler": "megatron/core/optimizer_param_scheduler.py:OptimizerParamScheduler.__init__",
    "DistributedDataParallel": "megatron/core/distributed/distributed_data_parallel.py:DistributedDataParallel.__init__",
    "gather_from_sequence_parallel_region": "megatron/core/tensor_parallel/mappings.py:gather_from_sequence_parallel_region",
    "PolicyModel": "megatron/core/models/gpt/gpt_model.py:GPTModel.__init__",
    "PackedSequences": "megatron/core/packed_seq_params.py:PackedSeqParams",
}
OWN = {"PackedSequences": {"positions", "make_lengths", "make_plan"}}
# Fields of requests that rollout/client.py writes.
REQUESTS = {
    "GenerateReqInput": {"input_ids", "rid", "sampling_params", "return_logprob", "logprob_start_len", "stream"},
    "PauseGenerationReqInput": {"mode"},
    "ReleaseMemoryOccupationReqInput": {"tags"},
    "ResumeMemoryOccupationReqInput": {"tags"},
    "BeginWeightUpdateReqInput": {"selector"},
    "InitWeightsUpdateGroupReqInput": {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"},
    "DestroyWeightsUpdateGroupReqInput": {"group_name"},
    "UpdateWeightsFromDistributedReqInput": {"names", "dtypes", "shapes", "group_name", "flush_cache", "load_format", "weight_version"},
    "UpdateWeightFromDiskReqInput": {"model_path", "flush_cache", "weight_version"},
    "CheckWeightsReqInput": {"action"},
}


def recorded(release: str) -> Surface:
    return dict(json.loads((RECORDED / f"{release}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", TARGETS)
def test_the_installed_release_is_as_it_was_read(name: str) -> None:
    installed = distribution(name)
    release = f"{name}-{installed.version}"
    assert (RECORDED / f"{release}.json").is_file(), f"{release} has no file in {RECORDED}; make it as this file's first lines say"
    differences = changes(name, recorded(release), surface(name, Path(str(installed.locate_file("")))))
    assert not differences, "\n".join(differences)


def test_every_pinned_release_has_been_read() -> None:
    assert sorted(path.stem for path in RECORDED.glob("*.json")) == PINNED


@pytest.mark.parametrize("release", [release for release in PINNED if release.startswith("megatron-core")])
def test_megatron_takes_what_is_passed_to_it(release: str) -> None:
    taken = recorded(release)
    missing = [f"{release} has no {target}" for target in taken if not taken[target] and not target.endswith("_set_attention_backend")]
    calls = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else name
            if name in CALLS and isinstance(node, ast.Call):
                calls += 1
                passed = {keyword.arg for keyword in node.keywords if keyword.arg is not None} - OWN.get(name, set())
                missing += [
                    f"{release}: {CALLS[name]} takes no {word}, which {path.name} passes" for word in passed - {*taken[CALLS[name]]}
                ]
    assert calls >= len(CALLS)
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize("release", [release for release in PINNED if release.startswith("sglang")])
def test_sglang_takes_what_is_sent_to_it(release: str) -> None:
    taken = recorded(release)
    fields = {target.rpartition(":")[2]: set(names) for target, names in taken.items()}
    missing = [f"{release}: {name} has no {field}" for name, wanted in REQUESTS.items() for field in sorted(wanted - fields[name])]
    set_here = {*CPU_DEFAULTS, *GPU_DEFAULTS, RECORD_ROUTING, *_owned_arguments()}
    missing += [f"{release}: the server has no argument {name}" for name in sorted(set_here - set(taken["arguments of the server"]))]
    assert not missing, "\n".join(missing)


def _owned_arguments() -> set[str]:
    source = (PACKAGE / "rollout" / "server_args.py").read_text(encoding="utf-8")
    block = re.search(r"owned: dict\[str, Any\] = \{(.*?)\n    \}", source, re.DOTALL)
    assert block is not None, "server_arguments keeps what it sets in `owned`"
    return set(re.findall(r'"(\w+)":', block[1]))


def test_a_change_is_told_in_a_sentence() -> None:
    target = "megatron/core/parallel_state.py:initialize_model_parallel"
    assert changes("megatron-core", {target: ["a", "b"]}, {target: ["b", "c"]}) == [
        f"megatron-core: {target} lost a and gained c: look at megatron_rl/training/topology.py"
    ]
    assert "in another order" in changes("megatron-core", {target: ["a", "b"]}, {target: ["b", "a"]})[0]
    assert changes("megatron-core", {target: ["a"]}, {target: ["a"]}) == []
