"""The tokenizer is the one that AutoTokenizer would choose."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.data.tokenizer import load_tokenizer


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "llama", "qwen2"])
@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_the_class_is_that_of_auto_tokenizer(tiny_model: Callable[..., Path], family: str, name: str) -> None:
    path = tiny_model()
    for file, key, value in (("config.json", "model_type", family), ("tokenizer_config.json", "tokenizer_class", name)):
        (path / file).write_text(json.dumps({**json.loads((path / file).read_text()), key: value}))
    expected, got = AutoTokenizer.from_pretrained(path, local_files_only=True), load_tokenizer(path)
    assert type(got) is type(expected)
    assert got("12+3=")["input_ids"] == expected("12+3=")["input_ids"]
    assert (got.eos_token_id, got.pad_token_id) == (expected.eos_token_id, expected.pad_token_id)
