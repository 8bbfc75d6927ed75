"""Odd rows of a data file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.cli import main

Refuse = Callable[..., str]


def test_the_inputs_are_odd_by_what_the_tests_change(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0, capsys.readouterr().err
    assert "Check passed" in capsys.readouterr().out


GOOD_ROW = '{"prompt": "1+1=", "label": "2"}'
ROWS: list[tuple[str, bytes | str, list[str]]] = [
    ("nested", '{"prompt": "1+1=", "tree": ' + "[" * 900 + "]" * 900 + "}", ["rows.jsonl:2", "'tree'", "more than 64 levels", "flatten"]),
    ("bottomless", '{"prompt": "1+1=", "tree": ' + '{"a":' * 10**5 + "1" + "}" * 10**5 + "}", ["rows.jsonl:2", "nested in more than 64"]),
    ("half a character in a prompt", r'{"prompt": "1+\ud800=", "label": "2"}', ["rows.jsonl:2: 'prompt'", "lone surrogate", "UTF-8"]),
    ("half a character in a label", r'{"prompt": "1+1=", "label": "\udfff"}', ["rows.jsonl:2: 'label'", "lone surrogate"]),
    ("half a character in a message", r'{"prompt": [{"role": "user", "content": "\ud83d"}]}', ["rows.jsonl:2: 'prompt'", "surrogate"]),
    ("half a character in a name", r'{"prompt": "1+1=", "a\ud800": 1}', ["rows.jsonl:2", "lone surrogate"]),
    ("half a character in metadata", r'{"prompt": "1+1=", "info": {"by": ["\ud800"]}}', ["rows.jsonl:2: 'info'", "lone surrogate"]),
    ("label of 4,300 digits", f'{{"prompt": "1+1=", "label": {"9" * 4300}}}', ["rows.jsonl:2: 'label'", "bits", "write it as a string"]),
    ("label of 5,000 digits", f'{{"prompt": "1+1=", "label": {"9" * 5000}}}', ["rows.jsonl:2", "4300 digits"]),
    ("label nan", '{"prompt": "1+1=", "label": NaN}', ["rows.jsonl:2: 'label' is nan", "write it as a string"]),
    ("label infinite", '{"prompt": "1+1=", "label": -1e999}', ["rows.jsonl:2: 'label' is -inf"]),
    ("label a list", '{"prompt": "1+1=", "label": ["2"]}', ["rows.jsonl:2: 'label' is ['2']", "a string or a number"]),
    ("key twice", '{"prompt": "1+1=", "label": "2", "label": "3"}', ["rows.jsonl:2", "'label' appears twice", "keep the one"]),
    ("key twice inside", '{"prompt": "1+1=", "info": {"by": 1, "by": 2}}', ["rows.jsonl:2", "'by' appears twice"]),
    ("unknown text", '{"prompt": "漢字", "label": "2"}', ["rows.jsonl:2", "all tokens of the prompt are 0", "tokenizer"]),
    ("no prompt", '{"label": "2"}', ["rows.jsonl:2", "no field 'prompt'", "only 'label'", "data.prompt_key"]),
    ("null prompt", '{"prompt": null}', ["rows.jsonl:2", "'prompt' is null", "chat messages"]),
    ("empty prompt", '{"prompt": ""}', ["rows.jsonl:2", "no tokens"]),
    ("long prompt", json.dumps({"prompt": "1" * 17}), ["rows.jsonl:2", "17 tokens, the limit is 16", "data.max_prompt_tokens"]),
    ("prompt a number", '{"prompt": 11}', ["rows.jsonl:2", "'prompt' is 11", "a string, a list of chat messages"]),
    ("no messages", '{"prompt": []}', ["rows.jsonl:2", "'prompt' is []"]),
    ("message without content", '{"prompt": [{"role": "user"}]}', ["rows.jsonl:2", "'role' and 'content'"]),
    ("chat without template", '{"prompt": [{"role": "user", "content": "1"}]}', ["rows.jsonl:2", "no chat template"]),
    ("a list", '["1+1="]', ["rows.jsonl:2", "JSON list", "needs an object"]),
    ("cut off", '{"prompt": "1+1=', ["rows.jsonl:2", "not a JSON object", "column"]),
    ("two objects", GOOD_ROW + GOOD_ROW, ["rows.jsonl:2", "Extra data", "each line needs one complete object"]),
    ("latin-1", '{"prompt": "1+1=", "label": "é"}'.encode("latin-1"), ["rows.jsonl:2", "not UTF-8", "save the file as UTF-8"]),
    ("utf-16", GOOD_ROW.encode("utf-16"), ["rows.jsonl:2", "UTF-8"]),
    ("binary", b"\x1f\x8b\x08\x00\x00\x00", ["rows.jsonl:2", "UTF-8"]),
    ("response a number", '{"prompt": "1+1=", "response": 2}', ["rows.jsonl:2", "'response' has type int", "a string"]),
]


@pytest.mark.parametrize(("line", "parts"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_rows(line: bytes | str, parts: list[str], words: list[str], tmp_path: Path, refuse: Refuse) -> None:
    odd = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "rows.jsonl").write_bytes(GOOD_ROW.encode() + b"\n" + odd + b"\n")
    assert len(refuse(words, *parts)) < 1000


def test_a_held_out_file_that_is_a_link_to_itself(words: list[str], tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    refuse([*words, f"eval.sets.held_out={tmp_path / 'loop.jsonl'}"], "loop.jsonl does not exist")
