"""The tokenizer of a Hugging Face directory."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local directory; nothing is downloaded and no code of the directory is run.

    Raises UserError when the directory or its tokenizer is missing or broken.
    """
    if not path.is_dir():
        raise UserError(f"model directory {path} does not exist; give the path of a Hugging Face directory as model.path")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        # transformers would make an empty tokenizer of it.
        raise UserError(f"model directory {path} has no tokenizer, needs one of {', '.join(TOKENIZER_FILES)}; copy the model's there")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot load a tokenizer from {path} ({reason}); put tokenizer.json and tokenizer_config.json of the model there"
        ) from error
