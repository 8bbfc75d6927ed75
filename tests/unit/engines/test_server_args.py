import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.engines.server_args import (
    LOGIT_PROCESSOR,
    OWNED,
    OWNED_ENVIRONMENT,
    OWNED_PREFIXES,
    ROUTER,
    check_environment,
    check_release,
    field_types,
    server_arguments,
    validate_server_args,
)
from megatron_rl.errors import UserError


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_total_tokens": 1024, "disable_radix_cache": True, "schedule_policy": "lpm", "mem_fraction_static": 0.5},
        {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True},
        {"mem_fraction_static": 1, "context_length": None, "lora_target_modules": ["q_proj"]},
    ],
)
def test_arguments_of_the_installed_server_are_accepted(arguments: dict[str, object]) -> None:
    validate_server_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_total_token": 5}, "rollout.sglang.max_total_token is not .*did you mean rollout.sglang.max_total_tokens"),
        ({"max_total_tokens": "many"}, "rollout.sglang.max_total_tokens is 'many', needs another type: expected `int | null`, got `str`"),
        ({"max_total_tokens": 1.5}, "expected `int | null`, got `float`"),
        ({"disable_radix_cache": 1}, "expected `bool`, got `int`"),
        ({"schedule_policy": "fastest"}, "is 'fastest', needs one of .*lpm"),
        ({"port": 3000}, "rollout.sglang.port is 3000 but cannot be set here: each engine takes a free port"),
        ({"node_rank": 1}, "rollout.sglang.node_rank is 1 but cannot be set here: each server of an engine on several nodes"),
        (
            {"dist_init_addr": "10.0.0.1:5000"},
            "dist_init_addr is .* the servers of an engine meet at a free port of its first node; remove it",
        ),
        ({"dtype": "float16"}, "model.dtype sets it"),
        ({"preferred_sampling_params": '{"min_new_tokens": 9}'}, "it adds to what rollout.sampling says"),
        ({"enable_custom_logit_processor": True}, "drawn from the policy's own distribution"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm is 'NGRAM' but cannot be set here: a draft model"),
        ({"watermark_default_enabled": True}, "drawn from the policy's own distribution"),
        ({"dp_size": 2}, "dp_size is 2, which would put 2 copies .* remove it and raise rollout.num_engines"),
        ({"json_model_override_args": "{}"}, "the trainer builds its model from config.json alone"),
    ],
)
def test_what_the_server_would_not_take_is_one_sentence(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("|", r"\|")):
        validate_server_args(arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("sglang", "rollout.sglang.router is 'sglang', needs a mapping of RouterArgs's fields"),
        ({"cache_treshold": 0.5}, "rollout.sglang.router.cache_treshold is not .*did you mean rollout.sglang.router.cache_threshold"),
        ({"cache_threshold": "half"}, "rollout.sglang.router.cache_threshold is 'half', needs another type: expected `float`"),
        ({"api_key": "mine"}, "rollout.sglang.router.api_key is 'mine' but cannot be set here, where a run needs policy, .*remove it"),
        ({"policy": "random"}, "rollout.sglang.router.policy is 'random', needs cache_aware: with others the router does not count"),
    ],
)
def test_what_a_router_would_not_take_is_one_sentence(fields: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class RouterArgs:
        policy: str
        cache_threshold: float
        api_key: str | None

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sglang_router.router_args", types.SimpleNamespace(RouterArgs=RouterArgs))
        validate_server_args({ROUTER: {"cache_threshold": 0.5}, "max_total_tokens": 1024})
        with pytest.raises(UserError, match=message.replace("|", r"\|")):
            validate_server_args({ROUTER: fields})


def test_a_missing_router_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_router.router_args", None)
    with pytest.raises(UserError, match=r"but sglang_router.router_args is not installed; pip install sglang-router==0.3.2, or remove"):
        validate_server_args({ROUTER: {}})


@pytest.mark.parametrize("name", OWNED_ENVIRONMENT)
def test_variables_that_change_draws_or_reports_are_refused(name: str) -> None:
    check_environment({"PATH": "/bin"})
    with pytest.raises(UserError, match=f"the environment has {name}=1, which the engines would follow: .*; unset it"):
        check_environment({"PATH": "/bin", name: "1"})


def test_the_installed_server_still_has_what_is_refused() -> None:
    from sglang.srt.environ import envs

    assert all(any(field.startswith(prefix) for field in field_types()) for prefix in OWNED_PREFIXES)
    assert set(OWNED_ENVIRONMENT) <= set(dir(type(envs)))


def make_arguments(user: dict[str, object], *, device_kind: str = "cpu", **options: Any) -> dict[str, object]:
    return server_arguments(user, model_path=Path("/model"), device_kind=device_kind, dtype="float32", seed=3, **options)


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_everything_that_is_sent_exists_in_the_installed_server(device_kind: str) -> None:
    assert set(make_arguments({}, device_kind=device_kind)) <= set(field_types())
    assert set(OWNED) <= set(field_types())


def test_a_server_imports_processors_for_entropy_aware_runs_alone() -> None:
    assert LOGIT_PROCESSOR not in make_arguments({}) and make_arguments({}, shapes_logits=True)[LOGIT_PROCESSOR] is True


def test_the_user_overrides_defaults() -> None:
    assert make_arguments({})["max_total_tokens"] == 32768
    assert make_arguments({"max_total_tokens": 100})["max_total_tokens"] == 100
    assert make_arguments({"tp_size": 1}, device_kind="cuda")["tp_size"] == 1


def test_a_server_without_weights_reads_none() -> None:
    assert "load_format" not in make_arguments({})
    assert make_arguments({"load_format": "auto"}, has_weights=False)["load_format"] == "dummy"


def test_a_deterministic_cpu_server_cuts_no_prompt() -> None:
    arguments = make_arguments({"enable_deterministic_inference": True})
    assert (arguments["attention_backend"], arguments["chunked_prefill_size"]) == ("torch_native", -1)
    assert "attention_backend" not in make_arguments({"enable_deterministic_inference": False})
    assert "attention_backend" not in make_arguments({"enable_deterministic_inference": True}, device_kind="cuda")


def test_a_tokenizer_is_loaded_only_where_stop_strings_need_one() -> None:
    assert make_arguments({})["skip_tokenizer_init"] is True
    assert make_arguments({}, needs_tokenizer=True)["skip_tokenizer_init"] is False


def test_a_server_that_shares_its_gpus_can_release_its_memory() -> None:
    assert "enable_memory_saver" not in make_arguments({}, device_kind="cuda")
    assert make_arguments({}, device_kind="cuda", colocated=True)["enable_memory_saver"] is True
    assert "enable_memory_saver" not in make_arguments({}, colocated=True), "it cannot start with it on a CPU"


@pytest.mark.parametrize(
    ("device_kind", "max_prompt_tokens", "keeps"), [("cpu", 32, False), ("cpu", 33, True), ("cpu", None, True), ("cuda", 32, True)]
)
def test_prefixes_are_kept_where_a_later_request_can_use_them(device_kind: str, max_prompt_tokens: int | None, keeps: bool) -> None:
    arguments = make_arguments({}, device_kind=device_kind, max_prompt_tokens=max_prompt_tokens)
    assert arguments.get("disable_radix_cache", False) is not keeps
    chosen = make_arguments({"disable_radix_cache": keeps}, device_kind=device_kind, max_prompt_tokens=max_prompt_tokens)
    assert chosen["disable_radix_cache"] is keeps, "the user's own choice"


def test_a_value_that_cannot_be_sent_is_one_sentence() -> None:
    with pytest.raises(UserError, match="JSON cannot carry"):
        make_arguments({"max_total_tokens": {1, 2}})


def test_a_release_with_known_holes_is_refused() -> None:
    with pytest.raises(UserError, match=r"SGLang 0\.5\.20\.post1 is installed, needs 0\.5\.21 or later: .*; install a later one"):
        check_release("0.5.20.post1")
    for installed in (None, "0.5.21", "0.5.23", "0.6.0"):
        check_release(installed)
