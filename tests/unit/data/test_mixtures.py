"""Rows of several sources, of others' files, and what becomes of long and repeated prompts."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.load import dump_settings, load_settings
from megatron_rl.data.overview import detailed_overview, overview
from megatron_rl.data.source import RunPrompts, template_variables
from megatron_rl.errors import UserError

TEMPLATE = (
    "{% for t in tools or [] %}<{{ t['function']['name'] }}>{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}<no>{% endif %}{% endif %}"
)
Read = Callable[..., RunPrompts]


@pytest.fixture
def read(tiny_model: Callable[..., Path], tmp_path: Path) -> Read:
    """The prompts of `sources`, with other settings as words."""
    model = tiny_model()
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))

    def make(sources: Any, *words: str, seed: int = 3) -> RunPrompts:
        train = json.dumps(sources if isinstance(sources, str | list) else str(sources))
        paths = (f"run.directory={tmp_path}/run", f"model.path={model}", f"data.train={train}")
        settings = load_settings(None, [*paths, *words, "data.prompts_per_step=2"])
        return RunPrompts.read(settings.model.path, settings.data, sets=settings.eval.sets, seed=seed)

    return make


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def numbered(path: Path, letter: str, count: int) -> Path:
    return lines(path, *({"prompt": f"{letter}{number}", "label": str(number)} for number in range(count)))


def test_sources_have_fields_of_their_own(read: Read, tmp_path: Path) -> None:
    """Rows of verl, slime and TRL in one list, read again in another order."""
    verl = {"prompt": [{"role": "user", "content": "v"}], "reward_model": {"ground_truth": "1"}, "data_source": "a"}
    slime = [{"messages": [{"role": "user", "content": f"s{number}"}], "label": "2", "prompt": "no"} for number in range(3)]
    for name, rows in {"verl": [verl], "slime": slime, "trl": [{"prompt": "1", "answer": "3", "label": "no"}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"path": f"{tmp_path}/verl.jsonl", "label_key": "reward_model.ground_truth"},
        {"path": f"{tmp_path}/slime.jsonl", "prompt_key": "messages", "label_key": "label"},
        {"path": f"{tmp_path}/trl.jsonl"},
    ]
    prompts = read(sources, "data.label_key=answer")
    found = {prompt.text: (prompt.label, sorted(prompt.metadata)) for prompt in prompts.source.next_prompts(30)}
    assert found == {
        "<user>v<assistant><no>": ("1", ["data_source", "reward_model"]),
        **{f"<user>s{number}<assistant><no>": ("2", ["prompt"]) for number in range(3)},
        "1": ("3", ["label"]),
    }
    state = prompts.source.rows.state()
    sources[1]["label_key"] = "prompt"
    other = read(sources, "data.label_key=answer")
    assert {prompt.label for prompt in other.source.next_prompts(30)} == {"1", "no", "3"}
    with pytest.raises(UserError, match=r"content of data.train"):
        other.source.rows.restore(state)
    with pytest.raises(UserError, match=r"slime.jsonl: no row has the field 'answers'"):
        read([{**sources[1], "label_key": "answers"}, sources[2]])


def test_sources_are_mixed_by_weight_each_in_its_own_epochs(read: Read, tmp_path: Path) -> None:
    first, second = numbered(tmp_path / "a.jsonl", "1+", 5), numbered(tmp_path / "b.jsonl", "2-", 3)
    sources = [{"path": str(first), "weight": 3}, {"path": str(second)}]
    prompts = [prompt.text for prompt in read(sources).source.next_prompts(40)]
    # The source that is furthest behind its share of the rows with the next one, the first of equals.
    assert [text[0] for text in prompts[:8]] == list("11211121")
    for length in range(1, 41):
        ones = sum(text.startswith("1+") for text in prompts[:length])
        assert abs(ones - 0.75 * length) <= 1, "within one row of its share at any time"
    ones = [text for text in prompts if text.startswith("1+")]
    assert len(ones) == 30 and all(sorted(ones[at : at + 5]) == [f"1+{n}" for n in range(5)] for at in range(0, 30, 5))
    assert ones[:5] != ones[5:10], "another order in another epoch"
    assert len({prompt.id for prompt in read(sources).source.next_prompts(40)}) == 40


def test_a_mixture_goes_on_where_its_state_was(read: Read, tmp_path: Path) -> None:
    first, second = numbered(tmp_path / "a.jsonl", "1+", 5), numbered(tmp_path / "b.jsonl", "2-", 3)
    sources = [{"path": str(first), "weight": 0.7}, {"path": str(second), "rows": ":-1"}]
    whole = [prompt.id for prompt in read(sources).source.next_prompts(23)]
    for taken in (0, 1, 9, 17):
        source, other = read(sources).source, read(sources).source
        source.next_prompts(taken)
        other.rows.restore(json.loads(json.dumps(source.rows.state())))
        assert [prompt.id for prompt in other.next_prompts(23 - taken)] == whole[taken:]
    state = read(sources).source.rows.state()
    for changed in ([{**sources[0], "weight": 0.8}, sources[1]], [sources[0], {**sources[1], "rows": ":2"}], sources[:1]):
        with pytest.raises(UserError, match=r"cannot resume: content of data\.train"):
            read(changed).source.rows.restore(state)


def test_one_file_keeps_its_order(read: Read, tmp_path: Path) -> None:
    """An order from before mixtures is the order of the first source."""
    path = numbered(tmp_path / "a.jsonl", "1+", 7)
    expected = [f"1+{index}" for epoch in (0, 1) for index in np.random.default_rng([3, epoch]).permutation(7)]
    for sources in (path, [{"path": str(path)}]):
        assert [prompt.text for prompt in read(sources).source.next_prompts(14)] == expected


@pytest.mark.parametrize(
    ("rows", "expected"), [(":", "01234"), ("1:3", "12"), (":-2", "012"), ("-2:", "34"), ("3:99", "34"), ("-9:1", "0")]
)
def test_rows_are_chosen_as_by_a_slice(read: Read, tmp_path: Path, rows: str, expected: str) -> None:
    path = numbered(tmp_path / "a.jsonl", "1+", 5)
    source = read([{"path": str(path), "rows": rows}], "data.shuffle=false").source
    assert "".join(str(prompt.label) for prompt in source.all()) == expected


def test_sources_come_back_from_a_written_settings_file(tmp_path: Path) -> None:
    sources = [{"path": "a.jsonl", "rows": "12:30"}, {"path": "b.jsonl", "weight": 0.5, "rows": ":-7"}, {"path": "c.jsonl", "rows": ":20"}]
    settings = load_settings(None, ["run.directory=r", "model.path=m", f"data.train={json.dumps(sources)}"])
    (tmp_path / "settings.yaml").write_text(dump_settings(settings))
    assert load_settings(tmp_path / "settings.yaml", []).data.sources == settings.data.sources
    assert [files.rows for files in settings.data.sources] == ["12:30", ":-7", ":20"]


def test_a_choice_of_no_rows_is_refused(read: Read, tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", "1+", 5)
    with pytest.raises(UserError, match=r"a\.jsonl has 5 rows, of which rows 7: are none; choose others"):
        read([{"path": str(path), "rows": "7:"}])
    with pytest.raises(UserError, match=r"data\.train"):
        read([{"path": str(path), "rows": "1"}])
    with pytest.raises(UserError, match=r"weight"):
        read([{"path": str(path), "weight": 0}])
    with pytest.raises(UserError, match=r"data\.train"):
        read([])
    words = ["run.directory=r", "model.path=m", "data={source: a:B, overlong: drop}"]
    with pytest.raises(UserError, match=r"data\.overlong is drop, but data\.source a:B drops or cuts its rows itself; remove it"):
        load_settings(None, words)


def test_rows_of_verl_train_as_they_are(read: Read, tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row, row | {"reward_model": {"style": "rule", "ground_truth": "3"}}]), tmp_path / "a.parquet"
    )
    (first, second) = read(tmp_path / "a.parquet", "data.label_key=reward_model.ground_truth", "data.shuffle=false").source.next_prompts(2)
    assert (first.label, second.label) == ("2", "3") and first.text == "<user>1+1=<assistant><no>"
    assert first.metadata["data_source"] == "openai/gsm8k" and first.metadata["extra_info"] == {"split": "train", "index": 0}
    assert first.metadata["reward_model"] == {"style": "rule", "ground_truth": "2"}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_rows_of_slime_train_as_they_are(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--input-key messages --label-key label --metadata-key metadata --tool-key tools`: tools may be a list, or a text of JSON."""
    chat = [{"role": "user", "content": "1+1="}]
    rows = [
        {"messages": chat, "label": "2", "metadata": {"rm_type": "deepscaler"}, "tools": [ADD]},
        {"messages": chat, "label": 2, "metadata": {"rm_type": "math"}, "tools": json.dumps([ADD])},
    ]
    words = ("data.prompt_key=messages", "data.label_key=label", "data.shuffle=false")
    first, second = read(lines(tmp_path / "a.jsonl", *rows), *words).source.next_prompts(2)
    assert first.text == second.text == "<add><user>1+1=<assistant><no>" and (first.label, second.label) == ("2", "2")
    assert first.metadata == {"metadata": {"rm_type": "deepscaler"}, "tools": [ADD]} and second.metadata["tools"] == [ADD]
    for broken in ("add", '{"type": 1}'):
        with pytest.raises(UserError, match=r"a\.jsonl:1: 'tools' is .*, needs a list, or a text of JSON with one"):
            read(lines(tmp_path / "a.jsonl", rows[0] | {"tools": broken}), *words)


