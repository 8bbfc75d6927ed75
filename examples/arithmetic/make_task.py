"""Makes the arithmetic task: a tiny Qwen3 model with random weights, its tokenizer, and the problem files.

    python examples/arithmetic/make_task.py DIRECTORY [--seed N]

All 10,000 additions of two numbers from 00 to 99 are shuffled by the seed. 500 of them are held out: they are in
`held_out.jsonl` and in no other file. The rest are in `train.jsonl`.

`supervised.jsonl` is the work of a teacher who often forgets to carry. It has each training problem five times: three times
the teacher adds digit by digit without any carry (`57+68=` gives `015`), twice correctly (`125`). Where nothing is to be carried (30 % of
the problems) both rules agree, so 42 % of all rows are wrong. A policy trained on it knows both rules and, being
asked for its most likely answer, mostly gives the wrong one. Which rule is right is what the reward tells it later.

    DIRECTORY/model/              config.json, model.safetensors, tokenizer.json, ...   0.7 M parameters
    DIRECTORY/supervised.jsonl    47,500 rows  {"prompt": "57+68=", "response": "015"}
    DIRECTORY/train.jsonl          9,500 rows  {"prompt": "57+68=", "label": "125"}
    DIRECTORY/held_out.jsonl         500 rows  {"prompt": "31+08=", "label": "039"}
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

NUM_HELD_OUT = 500
FORGETFUL_COPIES, CORRECT_COPIES = 3, 2
CHARACTERS = "0123456789+="
END, PADDING = "<end>", "<pad>"

Problem = tuple[int, int]


def prompt(problem: Problem) -> str:
    """The question, such as `07+45=`."""
    return f"{problem[0]:02d}+{problem[1]:02d}="


def correct_answer(problem: Problem) -> str:
    """The sum, three digits."""
    return f"{problem[0] + problem[1]:03d}"


def forgetful_answer(problem: Problem) -> str:
    """The sum of one who adds each pair of digits and drops what is to be carried, three digits."""
    tens = (problem[0] // 10 + problem[1] // 10) % 10
    return f"{10 * tens + (problem[0] + problem[1]) % 10:03d}"


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(training problems, held-out problems), without overlap, in an order given by the seed."""
    problems = [(left, right) for left in range(100) for right in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and the end of a response."""
    vocabulary = {token: index for index, token in enumerate([*CHARACTERS, END, PADDING])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PADDING))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of three layers and hidden size 128, randomly initialised."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        # Three times the usual scale, which is meant for wider models; with 0.02 the warm start takes twice as many steps.
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_task(directory: Path, seed: int) -> None:
    """Write the model, its tokenizer and the three problem files; `directory` appears only when all of it is complete."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    train, held_out = split_problems(seed)
    write_rows(partial / "train.jsonl", ({"prompt": prompt(problem), "label": correct_answer(problem)} for problem in train))
    write_rows(partial / "held_out.jsonl", ({"prompt": prompt(problem), "label": correct_answer(problem)} for problem in held_out))
    supervised = [{"prompt": prompt(problem), "response": forgetful_answer(problem)} for problem in train] * FORGETFUL_COPIES
    supervised += [{"prompt": prompt(problem), "response": correct_answer(problem)} for problem in train] * CORRECT_COPIES
    write_rows(partial / "supervised.jsonl", supervised)

    disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    model.save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    partial.rename(directory)

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    wrong = sum(forgetful_answer(problem) != correct_answer(problem) for problem in train) * FORGETFUL_COPIES / len(supervised)
    print(f"{directory}: {num_parameters:,} parameters, {len(train):,} training and {len(held_out)} held-out problems,")
    print(f"{len(supervised):,} supervised rows, {wrong:.0%} of them wrong")


def main() -> None:
    """Read the command line and make the task, once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to put it; made if missing")
    parser.add_argument("--seed", type=int, default=1, help="of the split and of the weights")
    arguments = parser.parse_args()
    if arguments.directory.exists():
        parser.exit(message=f"{arguments.directory} is there already\n")
    make_task(arguments.directory, arguments.seed)


if __name__ == "__main__":
    main()
