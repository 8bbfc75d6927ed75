import io
import unicodedata

import numpy as np
import pytest
from rich.cells import cell_len

from megatron_rl.observe.visible_text import lines_of, sample_lines, visible
from megatron_rl.types import Prompt, Sample, StopReason


def test_characters_that_act_are_shown_and_letters_stay() -> None:
    assert visible("a\tb\nc é 漢 \U0001f600") == "a\tb\nc é 漢 \U0001f600"
    assert visible("\x1b[31m\r\x00\x7f\x85") == "\\x1b[31m\\x0d\\x00\\x7f\\x85"
    assert visible("\u202e\u2066\u200b\u2028\ufeff\ud83d\ue000") == "\\u202e\\u2066\\u200b\\u2028\\ufeff\\ud83d\\ue000"
    assert visible("\U000e0041") == "\\U000e0041"
    assert visible("é漢", only_ascii=True) == "\\xe9\\u6f22"


def test_nothing_of_unicode_acts_once_visible() -> None:
    everything = "".join(map(chr, range(0x110000)))
    acting = {letter for letter in visible(everything) if unicodedata.category(letter)[0] in "CZ"} - {" ", "\n", "\t"}
    assert {unicodedata.category(letter) for letter in acting} <= {"Zs"}, "spaces of several widths"


def test_lines_of_a_sample_fit_80_columns_and_lose_no_word() -> None:
    words = " ".join(f"word{number}" for number in range(300))
    lines = list(sample_lines(prompt="p", label=None, answer=f"{words}\n\nend", message=""))
    assert all(len(line) <= 80 for line in lines) and lines[0] == "    prompt  p" and lines[-1].strip() == "end"
    assert "".join("".join(lines[1:]).replace("answer", "", 1).split()) == "".join(f"{words}end".split())
    (line,) = sample_lines(answer="")
    assert line.strip() == "answer"
    long = "\n".join(sample_lines(answer="x" * 3000 + "y" * 3000))
    assert "2,000 characters left out" in long and long.count("x") == long.count("y") == 2000


def test_wide_letters_and_long_names_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    ids, name = np.array([1]), f"{'source/' * 9}row 7"
    prompt = Prompt(id=name, token_ids=ids, text="漢字" * 60)
    sample = Sample(
        index=0,
        group_id=name,
        prompt=prompt,
        response_ids=ids,
        loss_mask=np.array([True]),
        rollout_log_probs=np.array([-0.5]),
        weight_versions=np.array([0]),
        response_text="é漢 " * 60,
        stop_reason=StopReason.STOP,
    )
    lines = list(lines_of(sample, step=1))
    assert max(map(cell_len, lines)) <= 80 and name.split()[0] in "".join(lines)
    assert sum(line.count("漢") for line in lines) == 120
