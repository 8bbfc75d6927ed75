"""The tokenizer of a Hugging Face directory."""

import json
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

_GENERIC = {"TokenizersBackend": "TokenizersBackend", "PreTrainedTokenizerFast": "TokenizersBackend"}
_QWEN = {"Qwen2Tokenizer": "Qwen2Tokenizer", "Qwen2TokenizerFast": "Qwen2Tokenizer"}
_CLASSES = {"llama": _GENERIC, "glm4_moe": _GENERIC, "qwen3": _GENERIC | _QWEN, "qwen3_moe": _GENERIC | _QWEN}
"""What AutoTokenizer makes of a `model_type` and a `tokenizer_class`. Asking it takes two seconds: it imports modelling code."""


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local directory; nothing is downloaded and no code of the directory is run.

    Raises UserError when the directory or its tokenizer is missing or broken.
    """
    if not path.is_dir():
        raise UserError(f"model.path is {path}, which is not a directory; give a Hugging Face model directory")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        # transformers would make an empty tokenizer of it.
        raise UserError(f"model directory {path} has no tokenizer, needs one of {', '.join(TOKENIZER_FILES)}; copy the model's there")
    try:
        return getattr(transformers, _class_name(path)).from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot load a tokenizer from {path} ({reason}); put tokenizer.json and tokenizer_config.json of the model there"
        ) from error


def _class_name(path: Path) -> str:
    """The class of transformers that reads this tokenizer: AutoTokenizer wherever it is not known what that would choose."""
    try:
        model, tokenizer = (json.loads((path / name).read_text("utf-8")) for name in ("config.json", "tokenizer_config.json"))
        if "auto_map" in tokenizer:
            return "AutoTokenizer"
        return _CLASSES[model["model_type"]][tokenizer["tokenizer_class"]]
    except (OSError, ValueError, KeyError, TypeError):
        return "AutoTokenizer"
