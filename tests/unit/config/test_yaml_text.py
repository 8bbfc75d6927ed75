import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.load import parse_yaml
from megatron_rl.config.yaml_text import by_path, format_value, format_yaml
from megatron_rl.errors import UserError

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
"""Ten billion values in ten lines."""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("2E5", 2e5),
        ("-.5", -0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("012", 12),
        ("12:30", "12:30"),
        ("off", "off"),
        ("yes", "yes"),
        ("2026-01-02", "2026-01-02"),
        ("true", True),
        ("", None),
        ("~", None),
        ("[a, 1, 0.5]", ["a", 1, 0.5]),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    parsed = parse_yaml(text, origin="test")
    assert parsed == value
    assert type(parsed) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_yaml(".nan", origin="test"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run:\n  seed: [1\nmodel: 2\n", ["file.yaml, line 3"]),
        ("run:\n  seed: 1\n  seed: 2\n", ["file.yaml, line 3", 'duplicate key "seed"']),
        ("1: x\n", ["file.yaml", "key 1 is not a string", "put quotes"]),
        ("a: !!set {b}\n", ["file.yaml", "type set", "write it as text"]),
        ("a: 1\n---\nb: 2\n", ["file.yaml, line 2", "another document"]),
        ("a: &a [*a]\n", ["file.yaml", "more than 10000 values", "aliases"]),
        (ALIASES, ["file.yaml", "more than 10000 values", "aliases"]),
        ("a: " + "9" * 5000, ["file.yaml", "4300 digits"]),
        ("a: !!python/object:os.system x\n", ["line 1", "could not determine a constructor"]),
        ("a: \x00", ["file.yaml", "not valid YAML"]),
        ("a: *x\n", ["line 1", "undefined alias"]),
    ],
)
def test_bad_text_is_told_with_its_line(text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_yaml(text, origin="file.yaml")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_merge_keys_work() -> None:
    assert parse_yaml("a: &base {x: 1, y: 2}\nb:\n  <<: *base\n  y: 3\n", origin="test") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=3), max_leaves=8
)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.text(min_size=1, max_size=6), _values, max_size=4))
def test_text_is_read_back_to_the_same_value(value: dict[str, object]) -> None:
    assert parse_yaml(format_yaml(value), origin="test") == value


def test_keys_keep_their_order_and_shared_values_are_written_out() -> None:
    shared = [1]
    assert format_yaml({"b": shared, "a": shared}) == "b:\n- 1\na:\n- 1\n"


@settings(deadline=None, max_examples=40)
@given(_scalars)
def test_one_value_is_read_back_too(value: object) -> None:
    assert parse_yaml(format_value(value), origin="test") == value


@pytest.mark.parametrize(
    ("value", "text"), [(0.2, "0.2"), (1e-6, "1e-06"), ("cosine", "cosine"), ([], "[]"), (None, "null"), ("1e-6", "'1e-6'")]
)
def test_one_value_looks_as_on_the_command_line(value: object, text: str) -> None:
    assert format_value(value) == text


def test_values_by_their_dotted_paths() -> None:
    assert by_path({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}
