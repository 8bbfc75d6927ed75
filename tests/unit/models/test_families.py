"""What the table of families claims is what tests show."""

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import transformers
from layout_table import CASES, DENSE_FAMILIES, LAYOUTS, MODELS, QUANTISED, SYNCED
from packaging.version import Version

from megatron_rl.cli import main
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import resolve_attention
from megatron_rl.models.families import family_table
from megatron_rl.models.families.family_table import FAMILIES, REFUSED
from megatron_rl.models.read_spec import parse_model_spec, read_model_spec

MODELS_OF_FAMILIES = (*DENSE_FAMILIES, "mixtral", "gpt_oss", "qwen3_moe", "glm4_moe")
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_local_experts",
)
SIZES += ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings")
SIZES += ("first_k_dense_replace", "n_group", "topk_group", "n_routed_experts", "n_shared_experts", "routed_scaling_factor")
README = Path(family_table.__file__).with_name("README.md")


@pytest.fixture
def architecture(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """The architecture of `tiny_model(**config)`."""

    def find(**config: object) -> str:
        path = tiny_model(name=f"model-{len(list(tmp_path.iterdir()))}", hidden=8, **config)
        return str(json.loads((path / "config.json").read_text())["architectures"][0])

    return find


def test_what_is_proved_is_what_tests_show(architecture):
    shown: dict[str, set[str]] = {name: set() for name in FAMILIES}
    named = {name: architecture(**config) for name, config in MODELS.items()}
    for case in CASES:
        shown[named[case.model]] |= LAYOUTS[case.layout].topology.keys() & {"tp", "pp", "cp", "ep"}
    for family in SYNCED:
        shown[architecture(family=family)].add("sync")
    for family in QUANTISED:
        shown[architecture(family=family)].add("quantised source")
    assert shown == {name: set(family.proved) for name, family in FAMILIES.items()}


def test_the_table_in_the_docs_is_the_one_that_is_printed(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    table, rest = printed.split("\n\nNo sync into SGLang on a CPU:\n")
    assert len(table.splitlines()) == len(FAMILIES) + 2 and "\n\nRefused:\n" in rest
    assert table in README.read_text(encoding="utf-8"), f"write this into {README}:\n{table}"
    assert all(f"{name}: {reason}" in printed for name, reason in REFUSED.items())
    assert "rope type dynamic: SGLang turns sequences of every length by one base" in printed
    documented = README.read_text(encoding="utf-8").replace("\n  ", " ")
    for name, family in FAMILIES.items():
        assert (family.not_synced is None) == ("sync" in family.proved), f"{name} needs a proof or a reason"
        if family.not_synced is not None:
            line = f"{name}: {family.not_synced}"
            assert line in printed and f"- {line}" in documented, f"write this into {README}:\n- {line}"


@pytest.mark.parametrize("family", MODELS_OF_FAMILIES)
def test_defaults_of_absent_keys_are_those_of_transformers(family, tiny_model):
    """Sizes are in every file; what else a file leaves out means what it means to transformers."""
    given = json.loads((tiny_model(family=family) / "config.json").read_text())
    kept = {key: value for key, value in given.items() if key in ("architectures", "model_type") or key in SIZES}
    spec = parse_model_spec(kept, origin="config.json")
    config = transformers.AutoConfig.for_model(**{key: value for key, value in kept.items() if key != "architectures"})
    rope = config.rope_parameters
    full, window = (rope["full_attention"], rope["sliding_attention"]) if "full_attention" in rope else (rope, rope)
    assert (spec.norm_epsilon, spec.rotary.theta, spec.tie_embeddings) == (
        config.rms_norm_eps,
        full["rope_theta"],
        config.tie_word_embeddings,
    )
    assert spec.rotary.kind == full["rope_type"] and spec.activation_limit == getattr(config, "swiglu_limit", None)
    assert spec.window_rotary is None or spec.window_rotary.theta == window["rope_theta"]
    assert spec.rotary_dim == int(spec.head_dim * full.get("partial_rotary_factor", 1.0))
    assert spec.sliding_window == (config.sliding_window if hasattr(config, "sliding_window") else None)
    assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert spec.softmax_scale == (config.query_pre_attn_scalar**-0.5 if hasattr(config, "query_pre_attn_scalar") else None)
    assert family not in ("glm", "glm4", "glm4_moe") or spec.qkv_bias == config.attention_bias
    assert family != "glm4_moe" or spec.qk_norm == config.use_qk_norm
    types = getattr(config, "layer_types", None)
    if types and spec.sliding_window:
        assert spec.sliding_layers == tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_unknown_key_is_an_error_in_every_family(architecture):
    with pytest.raises(UserError, match=f"has the key planted = 1, whose effect on {architecture} is not known"):
        parse_model_spec({"architectures": [architecture], "planted": 1}, origin="config.json")


@pytest.mark.parametrize("family", ("gemma3", "olmo3"))
@pytest.mark.parametrize(
    "spelling",
    (
        {"partial_rotary_factor": 0.5},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 5e5},
            }
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5},
                "sliding_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
            }
        },
    ),
)
def test_families_that_rotate_by_layer_rotate_all_channels(family, spelling, tiny_model):
    given = json.loads((tiny_model(family=family) / "config.json").read_text())
    with pytest.raises(UserError, match=r"sets partial_rotary_factor to 0\.5, needs 1\.0, because this family rotates all"):
        parse_model_spec(given | spelling, origin="config.json")


def test_refusals_name_the_release_that_packs_gated_delta_nets():
    source = Path(importlib.util.find_spec("megatron.core.ssm.gated_delta_net").origin).read_text()
    refuses = "GDN does not support packed sequence" in source
    assert refuses == (Version(importlib.metadata.version("megatron-core")) < Version("0.18"))
    assert all("from release 0.18 on" in REFUSED[name] for name in REFUSED if name.startswith("Qwen3"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_architectures_are_refused_with_the_reason(name):
    assert name not in FAMILIES
    with pytest.raises(UserError, match="cannot be trained: ") as refusal:
        parse_model_spec({"architectures": [name]}, origin="config.json")
    assert REFUSED[name] in str(refusal.value)


@pytest.mark.parametrize("family", ("glm", "glm4", "olmo2", "olmo3", "gemma3", "gpt_oss"))
def test_what_transformer_engine_does_not_compute_is_refused(family, tiny_model):
    spec = read_model_spec(tiny_model(family=family))
    choice = partial(resolve_attention, spec=spec, overrides={}, cp=1, capability=(9, 0), installed=True)
    with pytest.raises(UserError, match=r"not with Transformer Engine; set model\.attention=torch"):
        choice("transformer_engine")
    assert choice("auto") == "torch"