def test_rows_of_trl_train_as_they_are(read: Read, tmp_path: Path) -> None:
    """`prompt`, a chat or a text, and any columns for the reward functions."""
    chat = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": chat, "solution": "$2$", "level": 3}, {"prompt": chat, "solution": "\\boxed{3}", "level": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet", "data.label_key=solution", "data.shuffle=false").source.next_prompts(2)
    assert (first.label, second.label) == ("$2$", rows[1]["solution"]) and first.metadata == {"level": 3}
    text = read(lines(tmp_path / "b.jsonl", {"prompt": "1+1=", "answer": 2}), "data.label_key=answer").source.next_prompts(1)[0]
    assert (text.text, text.label) == ("1+1=", "2")


def test_a_field_with_a_dot_in_its_name_comes_before_a_path(read: Read, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "1", "a.b": "5", "a": {"b": "6"}}, {"prompt": "2", "a": {"b": "7"}})
    assert [prompt.label for prompt in read(path, "data.label_key=a.b").source.all()] == ["5", "7"]


def test_an_array_a_pattern_and_a_saved_dataset_are_read(read: Read, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "1+1", "label": 2}, {"prompt": "1+2"}], indent=1))
    lines(tmp_path / "part-1.jsonl", {"prompt": "3"})
    lines(tmp_path / "part-0.jsonl", {"prompt": "4"})
    saved = tmp_path / "saved"
    saved.mkdir()
    table = pyarrow.Table.from_pylist([{"prompt": "5"}, {"prompt": "6"}])
    with pyarrow.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as file:
        file.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    for path, texts in (("a.json", ["1+1", "1+2"]), ("part-*.jsonl", ["4", "3"]), ("saved", ["5", "6"])):
        assert [prompt.text for prompt in read(f"{tmp_path}/{path}").source.all()] == texts


