import base64
import gzip
import io
import json
import math
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from written_run import NASTY, branched, byte_tokenizer, encode, group, write_buffer, write_run

from megatron_rl.data.buffer import BUFFER_FILE, Buffer
from megatron_rl.errors import UserError
from megatron_rl.report.page import spread, spread_order
from megatron_rl.report.run_samples import open_samples, printed_samples
from megatron_rl.report.sample_blocks import group_block, load_spelling, pack
from megatron_rl.types import Failure


@pytest.fixture
def spell(tmp_path: Path) -> Any:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return load_spelling([tmp_path / "nothing here", tmp_path])


def block_of(directory: Path, name: str, spell: Any) -> dict[str, Any]:
    with open_samples(directory) as run:
        packed = pack(group_block(run.group(name), ["best"], spell))
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_tokens_of_a_block_have_the_numbers_of_their_places(tmp_path: Path, spell: Any) -> None:
    write_buffer(tmp_path, [[], [], [], [], [group("a", ["abcdefghijklmnop", "x"], [1.0, None])]])
    block = block_of(tmp_path, "a", spell)
    assert (block["id"], block["step"], block["label"], block["labels"]) == ("a", 5, "42", ["best"])
    first, second = block["samples"]
    assert first["tokens"] == list("abcdefghijklmnop") and first["gap"] == [16, 0]
    assert first["turns"] == [[0, True], [8, False], [12, True]]
    numbers = first["numbers"]
    for place in range(16):
        made, trained = not 8 <= place < 12, not 8 <= place < 12 and place % 4 != 3
        assert numbers["age"] == 1 or numbers["age"][place] == (1 if made else None)
        assert numbers["surprise"][place] == (pytest.approx(0.01 * (place + 1), rel=6e-3) if made else None)
        expected = {"difference": 0.25, "ratio": 0.15, "kl": math.exp(-0.2) - 1 + 0.2, "advantage": -1.5, "entropy": 0.5 + 0.1 * place}
        for name, value in expected.items():
            got = numbers[name] if isinstance(numbers[name], int | float) else numbers[name][place]
            assert got == (pytest.approx(value, rel=6e-3) if trained else None), (name, place)
        assert (first["mask"][place] == 1) == trained and (first["clipped"][place] == 1) == (trained and place % 5 == 0)
    assert (second["reward"], second["outcome"], second["numbers"]["difference"]) == (None, "error", 0.25)


def test_a_letter_of_several_tokens_comes_with_its_last(spell: Any) -> None:
    text = "aé€\U0001f600 b"
    ids = encode(text)
    assert len(ids) == 1 + 2 + 3 + 4 + 2
    assert spell(ids) == ["a", "", "é", "", "", "€", "", "", "", "\U0001f600", " ", "b"]
    broken = spell(ids[:2] + encode("zz"))
    assert broken[0] == "a" and "".join(broken).endswith("zz"), "half a letter delays no later one"


def test_branches_name_the_sample_and_the_token_they_leave(tmp_path: Path, spell: Any) -> None:
    write_buffer(tmp_path, [[branched("a")]])
    first, second = block_of(tmp_path, "a", spell)["samples"]
    assert (first["parent"], second["parent"], second["shared"]) == (None, 0, len("askone ") + 1), "both go on with a t"
    assert second["prompt"] == "askone " and second["role"] == "solver"


def test_a_long_sample_is_shown_without_its_middle(tmp_path: Path, spell: Any) -> None:
    text = "".join(chr(ord("a") + place % 26) for place in range(100_000))
    write_buffer(tmp_path, [[group("a", [text], [1.0])]])
    (sample,) = block_of(tmp_path, "a", spell)["samples"]
    assert sample["gap"] == [2000, 97_000] and len(sample["tokens"]) == len(sample["ids"]) == 3000
    assert "".join(sample["tokens"]) == text[:2000] + text[-1000:]
    assert len(sample["text"]) < 12_100 and "88,000 characters left out" in sample["text"]
    assert sample["numbers"]["surprise"][-1] == pytest.approx(1000, rel=0.01)


