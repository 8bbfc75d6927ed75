"""The tokenizer of a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers.models import BPE, WordLevel, WordPiece
from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

_GENERIC = {"TokenizersBackend": "TokenizersBackend", "PreTrainedTokenizerFast": "TokenizersBackend"}
_QWEN = {"Qwen2Tokenizer": "Qwen2Tokenizer", "Qwen2TokenizerFast": "Qwen2Tokenizer"}
_CLASSES = {"llama": _GENERIC, "glm4_moe": _GENERIC, "qwen3": _GENERIC | _QWEN, "qwen3_moe": _GENERIC | _QWEN}
"""What AutoTokenizer makes of a `model_type` and a `tokenizer_class`. Asking it takes two seconds: it imports modelling code."""


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory, without downloads or its code. Raises UserError."""
    if not path.is_dir():
        raise UserError(f"model.path is {path}, which is not a directory; give a Hugging Face model directory")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        # transformers would make an empty tokenizer from such a directory.
        raise UserError(f"model directory {path} has no tokenizer, needs one of {', '.join(TOKENIZER_FILES)}; copy the model's there")
    try:
        return getattr(transformers, _class_name(path)).from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file can fail in any way in transformers; tokenizers raises Exception itself
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot load a tokenizer from {path} ({reason}); put tokenizer.json and tokenizer_config.json of the model there"
        ) from error


def vocabulary_size(path: Path) -> int | None:
    """Return vocab_size of config.json in the directory `path`; None where unreadable."""
    size = _json_object(path / "config.json").get("vocab_size")
    return size if type(size) is int else None


def model_type(path: Path) -> str | None:
    """Return the model_type of config.json in the directory `path`; None where unreadable."""
    kind = _json_object(path / "config.json").get("model_type")
    return kind if isinstance(kind, str) else None


def check_ends(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Raise UserError unless an end-of-sequence token of the model's vocabulary ends responses."""
    end, size = tokenizer.eos_token_id, vocabulary_size(path)
    if end is None:
        raise UserError(
            f"the tokenizer in {path} has no end-of-sequence token, needs one that ends a response; set eos_token in tokenizer_config.json"
        )
    if size is not None and end >= size:
        raise UserError(
            f"eos_token of the tokenizer in {path} is the token {end}, needs one below vocab_size {size} of config.json; use the tokenizer "
            "of this model"
        )


def unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id for text outside the vocabulary; None without one, as in byte tokenizers."""
    if tokenizer.unk_token_id is not None or not tokenizer.is_fast:
        return tokenizer.unk_token_id
    # The inner model may have an id that the outer file does not name.
    model = tokenizer.backend_tokenizer.model
    unknown = model.unk_token if isinstance(model, BPE | WordLevel | WordPiece) else None
    return None if unknown is None else tokenizer.convert_tokens_to_ids(unknown)


def _class_name(path: Path) -> str:
    """Return the transformers class for this tokenizer: AutoTokenizer where its choice is unknown."""
    model, tokenizer = _json_object(path / "config.json"), _json_object(path / "tokenizer_config.json")
    if "auto_map" in tokenizer:
        return "AutoTokenizer"
    return _CLASSES.get(str(model.get("model_type")), {}).get(str(tokenizer.get("tokenizer_class")), "AutoTokenizer")


def _json_object(file: Path) -> dict[str, Any]:
    """Return the content of `file`, empty where no JSON object; callers report missing fields."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