def test_paths_that_are_no_data_are_refused(read: Read, tmp_path: Path) -> None:
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    (tmp_path / "bad.json").write_text('[{"prompt": "1"}, {"prompt"')
    for path, words in (
        ("splits", r"several splits \(train\), needs one of them"),
        ("splits/train", r"is a directory, needs a file"),
        ("none-*.jsonl", r"does not exist"),
        ("bad.json", r"not an array of JSON objects"),
    ):
        with pytest.raises(UserError, match=words):
            read(f"{tmp_path}/{path}")


def test_long_prompts_are_refused_dropped_or_cut(read: Read, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "12345"}, {"prompt": "12"}, {"prompt": "123"}, {"prompt": "6789"})
    words = ("data.max_prompt_tokens=3", "data.shuffle=false")
    with pytest.raises(UserError, match=r"a\.jsonl:1: the prompt has 5 tokens, the limit is 3; .*data\.overlong"):
        read(path, *words)
    dropped = read(path, *words, "data.overlong=drop")
    assert [prompt.text for prompt in dropped.source.next_prompts(3)] == ["12", "123", "12"]
    assert dropped.notes[0] == f"2 prompts of {path} of more than 3 tokens: left out"
    cut = read(path, *words, "data.overlong=truncate")
    first, *_, last = cut.source.next_prompts(4)
    assert (first.text, last.text, len(first.token_ids)) == ("345", "789", 3)
    assert "cut to their last tokens" in cut.notes[0]
    with pytest.raises(UserError, match=r"longer than data\.max_prompt_tokens, which data\.overlong drops"):
        read(path, "data.max_prompt_tokens=1", "data.overlong=drop")


