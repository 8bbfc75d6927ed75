"""Scores a checkpoint on problems with plain transformers: neither Megatron nor SGLang takes part.

    python examples/arithmetic/score.py CHECKPOINT PROBLEMS.jsonl

Prints the share of problems whose most likely answer (greedy decoding) is the label.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

MAX_RESPONSE_TOKENS = 4


def greedy_accuracy(checkpoint: Path, problems: Path) -> float:
    """Share of the problems of the file whose greedy answer is the label, in [0, 1]."""
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.inference_mode():
        sequences = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_RESPONSE_TOKENS, pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer == row["label"] for row, answer in zip(rows, answers, strict=True)) / len(rows)


def main() -> None:
    """Read the command line and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="Hugging Face directory")
    parser.add_argument("problems", type=Path, help="JSON lines with prompt and label")
    arguments = parser.parse_args()
    print(f"greedy accuracy {greedy_accuracy(arguments.checkpoint, arguments.problems):.3f}")


if __name__ == "__main__":
    main()
