"""Every setting against values that no consumer can use: each is refused with a sentence, or it is fine and survives a dump."""

import math
from typing import Any

import pytest

from megatron_rl.config.load import apply_overrides, dump_settings, parse_yaml, validate_settings
from megatron_rl.config.section import MAX_INTEGER
from megatron_rl.config.settings_reference import setting_fields
from megatron_rl.errors import UserError

SMALLEST: dict[str, Any] = {"run": {"directory": "runs/x"}, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
ODD = (
    *(".inf", "-.inf", ".nan", "-1", "0", "1e400", "1e300", "1e-300", str(10**20), str(10**500), str(2**31)),
    *("[.inf]", "[.nan]", "[1e300]", "[-1]", f"[{10**500}]"),
    *('""', "[]", "{}", "'~nobodyhere/x'", '"a\\0b"', '"\\ud800"', "true", "null", "é漢", "[[]]", "{a: 1}"),
)
FIELDS = [field.path for field in setting_fields()]
KINDS = {field.path: field.kinds for field in setting_fields()}
"""Kinds of a choice that have a setting as argument, one of which has to be chosen for it to be taken."""
MAPPINGS = [path for path in FIELDS if path.rpartition(".")[2] in ("megatron", "sglang", "optimizer", "ddp")]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize("path", FIELDS)
def test_odd_values_are_refused_in_words_or_kept(path: str) -> None:
    chosen = []
    for kind in KINDS[path][:1]:
        chosen = [f"{path.rpartition('.')[0]}.kind={kind}"]
    for text in ODD:
        try:
            settings = validate_settings(apply_overrides(SMALLEST, [*chosen, f"{path}={text}"]), origin="test")
        except UserError as error:
            assert path.split(".")[0] in str(error) or "JSON" in str(error) or "YAML" in str(error), str(error)
            continue
        dumped = parse_yaml(dump_settings(settings), origin="dump")
        assert validate_settings(dumped, origin="dump") == settings, f"{path}={text} is lost in a dump"
        assert all(math.isfinite(number) and -1 <= number <= MAX_INTEGER for number in numbers(dumped)), f"{path}={text} passes"


@pytest.mark.parametrize("path", MAPPINGS)
@pytest.mark.parametrize("value", [".inf", "inf", "-Infinity", ".nan", "NaN", "1e400", str(10**20), "[.inf]", "{b: .nan}"])
def test_numbers_of_upstream_fields_are_finite(path: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"{path}\.a.* is .*, needs an? "):
        validate_settings(apply_overrides(SMALLEST, [f"{path}.a={value}"]), origin="test")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["run.seed=2147483647", "rollout.num_engines=3"], "set run.seed to 1431655764 or less"),
        (["data.prompts_per_step=2147483647", "training.optimizer_steps_per_batch=3"], "more than 2147483647; lower data.prompts_per_step"),
        (["run.num_steps=2147483647", "training.optimizer_steps_per_batch=2"], "lower run.num_steps"),
        (["rollout.sampling.temperature=1e-7"], "needs a number >= 0.01"),
        (["model.deadline_s=1e300"], "needs a number >= 0.001, <= 31622400"),
        (["run.directory="], "run.directory is null"),
        (['run.directory="  "'], "run.directory is empty, needs a path"),
    ],
)
def test_sizes_that_no_consumer_takes(overrides: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        validate_settings(apply_overrides(SMALLEST, overrides), origin="test")
    assert part in str(caught.value), str(caught.value)


def test_the_largest_seed_reaches_the_last_engine() -> None:
    settings = validate_settings(apply_overrides(SMALLEST, ["run.seed=1431655764", "rollout.num_engines=3"]), origin="test")
    assert settings.run.seed * 3 + 2 < 2**32 <= (settings.run.seed + 1) * 3 + 2
    with pytest.raises(UserError, match=r"1431655765 .* \+ 2 = 4294967297 is the seed of the last engine.* to 1431655764 or less"):
        validate_settings(apply_overrides(SMALLEST, ["run.seed=1431655765", "rollout.num_engines=3"]), origin="test")


def test_home_directories_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    paths = [path for path in FIELDS if path in ("run.directory", "model.path", "model.teacher", "data.train")]
    settings = validate_settings(apply_overrides(SMALLEST, [f"{path}=~/x" for path in paths]), origin="test")
    for path in paths:
        section, name = path.split(".")
        assert str(settings.model_dump()[section][name]) == "/somewhere/x"
