"""Words of scripts that are read and never executed."""

from pathlib import Path

import pytest

from megatron_rl.errors import UserError
from megatron_rl.importers.shell import Script


def words(tmp_path: Path, text: str, **given: str) -> list[list[str]]:
    (tmp_path / "run.sh").write_text(text)
    return Script(tmp_path / "run.sh", given=given).commands


CASES = {
    "quotes": ("""run 'a  b' "c  d" e\\ f 'g'"h"i ''""", ["run", "a  b", "c  d", "e f", "ghi", ""]),
    "escapes in quotes": (r"""run "a\"b\$c\\d\ne" \$f""", ["run", r'a"b$c\d\ne', "$f"]),
    "variables": ('A=1\nB="x y"\nrun $A ${A}2 $B "$B" \'$B\'', ["run", "1", "12", "x", "y", "x y", "$B"]),
    "defaults": ('A=\nrun ${A:-x} ${A-y}z ${B:-"p q"} ${C:-${D:-deep}}', ["run", "x", "z", "p q", "deep"]),
    "arrays": (
        'A=(\n  --one 1 # a comment\n  #--two 2\n  --three "x y"\n)\nrun ${A[@]} end',
        ["run", "--one", "1", "--three", "x y", "end"],
    ),
    "empty array": ('A=()\nrun "${A[@]}" ${A[@]} end', ["run", "end"]),
    "grown array": ("A=(1)\nA+=(2 3)\nB=a\nB+=b\nrun ${A[@]} $B", ["run", "1", "2", "3", "ab"]),
    "continuation": ("run \\\n  --a 1 \\\n  --b", ["run", "--a", "1", "--b"]),
    "arithmetic": ("A=3\nrun $((1024 * 2)) $(((A + 1) * ${A})) $((7 / 2)) $(( A % 2 )) $((-A))", ["run", "2048", "12", "3", "1", "-3"]),
    "nested": ('A=$((2 * 3))\nB="n$((A+1))-${A}"\nrun --x="${B}"', ["run", "--x=n7-6"]),
    "unknown command": ('A=$(nvidia-smi | wc -l)\nrun $A "$(date +"%s")" `id` ${A}', ["run", "⟨A⟩", "⟨⟩", "⟨⟩", "⟨A⟩"]),
    "unknown variable": ("run $NOWHERE/x ${NOWHERE2}", ["run", "⟨NOWHERE⟩/x", "⟨NOWHERE2⟩"]),
    "exports": ("export A=5 B=6\nlocal C=7\nCUDA=1 run $A$B $C", ["run", "567".replace("7", ""), "7"]),
    "here-document": ("cat <<'EOF' > f\nrun no\n$(x)\nEOF\nrun yes", ["run", "yes"]),
    "comment in line": ("run a#b # run no", ["run", "a#b"]),
    "positional": ('run "$@" $1 x', ["run", "x"]),
    "single quotes in double": ("""A="it's"\nrun "$A" "['$A']" """, ["run", "it's", "['it's']"]),
    "redirection of an if": ('if [ -z "$A" ]; then\n  A=1\nelse\n  A=2\nfi\nrun $A', ["run", "1"]),
    "first of branches": ("if x; then A=$(n)\nelse A=0\nfi\nB=${B:-${A}}\nif y; then B=8; fi\nrun $B", ["run", "8"]),
    "extended in an if": (
        'A=(1)\nB=b\nif x; then\n  A+=(2)\n  A+=(3)\n  B="$B c"\nelse\n  A+=(4)\n  B="${B} d"\nfi\nrun ${A[@]} $B',
        ["run", "1", "2", "3", "b", "c"],
    ),
    "extended in a case": ('A=1\ncase $X in\n a) A="$A 2" ;;\n b) A="$A 3" ;;\nesac\nrun $A', ["run", "1", "2"]),
    "unknown within words": ('P=${Q:-$R}/m\nA="a=1 b=$P c=3"\nrun $A "$A"', ["run", "a=1", "b=⟨P⟩", "c=3", "a=1 b=⟨P⟩ c=3"]),
    "known wins over an if": ("A=1\nif x; then A=2; fi\nfor i in 1 2; do A=3; done\nrun $A", ["run", "1"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_command_has_the_words_that_bash_gives_it(tmp_path: Path, name: str) -> None:
    text, expected = CASES[name]
    assert next(found for found in words(tmp_path, text) if found[0] == "run") == expected


def test_what_an_if_does_not_change_is_noted(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("A=1\nif x; then\n  A=2\n  B=3\nelse\n  A=1\n  B=4\nfi\n")
    assert Script(tmp_path / "run.sh", given={}).skipped == ["A=2"]


def test_variables_of_the_caller_win(tmp_path: Path) -> None:
    assert words(tmp_path, "A=1\nrun $A ${B:-2}", A="x", B="y") == [["run", "x", "y"]]


def test_sourced_files_are_read_where_the_script_is(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text('ARGS=(--layers "${LAYERS:-36}")\n')
    here = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    assert words(tmp_path, here + 'LAYERS=7\nsource "${DIR}/models/m.sh"\nrun ${ARGS[@]}')[-1] == ["run", "--layers", "7"]
    (tmp_path / "run.sh").write_text(here + "source ${DIR}/models/n.sh\nrun $X")
    script = Script(tmp_path / "run.sh", given={})
    assert script.missing == [f"{tmp_path}/models/n.sh"] and script.commands[-1] == ["run", "⟨X⟩"]
    with pytest.raises(UserError, match=r"no\.sh cannot be read .*; give a bash script"):
        Script(tmp_path / "no.sh", given={})


def test_nothing_is_executed(tmp_path: Path) -> None:
    words(tmp_path, f'touch {tmp_path}/a\nA=$(touch {tmp_path}/b)\nrun `touch {tmp_path}/c` "$(touch {tmp_path}/d)"')
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_a_script_that_sources_itself_ends(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sources itself"):
        words(tmp_path, "source ./run.sh")


@pytest.mark.parametrize(
    "text", ["run 'open", 'run "open', "A=(1 2", "run ${A", "run $((1", "run $(x", "run `x", "fi", "((", "run ${A[0]} $((x y))"]
)
def test_broken_scripts_end_without_a_traceback(tmp_path: Path, text: str) -> None:
    words(tmp_path, text)