def test_of_a_pruned_sample_the_text_alone_is_shown(tmp_path: Path, spell: Any) -> None:
    write_buffer(tmp_path, [[group("a", ["kept"], [1.0]), group("b", ["gone"], [0.0])]])
    with Buffer(tmp_path / BUFFER_FILE) as buffer:
        buffer.prune(1, keep=1)
    assert block_of(tmp_path, "a", spell)["samples"][0]["tokens"] == list("kept")
    (gone,) = block_of(tmp_path, "b", spell)["samples"]
    assert gone["text"] == "gone" and "tokens" not in gone


def test_samples_in_a_terminal_are_escaped_and_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure("error", f"headline {NASTY}")
    texts = ["good", f"bad {NASTY}", "middle é"]
    write_buffer(tmp_path, [[group("a", texts, [1.0, -2.0, 0.5], failures=[failure]), group("b", ["broken"], [None])]])
    lines = list(printed_samples(tmp_path, step=None, worst=1, best=2, group=None))
    assert lines[0] == "step 1: 4 trajectories, 1 of them without a reward"
    titles = [line.partition(",")[0] for line in lines if line.startswith(("reward", "--"))]
    assert titles == ["-- worst 1 of 1", "reward -2", "-- best 1 of 2", "reward 1", "-- best 2 of 2", "reward 0.5"]
    assert any("\\x1b[31m" in line and "\\u202etxt.exe\\u202c" in line for line in lines)
    assert all(line.isprintable() and len(line) <= 80 for line in lines)
    (whole,) = [list(printed_samples(tmp_path, step=1, worst=0, best=0, group="a"))]
    assert sum(line.startswith("reward") for line in whole) == 3 and whole[-1].startswith("failed: error: headline </script>")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert any("middle \\xe9" in line for line in printed_samples(tmp_path, step=1, worst=3, best=0, group=None))


def test_a_terminal_shows_special_tokens(tmp_path: Path) -> None:
    write_run(tmp_path, [[group("a", ["42"], [1.0])]])
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    tokenizer.save(str(file))
    ids = np.array([*encode("42"), tokenizer.token_to_id("<|end|>")], "<i4")
    with sqlite3.connect(tmp_path / BUFFER_FILE) as connection:
        connection.execute("UPDATE samples SET response_ids = ?", (ids.tobytes(),))
    printed = partial(printed_samples, tmp_path, step=1, worst=0, best=1)
    assert "    answer  42<|end|>" in list(printed(group=None)) and "    answer  42<|end|>" in list(printed(group="a"))
    file.unlink()
    assert "    answer  42" in list(printed(group=None)), "the text is kept without them"


def test_mistakes_about_samples_are_sentences(tmp_path: Path) -> None:
    def printed(**asked: Any) -> list[str]:
        return list(printed_samples(tmp_path, **({"step": None, "worst": 1, "best": 0, "group": None} | asked)))

    with pytest.raises(UserError, match=r"buffer.sqlite does not exist, so this run has no samples"):
        printed()
    write_buffer(tmp_path, [[group("a", ["x"], [1.0])]])
    with pytest.raises(UserError, match=r"--step is 7, but the buffer of .* has samples of steps 1 to 1"):
        printed(step=7)
    with pytest.raises(UserError, match="no group 'zz'"):
        printed(group="zz")
    (tmp_path / BUFFER_FILE).write_bytes(b"no database at all, but long enough to be looked at as one, is it not? " * 20)
    with pytest.raises(UserError, match=r"buffer.sqlite cannot be read \(file is not a database\)"):
        printed()


def test_a_cut_of_the_steps_leaves_an_even_spread() -> None:
    assert spread(list(range(10, 110)), 5) == [10, 35, 60, 84, 109]
    assert spread([3, 4], 5) == [3, 4] and spread([], 5) == []
    order = list(spread_order(list(range(9))))
    assert order[:3] == [8, 0, 4] and set(order[3:5]) == {2, 6} and sorted(order) == list(range(9))
    assert list(spread_order([5])) == [5] and list(spread_order([])) == []
    assert np.isin([1, 3, 5, 7], order[5:]).all()
