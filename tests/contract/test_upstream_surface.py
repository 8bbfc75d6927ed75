"""What is relied on of every pinned release of megatron-core and SGLang, against what the installed ones have and what is used here.

A release that differs from the file of its version in tests/data/upstream fails with a sentence for each difference. A new release gets a
file: `python tests/rehearsal/upstream_surface.py megatron-core FOLDER > tests/data/upstream/megatron-core-VERSION.json`.
"""

import ast
import asyncio
import contextlib
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest
from upstream_surface import ARGUMENTS, ROUTES, TARGETS, VARIABLES, Surface, changes, own_variables, surface

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.engines import client as engine_client
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import OWNED, OWNED_PREFIXES, RECORD_ROUTING, server_arguments
from megatron_rl.errors import EngineError
from megatron_rl.system.versions import known_releases
from megatron_rl.weights.ipc import handle_of

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "upstream"
PACKAGE = ROOT / "megatron_rl"
PINNED = sorted(
    {
        f"{release.distribution}-{release.version}"
        for python in ((3, 11), (3, 12))
        for release in known_releases("cuda", python=python)
        if release.distribution in TARGETS
    }
)
SGLANG_RELEASES = [release for release in PINNED if release.startswith("sglang")]
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
# Every call of the engines' client, with arguments that make it write all that it ever writes.
IDS = np.arange(2, 5)
MADE_CALLS: dict[str, list[dict[str, Any]]] = {
    "generate": [
        {"token_ids": IDS, "sampling": Sampling(max_tokens=1, entropy=entropy)} for entropy in (None, EntropyAware(thresholds=(1, 1)))
    ],
    "score": [{"sequences": [IDS]}],
    "load": [{}],
    "abort": [{"request_ids": ["a"]}],
    "abort_all": [{}],
    "pause": [{"mode": "abort"}],
    "resume": [{}],
    "flush_cache": [{}],
    "release_memory": [{"parts": ["weights"]}],
    "restore_memory": [{"parts": ["weights"]}],
    "weight_version": [{}],
    "begin_weight_update": [{}],
    "end_weight_update": [{}],
    "join_group": [{"address": "h", "port": 1, "rank_offset": 1, "world_size": 2, "name": "n", "backend": "nccl"}],
    "leave_group": [{"name": "n"}],
    "receive_bucket": [{"names": [], "dtypes": [], "shapes": [], "group": "n", "version": 1}],
    "take_bucket": [{"handles": ["h"], "version": 1}],
    "load_weights": [{"path": Path("p"), "version": 1}],
    "checksums": [{}],
    "order": [{"step": "begin", "num_ranks": 1}, {"step": "end", "num_ranks": 1, "expected": {}, "holds": "here/1", "version": 1}],
}
ANSWERS = {"/model_info": {"weight_version": "1"}, "/weights_checker": {"ranks": [{"checksums": {}}]}}


@dataclass
class Recorder:
    """In the place of the client's connections: what is sent, as (method, path, body)."""

    sent: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    async def __call__(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        self.sent.append((method, path, body or {}))
        if path == "/generate":
            raise EngineError("nobody generates")
        return ANSWERS.get(path)


@pytest.fixture(scope="module")
def sent() -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, fields and their values) of every request that is made to a server."""
    client = EngineClient(EngineAddress("http://h", "key", 100, 100, 100, has_tokenizer=True), request_timeout_s=1.0)
    recorder = client._call = Recorder()  # type: ignore[assignment]

    async def call_all() -> None:
        for name, all_arguments in MADE_CALLS.items():
            for arguments in all_arguments:
                with contextlib.suppress(EngineError):
                    await getattr(client, name)(**arguments)

    asyncio.run(call_all())
    asked = re.findall(r'"(/\w[\w/]*)"', (PACKAGE / "engines" / "engine.py").read_text(encoding="utf-8"))
    assert "/server_info" in asked, "what the start of an engine asks"
    return [*recorder.sent, *(("GET", path, {}) for path in asked)]


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


def test_every_call_of_the_client_is_made_here(sent: list[tuple[str, str, dict[str, Any]]]) -> None:
    public = {name for name, value in vars(EngineClient).items() if inspect.iscoroutinefunction(value) and not name.startswith("_")}
    assert MADE_CALLS.keys() == public
    written = set[str]()
    for node in ast.walk(parsed(engine_client)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in ("EngineClient", "_version"):
            written |= set(_keys(node))
    fields = {name for _, _, body in sent for name in body} | {name for _, _, body in sent for name in _sampling(body)}
    assert len(written) > 20
    assert written - {"Content-Type"} <= fields, "no call here makes the client write these"


def parsed(thing: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


def _keys(tree: ast.AST) -> Iterator[str]:
    """String keys of all mappings that are written down, and of what is set in them later."""
    for node in ast.walk(tree):
        keys = node.keys if isinstance(node, ast.Dict) else []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a request's first sample."""
    given = body.get("sampling_params", {})
    return dict(given[0] if isinstance(given, list) else given)


@pytest.mark.parametrize("release", SGLANG_RELEASES)
def test_sglang_takes_what_is_sent_to_it(release: str, sent: list[tuple[str, str, dict[str, Any]]]) -> None:
    assert refused(release, recorded(release), sent) == []


