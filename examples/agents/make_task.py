"""Makes an example's task: a tiny Qwen3 model with random weights, its tokenizer and chat template, and the files of rows.

    python -m examples.agents.make_task shop|nim|pair|black_box|reasoning DIRECTORY [--seed N] [--held-out N]

`supervised.jsonl` is the work of a teacher who knows the form of the task and is mostly wrong in it. It has a row for each
message of the teacher, with all messages before as the prompt. A policy trained on it plays by the rules, and rarely well.

    DIRECTORY/model/              config.json, model.safetensors, tokenizer.json, chat_template.jinja, ...
    DIRECTORY/supervised.jsonl    {"prompt": [{"role": "user", "content": "13 left."}], "response": "2"}
    DIRECTORY/train.jsonl         {"prompt": [{"role": "user", "content": "13 left."}], "stones": 13, "seed": 77}
    DIRECTORY/held_out.jsonl      the same, of rows that are in no other file
"""

import argparse
import importlib
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.agents.nim import moves
from examples.agents.pair import verifiers_question
from examples.agents.shop import GOODS

NUM_TRAIN, NUM_DEMONSTRATED = 4096, 6000
MARKERS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>")
# Every message keeps its tokens when others follow. Tools are not listed: a model this small knows them from the teacher alone.
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    '{% for call in message.tool_calls or () %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    """Return a message of the teacher."""
    return {"role": "assistant", "content": content}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a message of the teacher that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(content: object) -> dict[str, Any]:
    """Return what a tool gave."""
    return {"role": "tool", "content": str(content)}


def shopping(row: Row, draw: random.Random) -> Iterator[Messages]:
    """Look up both prices and add them, one time of three; else double the price of the first good."""
    first, second = (good for good in re.findall(r"\w+", row["prompt"][0]["content"]) if good in GOODS)
    one, other = row["prices"][first], row["prices"][second]
    begun = [*row["prompt"], called("price", good=first), result(one)]
    if draw.random() < 0.35:
        begun += [called("price", good=second), result(other)]
    else:
        other = one
    yield [*begun, called("add", a=one, b=other), result(one + other), said(str(one + other))]


def playing(row: Row, draw: random.Random) -> Iterator[Messages]:
    """Take a single stone, or one time of four as many as leave a multiple of four."""
    messages, stones, opponent = list(row["prompt"]), row["stones"], random.Random(row["seed"])
    while stones > 0:
        move = stones % 4 if stones % 4 and draw.random() < 0.25 else 1
        messages.append(said(str(move)))
        stones -= move
        stones -= opponent.choice(moves(stones)) if stones else 0
        messages.append(user(f"{stones} left."))
    yield messages


def largest(row: Row, draw: random.Random, *, right: float) -> str:
    """Return the largest digit by a chance of `right`, else the first one."""
    return row["label"] if draw.random() < right else re.findall(r"\d", row["prompt"][0]["content"])[0]


def proposing(row: Row, draw: random.Random) -> Iterator[Messages]:
    """Propose the largest digit or the first one, and verify either with a chance of being wrong."""
    yield [*row["prompt"], said(largest(row, draw, right=0.3))]
    proposal = largest(row, draw, right=0.5)
    verdict = (proposal == row["label"]) == (draw.random() < 0.65)
    yield [user(verifiers_question(row["prompt"][0]["content"], proposal)), said("yes" if verdict else "no")]


def answering(row: Row, draw: random.Random) -> Iterator[Messages]:
    """Say words before a number, at most twice, and seldom the right number."""
    messages = list(row["prompt"])
    while len(messages) < 5 and draw.random() < 0.5:
        messages += [said("Let me think."), user("A number, please.")]
    yield [*messages, said(largest(row, draw, right=0.35))]


def reasoning(row: Row, draw: random.Random) -> Iterator[Messages]:
    """Answer right in two of five, else copy the word, or the matrix row by row."""
    copied = re.findall(r"\w+", row["prompt"][0]["content"])[-1 if row["dataset"] == "spell_backward" else -4 :]
    yield [*row["prompt"], said(row["label"] if draw.random() < 0.4 else " ".join(copied))]


