import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.data import source as source_module
from megatron_rl.data.buffer import Buffer, BufferCounts
from megatron_rl.data.position import position_of, rewind
from megatron_rl.data.row_source import OwnRows
from megatron_rl.data.source import PromptSource
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.types import Group, RewardOutcome, Sample

ALPHABET = "0123456789+=.<> abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = {"<eos>": 0} | {letter: index + 1 for index, letter in enumerate(ALPHABET)}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    # Like many released tokenizers it would add a special token to every text.
    core.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=TEMPLATE)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Any:
    return load_tokenizer(tokenizer_path)


def ids_of(text: str) -> list[int]:
    return [ALPHABET.index(letter) + 1 for letter in text]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def open_source(path: Path, tokenizer: Any, *, seed: int = 0, need_response: bool = False, **settings: Any) -> PromptSource:
    return PromptSource(
        [DataFiles(path=path)], tokenizer, settings=DataSettings(train=path, **settings), seed=seed, need_response=need_response
    )


def test_string_prompts_keep_exact_tokens_label_and_fields(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "12+34=", "label": 46, "level": {"x": [1, 2]}}, "", {"prompt": "1+1=", "label": "2"})
    source = open_source(path, tokenizer, shuffle=False)
    first, second = source.next_prompts(2)
    assert (first.id, first.text, first.label, first.metadata) == ("0-0", "12+34=", "46", {"level": {"x": [1, 2]}})
    np.testing.assert_array_equal(first.token_ids, ids_of("12+34="))
    assert (second.id, second.label) == ("0-1", "2")
    assert [prompt.id for prompt in source.all()] == ["eval-0", "eval-1"]
    assert [prompt.text for prompt in source.first(1)] == ["12+34="]
    assert [prompt.id for prompt in source.next_prompts(1)] == ["1-0"]
    state = source.rows.state()
    assert state["taken"] == [3]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chat_messages_take_the_template_without_extra_tokens(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    chats = [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "be kind", "name": "x"}, {"role": "user", "content": "hi"}],
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(path, *({"prompt": chat} for chat in chats))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": chat, "level": 3} for chat in chats]), path)
    first, second = open_source(path, tokenizer, shuffle=False).next_prompts(2)
    assert first.text == "<user>hello<assistant>"
    np.testing.assert_array_equal(first.token_ids, ids_of("<user>hello<assistant>"))
    assert second.text == "<system>be kind<user>hi<assistant>"
    assert first.metadata == ({} if kind == "jsonl" else {"level": 3})


