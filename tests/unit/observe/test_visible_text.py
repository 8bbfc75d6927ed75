import unicodedata

from megatron_rl.observe.visible_text import sample_lines, visible


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