def test_dropped_rows_move_no_other_source(read: Read, tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", {"prompt": "1111"}, {"prompt": "11"})
    second = lines(tmp_path / "b.jsonl", {"prompt": "22"}, {"prompt": "2222"}, {"prompt": "2"})
    words = ("data.max_prompt_tokens=3", "data.shuffle=false", "data.overlong=drop")
    source = read([{"path": str(first)}, {"path": str(second)}], *words).source
    assert Counter(prompt.text for prompt in source.next_prompts(8)) == {"11": 4, "22": 2, "2": 2}


def test_repeated_and_held_out_prompts_are_counted(read: Read, tmp_path: Path) -> None:
    train = lines(tmp_path / "a.jsonl", *({"prompt": text, "label": "1"} for text in ("1 + 1", "2", " 1  +  1 ", "3")))
    held_out = lines(tmp_path / "b.jsonl", *({"prompt": text, "label": "1"} for text in ("7", "3 ", "1 + 1")))
    notes = read(train, f"eval.sets.b={held_out}").notes
    assert f"1 of 4 rows of {train} repeat the text of a prompt: {train}:3 is that of {train}:1" in notes
    assert f"2 of 3 prompts of {held_out} have a text that is also trained on, the first is {held_out}:2, in {train}:4" in notes
    chats = [[{"role": "user", "content": text}] for text in ("\u00c4 is\n1?", "\u00e4 is 1?\n", "\u00e4is 1?")]
    path = lines(tmp_path / "chats.jsonl", *({"prompt": chat, "label": "1"} for chat in chats))
    assert f"1 of 3 rows of {path} repeat the text of a prompt: {path}:2 is that of {path}:1" in read(path).notes


def test_a_system_prompt_comes_before_chats_without_one(read: Read, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "8"}, {"role": "user", "content": "9"}]
    path = lines(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "9"}]}, {"prompt": own})
    first, second = read(path, "data.system_prompt='7'").source.all()
    assert (first.text, second.text) == ("<system>7<user>9<assistant><no>", "<system>8<user>9<assistant><no>")
    assert first.messages[0] == {"role": "system", "content": "7"} and second.messages == tuple(own)
    with pytest.raises(UserError, match=r"a\.jsonl:1: the prompt is no chat, which data\.system_prompt needs"):
        read(lines(path, {"prompt": "9"}), "data.system_prompt='7'")


def test_template_arguments_of_the_run_and_of_a_row(read: Read, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "9"}]
    path = lines(tmp_path / "a.jsonl", {"prompt": chat}, {"prompt": chat, "chat_template_kwargs": {"enable_thinking": False}})
    first, second = read(path, "data.chat_template_kwargs.enable_thinking=true").source.all()
    assert (first.text, second.text) == ("<user>9<assistant>", "<user>9<assistant><no>")
    marked: Any = TEMPLATE + "{% generation %}{% endgeneration %}"
    for template in (marked, {"default": TEMPLATE}):
        tokenizer: Any = SimpleNamespace(chat_template=template, special_tokens_map={})
        assert template_variables(tokenizer) == {"enable_thinking"}
    with pytest.raises(UserError, match=r"does not read 'thinking' of chat_template_kwargs, needs one of enable_thinking"):
        read(path, "data.chat_template_kwargs.thinking=true")


def test_prompts_may_be_token_ids(read: Read, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": [5, 6, 7]}, {"prompt": "1"})
    first, _ = read(path).source.all()
    assert first.token_ids.tolist() == [5, 6, 7] and first.text == "345"
    with pytest.raises(UserError, match=r"a\.jsonl:1: the prompt has the token 999999999"):
        read(lines(path, {"prompt": [5, 999999999]}))


def test_an_overview_counts_and_shows_prompts(read: Read, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"prompt": "1" * length, "label": "1"} for length in (1, 2, 2, 3, 9)))
    prompts = read(path, f"eval.sets.b={numbered(tmp_path / 'b.jsonl', '5+', 2)}")
    assert overview(prompts) == {
        "data.train": "5 prompts of 1 to 9 tokens: median 2, 90 % at most 9, 99 % at most 9; the first is '1'",
        "eval.sets.b": "2 prompts of 3 to 3 tokens: median 3, 90 % at most 3, 99 % at most 3; the first is '5+0'",
    }
    text = "\n".join(detailed_overview(prompts))
    assert "note: 1 of 5 rows" in text and "'1'" in text and "label '0'" in text and "#" * 40 + " 2" in text