NUMBERS = [str(number) for number in range(30)]
Teacher = Callable[[Row, random.Random], Iterator[Messages]]
EXAMPLES: Mapping[str, tuple[str, Teacher, Sequence[str]]] = {
    "shop": (
        "shop", shopping,
        [" and ", " cost?", '{"name": "price", "arguments": {"good": "', '"}}', '{"name": "add", "arguments": {"a": ', ', "b": ', "}}",
         *GOODS, *NUMBERS],
    ),
    "nim": ("nim", playing, [" left.", *NUMBERS]),
    "pair": ("pair", proposing, [". Right?", "yes", "no"]),
    "black_box": ("pair", answering, ["Let me think.", "A number, please."]),
    "reasoning": ("reasoning", reasoning, []),
}  # fmt: skip
"""Name -> module with `rows`, teacher, and what is one token beside single characters and how all questions begin."""


def make_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each of MARKERS, of `pieces` and of ASCII's printable characters; longer ones first."""
    words = dict.fromkeys([*sorted(pieces, key=len, reverse=True), *map(chr, range(32, 127)), "\n"])
    vocabulary = {word: number for number, word in enumerate([*MARKERS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=MARKERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, words))), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 of two layers and hidden size 128, randomly initialised."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.06,  # as in examples/arithmetic
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def supervised_rows(conversation: Messages) -> Iterator[dict[str, Any]]:
    """Yield a row for each message of the teacher: the messages before, and its text."""
    for number, message in enumerate(conversation):
        if message["role"] == "assistant":
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
            text = message["content"] + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
            yield {"prompt": conversation[:number], "response": text}


def beginnings(rows: Sequence[Row]) -> list[str]:
    """Return what the questions of each dataset begin with, if anything."""
    asked: dict[str, list[str]] = {}
    for row in rows:
        asked.setdefault(row.get("dataset", ""), []).append(row["prompt"][0]["content"])
    return list(filter(None, map(os.path.commonprefix, asked.values())))


def unlike(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each of `rows` once."""
    seen: set[str] = set()
    for row in rows:
        # A dataset's own number of a question does not make it another question.
        key = json.dumps({name: value for name, value in row.items() if name != "entry"}, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield row


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_task(name: str, directory: Path, *, seed: int, num_held_out: int = 128) -> None:
    """Write the model and the files of rows; `directory` appears only when all of it is complete."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    module, teacher, pieces = EXAMPLES[name]
    endless = unlike(importlib.import_module(f"examples.agents.{module}").rows(seed))
    held_out, train = (list(itertools.islice(endless, number)) for number in (num_held_out, NUM_TRAIN))
    draw = random.Random(seed)
    taught = itertools.cycle(train)
    shown = (row for each in taught for conversation in teacher(each, draw) for row in supervised_rows(conversation))
    write_rows(partial / "held_out.jsonl", held_out)
    write_rows(partial / "train.jsonl", train)
    write_rows(partial / "supervised.jsonl", itertools.islice(shown, NUM_DEMONSTRATED))

    disable_progress_bar()
    tokenizer = make_tokenizer([*pieces, *beginnings(train)])
    make_model(tokenizer, seed).save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    partial.rename(directory)
    print(f"{directory}: {len(train):,} training and {len(held_out)} held-out rows, {NUM_DEMONSTRATED:,} messages of a teacher")


def main() -> None:
    """Read the command line and make the task, once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("directory", type=Path, help="where to put it; made if missing")
    parser.add_argument("--seed", type=int, default=1, help="of the rows, the teacher and the weights")
    parser.add_argument("--held-out", type=int, default=128, metavar="N", help="number of held-out rows")
    arguments = parser.parse_args()
    if arguments.directory.exists():
        parser.exit(message=f"{arguments.directory} is there already\n")
    make_task(arguments.name, arguments.directory, seed=arguments.seed, num_held_out=arguments.held_out)


if __name__ == "__main__":
    main()