def refused(release: str, taken: Surface, sent: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """A sentence for each route, field and parameter of `sent` requests that the server of `release` does not have."""
    fields = {target.rpartition(":")[2]: set(names) for target, names in taken.items()}
    routes = {path: (methods.split(","), dict(one.split(":") for one in rest)) for path, methods, *rest in map(str.split, taken[ROUTES])}
    missing = []
    for method, url, body in sent:
        path, _, query = url.partition("?")
        methods, parameters = routes.get(path, ([], {}))
        if method not in methods:
            missing.append(f"{release}: no {method} at {path}")
            continue
        missing += [f"{release}: {path} takes no {name} in its query" for name in dict(parse_qsl(query)) if name not in parameters]
        known = fields.get(parameters.get("obj", ""), set())
        missing += [f"{release}: {parameters.get('obj', path)} has no {name}" for name in body if name not in known]
        missing += [f"{release}: SamplingParams has no {name}" for name in _sampling(body) if name not in fields["SamplingParams"]]
    return missing


def test_what_a_server_does_not_take_is_told(sent: list[tuple[str, str, dict[str, Any]]]) -> None:
    taken = recorded(SGLANG_RELEASES[-1])
    without: Surface = {name: list(values) for name, values in taken.items()}
    requests = "sglang/srt/managers/io_struct.py"
    for target, name in (
        (f"{requests}:UpdateWeightFromDiskReqInput", "load_format"),
        (f"{requests}:UpdateWeightsFromTensorReqInput", "serialized_named_tensors"),
        (f"{requests}:GenerateReqInput", "return_routed_experts"),
        ("sglang/srt/sampling/sampling_params.py:SamplingParams", "sampling_seed"),
    ):
        without[target].remove(name)
    without[ROUTES] = [route.replace("timeout", "patience") for route in without[ROUTES] if not route.startswith("/ready ")]
    assert sorted(set(refused("it", without, sent))) == [
        "it: /flush_cache takes no timeout in its query",
        "it: GenerateReqInput has no return_routed_experts",
        "it: SamplingParams has no sampling_seed",
        "it: UpdateWeightFromDiskReqInput has no load_format",
        "it: UpdateWeightsFromTensorReqInput has no serialized_named_tensors",
        "it: no GET at /ready",
    ]


def server_argument_names() -> set[str]:
    """All that is ever set, by whatever an engine is."""
    flags = ("needs_tokenizer", "records_routing", "colocated", "has_weights")
    names = set[str]()
    for kind, short, deterministic, *values in itertools.product(("cpu", "cuda"), *[(False, True)] * (2 + len(flags))):
        names |= server_arguments(
            {"enable_deterministic_inference": deterministic},
            model_path=Path("m"),
            device_kind=str(kind),
            dtype="float32",
            seed=0,
            max_prompt_tokens=1 if short else None,
            **dict(zip(flags, map(bool, values), strict=True)),
        ).keys()
    return names | {"host", "port", "api_key"}


@pytest.mark.parametrize("release", SGLANG_RELEASES)
def test_sglang_has_the_arguments_and_variables_that_are_set(release: str) -> None:
    taken, names = recorded(release), server_argument_names()
    written = set(_keys(parsed(server_arguments))) | {RECORD_ROUTING}
    assert {"enable_memory_saver", "load_format", "disable_radix_cache", "attention_backend"} | written <= names
    by_hand = {name for folder in ("examples", "megatron_rl/doctor") for path in (ROOT / folder).rglob("*") for name in _by_hand(path)}
    assert {"mem_fraction_static", "max_total_tokens"} <= by_hand
    missing = sorted((names | by_hand) - set(taken[ARGUMENTS]))
    assert missing == [], f"{release}: the server has no such arguments"
    unread = sorted(own_variables() - set(taken[VARIABLES]))
    assert unread == [], f"{release}: the server reads no such variables"


def _by_hand(path: Path) -> Iterator[str]:
    """Arguments of the server in a file: rollout.sglang.NAME, below `sglang:`, and what the trial of a node sets."""
    if path.suffix not in (".sh", ".yaml", ".md", ".py"):
        return
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r"rollout\.sglang\.(\w+)", text)
    for block in re.findall(r"sglang: *\{([^}]*)\}", text):
        yield from re.findall(r"(\w+):", block)
    for block in re.findall(r"\barguments\b.*= *\{(.*)\}", text) if path.name == "trial.py" else ():
        yield from re.findall(r'"(\w+)":', block)


def test_each_argument_that_is_refused_is_one_of_some_release() -> None:
    known = set[str]().union(*(recorded(release)[ARGUMENTS] for release in SGLANG_RELEASES))
    assert sorted(set(OWNED) - known) == []
    assert [prefix for prefix in OWNED_PREFIXES if not any(name.startswith(prefix) for name in known)] == []


@pytest.mark.parametrize("release", SGLANG_RELEASES)
def test_a_shared_bucket_is_described_as_sglang_does(release: str) -> None:
    written = set(_keys(parsed(handle_of)))
    described = {word.arg for node in ast.walk(parsed(handle_of)) if isinstance(node, ast.Call) for word in node.keywords}
    names = (written | described) - {"flattened_tensor", "metadata", None}
    assert names == set(recorded(release)["sglang/srt/weight_sync/tensor_bucket.py:FlattenedTensorMetadata"])


def test_a_change_is_told_in_a_sentence() -> None:
    target = "megatron/core/parallel_state.py:initialize_model_parallel"
    assert changes("megatron-core", {target: ["a", "b"]}, {target: ["b", "c"]}) == [
        f"megatron-core: {target} lost a and gained c: look at megatron_rl/training/topology.py"
    ]
    assert "in another order" in changes("megatron-core", {target: ["a", "b"]}, {target: ["b", "a"]})[0]
    assert changes("megatron-core", {target: ["a"]}, {target: ["a"]}) == []