def test_the_template_gets_the_tools_of_a_row(tmp_path: Path, tokenizer_path: Path) -> None:
    chat, tools = [{"role": "user", "content": "1+1"}], [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    path = write(tmp_path / "a.jsonl", {"prompt": chat, "tools": tools})
    tokenizer = load_tokenizer(tokenizer_path)
    with pytest.raises(UserError, match=r"a\.jsonl:1: has 'tools', .* shows the model nothing, needs a template"):
        open_source(path, tokenizer)
    tokenizer.chat_template = "{% for t in tools or [] %}<{{ t['function']['name'] }}>{% endfor %}" + TEMPLATE
    assert open_source(path, tokenizer).next_prompts(1)[0].text == "<add><user>1+1<assistant>"
    # Parquet gives each row the field.
    write(path, {"prompt": chat, "tools": None})
    assert open_source(path, tokenizer).next_prompts(1)[0].text == "<user>1+1<assistant>"


def test_every_epoch_is_a_complete_order_of_the_seed(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": str(row)} for row in range(20)))
    ids = [prompt.id for prompt in open_source(path, tokenizer, seed=1).next_prompts(50)]
    assert len(set(ids)) == 50
    epochs = [[name.split("-")[1] for name in ids if name.startswith(f"{epoch}-")] for epoch in range(3)]
    assert sorted(epochs[0], key=int) == sorted(epochs[1], key=int) == [str(row) for row in range(20)]
    assert epochs[0] != epochs[1] and len(epochs[2]) == 10
    one_by_one = open_source(path, tokenizer, seed=1)
    assert [one_by_one.next_prompts(1)[0].id for _ in range(50)] == ids
    assert [prompt.id for prompt in open_source(path, tokenizer, seed=2).next_prompts(50)] != ids


def test_a_restored_source_goes_on_where_the_other_stopped(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": str(row)} for row in range(7)))
    source = open_source(path, tokenizer)
    for taken in (3, 4, 7, 11):
        source.next_prompts(taken)
        state = json.loads(json.dumps(source.rows.state()))
        other = open_source(path, tokenizer)
        other.rows.restore(state)
        source.all()
        expected = [prompt.id for prompt in source.next_prompts(9)]
        assert [prompt.id for prompt in other.next_prompts(9)] == expected
    with pytest.raises(UserError, match=r"run\.seed is 5, was 0"):
        open_source(path, tokenizer, seed=5).rows.restore(state)
    with pytest.raises(UserError, match=r"data\.shuffle is False, was True"):
        open_source(path, tokenizer, shuffle=False).rows.restore(state)
    write(path, {"prompt": "9"})
    with pytest.raises(UserError, match="cannot resume: content of"):
        open_source(path, tokenizer).rows.restore(state)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1="', r"a\.jsonl:2: not a JSON object \(Expecting ',' delimiter at column \d+\)"),
        ("[1]", r"a\.jsonl:2: is a JSON list, needs an object"),
        ({"promt": "1", "label": "2"}, r"a\.jsonl:2: no field 'prompt', only 'promt', 'label'; name the right one in data\.prompt_key"),
        ({}, r":2: no field 'prompt', only none"),
        ({"prompt": None}, r":2: 'prompt' is null, needs a string or chat messages"),
        ({"prompt": ""}, r":2: the prompt has no tokens"),
        ({"prompt": 7}, r":2: 'prompt' is 7, needs a string, a list of chat messages, or token ids"),
        ({"prompt": []}, r":2: 'prompt' is \[\], needs"),
        ({"prompt": [{"role": "user"}]}, r":2: chat message \{'role': 'user'\} needs the strings"),
        ({"prompt": [{"role": "bad", "content": ""}]}, r":2: the chat template refuses this prompt \(no such role\)"),
        (
            {"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
            r":2: the last message is the assistant's, needs one that the policy answers; remove it, or move it to the field 'response'",
        ),
        ({"prompt": [{"role": "user", "content": "1"}], "tools": "add"}, r":2: 'tools' is 'add', needs a list, or a text of JSON"),
        ({"prompt": "1", "label": [1]}, r":2: 'label' is \[1\], needs a string or a number"),
        ({"prompt": "1", "label": True}, r":2: 'label' is True"),
        ({"prompt": "1", "response": 4}, r":2: 'response' has type int, needs a string"),
        ({"prompt": "123456789"}, r":2: the prompt has 9 tokens, the limit is 8; shorten it, raise data\.max_prompt_tokens"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, tokenizer: Any, line: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1"}, line)
    limit = 8 if "limit is" in message else 100
    with pytest.raises(UserError, match=message):
        open_source(path, tokenizer, max_prompt_tokens=limit)


def test_files_that_cannot_be_read(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl does not exist"):
        open_source(tmp_path / "missing.jsonl", tokenizer)
    with pytest.raises(UserError, match=r"ends in '\.csv', needs \.jsonl, \.json or \.parquet"):
        open_source(write(tmp_path / "a.csv", "prompt"), tokenizer)
    with pytest.raises(UserError, match="has no rows"):
        open_source(write(tmp_path / "empty.jsonl", ""), tokenizer)
    with pytest.raises(UserError, match="is not a parquet file"):
        open_source(write(tmp_path / "a.parquet", "prompt"), tokenizer)
    beyond = pyarrow.table({"prompt": ["1"], "time": pyarrow.array([2**62], pyarrow.timestamp("us"))})
    pyarrow.parquet.write_table(beyond, tmp_path / "beyond.parquet")
    with pytest.raises(UserError, match=r"beyond\.parquet is not a parquet file that can be read, behind row 0"):
        open_source(tmp_path / "beyond.parquet", tokenizer)
    pyarrow.parquet.write_table(pyarrow.table([["1"], ["2"]], names=["prompt", "prompt"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet .*of its columns 'prompt', 'prompt' two have one name"):
        open_source(tmp_path / "twice.parquet", tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "1"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(UserError, match=r"latin\.jsonl:2: not UTF-8"):
        open_source(tmp_path / "latin.jsonl", tokenizer)
    table = pyarrow.table({"prompt": ["1", "2"], "image": [b"x", b"y"]})
    pyarrow.parquet.write_table(table, tmp_path / "image.parquet")
    with pytest.raises(UserError, match=r"image\.parquet:1: 'image' has type bytes"):
        open_source(tmp_path / "image.parquet", tokenizer)


def test_a_label_name_that_no_row_has_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "label": "2", "response": "2"})
    with pytest.raises(UserError, match=r"a.jsonl: no row has the field 'answer'; name the right one in data.label_key"):
        open_source(path, tokenizer, label_key="answer")
    assert len(open_source(path, tokenizer, need_response=True).all()) == 1
    named = write(tmp_path / "b.jsonl", {"prompt": "1+1=", "answer": "2."})
    (group,) = open_source(named, tokenizer, label_key="answer", need_response=True).next_supervised(1)
    assert group.samples[0].response_text == "2."


def test_chat_without_a_template_is_refused(tmp_path: Path, tokenizer_path: Path) -> None:
    bare = load_tokenizer(tokenizer_path)
    bare.chat_template = None
    path = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UserError, match=r":1: the prompt is a chat but the tokenizer has no chat template"):
        open_source(path, bare)


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ 2.0 ** 99999 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_a_template_that_fails_by_itself_is_refused(tmp_path: Path, tokenizer_path: Path, template: str) -> None:
    failing = load_tokenizer(tokenizer_path)
    failing.chat_template = template
    path = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UserError, match=r":1: the chat template refuses this prompt"):
        open_source(path, failing)


def test_lengths_in_a_huge_file_are_checked_at_the_prompt(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_CHECKED_ROWS", 1)
    path = write(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": "123"})
    source = open_source(path, tokenizer, max_prompt_tokens=2, shuffle=False)
    source.next_prompts(1)
    with pytest.raises(UserError, match=r":2: the prompt has 3 tokens"):
        source.next_prompts(1)


def test_supervised_rows_train_on_the_target_and_one_end_token(tmp_path: Path, tokenizer: Any) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "response": "2.", "label": "2"},
        {"prompt": [{"role": "user", "content": "hi"}], "response": "yo<eos>"},
    )
    first, second = open_source(path, tokenizer, shuffle=False, need_response=True).next_supervised(2)
    (sample,) = first.samples
    assert first.id == sample.group_id == sample.prompt.id == "0-0"
    np.testing.assert_array_equal(sample.response_ids, [*ids_of("2."), 0])
    assert sample.response_text == "2."
    assert sample.loss_mask.all() and (sample.weight_versions == -1).all() and (sample.rollout_log_probs == 0).all()
    assert sample.reward is not None and sample.reward.outcome is RewardOutcome.SCORED and sample.reward.value == 0.0
    np.testing.assert_array_equal(second.samples[0].prompt.token_ids, ids_of("<user>hi<assistant>"))
    np.testing.assert_array_equal(second.samples[0].response_ids, [*ids_of("yo"), 0])


def test_supervised_rows_need_a_target_and_an_end_token(tmp_path: Path, tokenizer_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "response": "1"}, {"prompt": "2", "answer": "2"})
    tokenizer = load_tokenizer(tokenizer_path)
    with pytest.raises(UserError, match=r":2: no field 'response', only 'prompt', 'answer'; name the right one in data\.label_key"):
        open_source(path, tokenizer, need_response=True)
    with pytest.raises(UserError, match=r":2: no field 'response', which supervised training needs"):
        open_source(path, tokenizer, shuffle=False).next_supervised(2)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        open_source(path, tokenizer, shuffle=False).next_supervised(1)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which is not a directory"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no tokenizer, needs one of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load a tokenizer from"):
        load_tokenizer(tmp_path)


MY_ROWS = """
class Numbers:
    def __init__(self, *, seed: int, step: int = 1) -> None:
        self.seed, self.step, self.state = seed, step, {"at": 0}

    def next_rows(self, count):
        first = self.state["at"]
        self.state = {"at": first + count}
        return [self.row(number) for number in range(first, first + count)]

    def row(self, number):
        return {"prompt": f"{self.seed}+{number * self.step}=", "label": number, "response": str(number), "level": number % 3}

class Long(Numbers):
    def row(self, number):
        return {"prompt": "1" * number}

class NoAnswers(Numbers):
    def row(self, number):
        return {"prompt": "1+1="}
"""


@pytest.fixture
def my_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(MY_ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rows", raising=False)


def opened(name: str = "Numbers", *, seed: int = 4, data: Mapping[str, Any] = MappingProxyType({}), **args: Any) -> OwnRows:
    return OwnRows(settings=DataSettings(source=f"my_rows:{name}", args=args, **data), seed=seed, need_response=False)


def prompts(tokenizer: Any, name: str = "Numbers", *, need_response: bool = False, **settings: Any) -> PromptSource:
    data = DataSettings(source=f"my_rows:{name}", **settings)
    return PromptSource([], tokenizer, settings=data, seed=4, need_response=need_response)


@pytest.mark.usefixtures("my_rows")
def test_prompts_come_in_order_with_ids_label_and_metadata(tokenizer: Any) -> None:
    source = prompts(tokenizer, args={"step": 2})
    first, second, third = [*source.next_prompts(2), *source.next_prompts(1)]
    assert [prompt.id for prompt in (first, second, third)] == ["0", "1", "2"] and source.rows.state()["taken"] == 3
    assert [prompt.text for prompt in (first, second, third)] == ["4+0=", "4+2=", "4+4="]
    assert (second.label, second.metadata) == ("1", {"level": 1})


@pytest.mark.usefixtures("my_rows")
def test_probes_do_not_move_the_source(tokenizer: Any) -> None:
    source = prompts(tokenizer)
    assert [prompt.text for prompt in source.probes()] == ["4+0="]
    assert [(prompt.id, prompt.text) for prompt in source.first(2)] == [("eval-0", "4+0="), ("eval-1", "4+1=")]
    assert source.notes() == []
    assert source.next_prompts(1)[0].text == "4+0="


@pytest.mark.usefixtures("my_rows")
def test_state_goes_on_in_another_instance(tokenizer: Any) -> None:
    source, other = prompts(tokenizer), prompts(tokenizer)
    source.next_prompts(5)
    state = json.loads(json.dumps(source.rows.state(), allow_nan=False))
    expected = [(prompt.id, prompt.text) for prompt in source.next_prompts(3)]
    other.rows.restore(state)
    assert other.rows.state()["taken"] == 5
    assert [(prompt.id, prompt.text) for prompt in other.next_prompts(3)] == expected == [(str(n), f"4+{n}=") for n in (5, 6, 7)]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_resume_renders_waiting_prompts_by_another_system_prompt(tmp_path: Path, tokenizer: Any, has_checkpoint: bool) -> None:
    """Of four prompts one is trained on, one is done and one in flight; without a checkpoint to tell the change, it is refused."""
    path = write(tmp_path / "a.jsonl", *({"prompt": [{"role": "user", "content": str(row)}]} for row in range(9)))
    open_with = partial(open_source, path, tokenizer, shuffle=False)
    source, old, new = open_with(), '{"data.system_prompt": null}', '{"data.system_prompt": "think"}'
    with Buffer(tmp_path / "buffer.sqlite", made_by=old) as buffer:
        buffer.add_prompts(source.next_prompts(4))
        for prompt in buffer.take_pending(3)[:2]:
            buffer.put_done(Group(prompt.id, prompt, (Sample.written(prompt, [1], text="a"),)))
        buffer.consume({"0-0": None}, step=1)
        position = position_of(source, buffer, step=1)
    with Buffer(tmp_path / "buffer.sqlite", made_by=new) as buffer:
        renewed = open_with(system_prompt="think")
        if not has_checkpoint:
            with pytest.raises(UserError, match="other tokens"):
                rewind(renewed, buffer, step=0, position=None)
            assert buffer.counts() == BufferCounts(pending=2, in_flight=0, done=1, consumed=1), "nothing is lost"
            return
        assert rewind(renewed, buffer, step=1, position=position) == (
            "1 group to be made anew, because data.system_prompt is think now and was None",
        )
        found = buffer.take_pending(9)
        assert [(prompt.id, prompt.text) for prompt in found] == [(f"0-{row}", f"<system>think<user>{row}<assistant>") for row in (1, 2, 3)]
        assert [prompt.token_ids.tolist() for prompt in found] == [ids_of(prompt.text) for prompt in found]
        assert found[0].messages[0] == {"role": "system", "content": "think"}
        assert buffer.groups(["0-0"])[0].prompt.text == "<user>0<assistant>", "what was trained on stays"


@pytest.mark.usefixtures("my_rows")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: opened(seed=5), "cannot resume: run.seed is 5, was 4"),
        (lambda: opened(step=3), "cannot resume: data.args is {'step': 3}, was {}"),
        (lambda: opened(data={"system_prompt": "Think."}), "cannot resume: data.system_prompt is Think., was None"),
        (lambda: opened(data={"chat_template_kwargs": {"a": 1}}), "cannot resume: data.chat_template_kwargs is {'a': 1}, was None"),
        (lambda: opened(data={"label_key": "answer"}), "cannot resume: data.label_key is answer, was label"),
        (lambda: opened("NoAnswers"), "cannot resume: data.source is my_rows:NoAnswers, was my_rows:Numbers"),
    ],
)
def test_state_of_other_rows_is_refused(other: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        other().restore(opened().state())


@pytest.mark.usefixtures("my_rows")
def test_supervised_rows_need_their_answers(tokenizer: Any) -> None:
    (group,) = prompts(tokenizer, need_response=True).next_supervised(1)
    assert (group.id, group.samples[0].response_text) == ("0", "0")
    with pytest.raises(UserError, match=r"data.source my_rows:NoAnswers, row 0: no field 'response', only 'prompt'"):
        prompts(tokenizer, "NoAnswers", need_response=True)


@pytest.mark.usefixtures("my_rows")
def test_a_prompt_that_is_too_long_names_the_row(tokenizer: Any) -> None:
    source = prompts(tokenizer, "Long", max_prompt_tokens=3)
    with pytest.raises(UserError, match=r"data.source my_rows:Long, row 0: the prompt has no tokens"):
        source.next_prompts(1)
    with pytest.raises(UserError, match=r"row 4: the prompt has 4 tokens, the limit is 3"):
        source.next_prompts(5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "data.train is missing"),
        ({"train": "t.jsonl", "source": "my_rows:Numbers"}, "rows come from one of them"),
        ({"train": "t.jsonl", "args": {"step": 2}}, "data.args has step, but data.source is not set"),
        ({"source": "my_rows:Numbers", "shuffle": False}, "has an order of its own; remove data.shuffle"),
    ],
)
def test_rows_come_from_one_place(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**given)
