"""The words of a bash script, read as data: nothing is executed, no file but sourced ones is opened.

Assignments, arrays, quotes, `${NAME:-x}`, arithmetic and `source` are understood. Output of a
command is not known: it and what follows from it stand as `⟨NAME⟩`. In an `if` or a loop an
assignment counts where nothing else has given a value, or where it extends that value, in the first
one of several branches.
"""

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_rl.errors import UserError

Value = str | list[str]
UNKNOWN = re.compile(r"⟨(\w*)⟩")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_LEADS = ("then", "else", "elif", "do", "export", "local", "declare", "readonly", "!", "{", "}", ";;", *_OPENS)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"\$(?:(\w+|[@*#?$!])|\{)")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


class Script:
    """The `commands` of the script at `path`, each a list of words after expansion; `given` are variables of its caller."""

    def __init__(self, path: Path, *, given: Mapping[str, str]) -> None:
        self.commands: list[list[str]] = []
        self.missing: list[str] = []
        """Sourced files that are not there, whose variables are not known."""
        self._variables: dict[str, Value] = dict(given)
        self._given = frozenset(given)
        self.skipped: list[str] = []
        """Assignments in an `if` or a loop to a variable that has another value outside of it."""
        self._branch: dict[str, int] = {}  # variables that the open `if` or loop has given, and in which of its branches
        self._depth = self._branch_number = 0
        self._read(path, depth=0)

    def _read(self, path: Path, *, depth: int) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the script {path} cannot be read ({error}); give a bash script, with what it sources beside it") from error
        if depth > 8:
            raise UserError(f"the script {path} sources itself; give one that ends")
        for words in _commands(text):
            self._take(words, path, depth=depth)

    def _take(self, words: list[str], path: Path, *, depth: int) -> None:
        while words and (words[0] in _LEADS or words[0] in _CLOSES):
            self._depth = max(0, self._depth + (words[0] in _OPENS) - (words[0] in _CLOSES))
            self._branch_number += words[0] in ("else", "elif", ";;")
            if not self._depth:
                self._branch.clear()
            words = words[1:]
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            self._assign(found[1], found[3], path, adds=bool(found[2]))
            words = words[1:]
        if not words:
            return
        expanded = [each for word in words for each in self._expand(word, path)]
        if expanded[:1] in (["source"], ["."]) and len(expanded) > 1:
            file = path.parent / expanded[1]  # an absolute path stays as it is
            if file.is_file():
                self._read(file, depth=depth + 1)
            else:
                self.missing.append(expanded[1])
        elif expanded:
            self.commands.append(expanded)

    def _assign(self, name: str, text: str, path: Path, *, adds: bool) -> None:
        before = self._variables.get(name)
        known = before is not None and not UNKNOWN.search(str(before))
        if name in self._given or (self._depth and self._branch.get(name, self._branch_number) != self._branch_number):
            return
        if text.startswith("("):
            value: Value = [each for words in _commands(text[1:-1]) for word in words for each in self._expand(word, path)]
        else:
            value = " ".join(self._expand(text, path))
            if UNKNOWN.search(value) and not value.split()[1:]:
                value = f"⟨{name}⟩"
        extends = adds or re.search(rf"\$\{{?{name}\b", text)
        if self._depth and known and name not in self._branch and not extends:
            self.skipped += [f"{name}={' '.join(text.split())}"] if value != before else []
            return
        self._branch |= {name: self._branch_number} if self._depth else {}
        if adds and before is not None:
            value = [*before, *([value] if isinstance(value, str) else value)] if isinstance(before, list) else f"{before}{value}"
        self._variables[name] = value

    def _expand(self, word: str, path: Path) -> list[str]:
        """Return the words that a raw word stands for: several for an array, none for an empty variable without quotes."""
        parts, splits, index = [""], False, 0
        while index < len(word):
            char = word[index]
            if char == "'":
                end = _end(word, "'", index + 1)
                parts[-1] += word[index + 1 : end]
                index = end + 1
            elif char == '"':
                end = _closing(word, index, '"')
                inner = self._expanded(word[index + 1 : end], path, quoted=True)
                parts = [*parts[:-1], parts[-1] + inner[0], *inner[1:]] if inner else parts
                splits, index = splits or not inner, end + 1
            elif char == "\\":
                parts[-1] += word[index + 1 : index + 2]
                index += 2
            else:
                end = min((at for mark in "'\"\\" if (at := _found(word, mark, index)) >= 0), default=len(word))
                inner = self._expanded(word[index:end], path, quoted=False)
                parts = [*parts[:-1], parts[-1] + inner[0], *inner[1:]] if inner else parts
                splits, index = splits or not inner, end
        return [] if parts == [""] and splits else parts

    def _expanded(self, text: str, path: Path, *, quoted: bool) -> list[str]:
        """Return `text` with its variables; words of an array apart, and of a variable that is not quoted."""
        result, index, empty = [""], 0, False
        while index < len(text):
            found = _EXPANSION.match(text, index)
            if text.startswith("$((", index):
                end = _closing(text, index + 2, ")") + 2
                values, index = [self._arithmetic(text[index + 3 : end - 2], path)], end
            elif text.startswith(("$(", "`"), index):
                end = _closing(text, index + 1, ")") if text[index] == "$" else _end(text, "`", index + 1)
                inner = text[index:end]
                # The usual way to the script's own directory.
                own = "BASH_SOURCE" in inner or "$0" in inner
                values, index = [str(path.parent / "/".join([".."] * inner.count("..")) if own else "⟨⟩")], end + 1
            elif found:
                end = found.end() if found[1] else _closing(text, found.end() - 1, "}") + 1
                values, index = self._value(found[1] or text[found.end() : end - 1], path, quoted=quoted), end
            else:
                if quoted and text[index] == "\\" and text[index + 1 : index + 2] in ('"', "\\", "$", "`"):
                    index += 1
                result[-1] += text[index]
                index += 1
                continue
            empty = empty or not values
            result = [*result[:-1], result[-1] + values[0], *values[1:]] if values else result
        return [] if result == [""] and empty else result

    def _value(self, name: str, path: Path, *, quoted: bool) -> list[str]:
        """Return the words of a variable, `name` with what stands beside it in braces."""
        if name in ("@", "*", "#", "?", "!", "$") or name.isdigit():
            return []
        found = re.fullmatch(r"(\w+)(\[[@*]\])?(?:(:?[-=+?])(.*))?", name, re.DOTALL)
        if found is None or (found[3] or "").endswith(("+", "?")):
            return ["⟨⟩"]
        value = self._variables.get(found[1], "" if found[2] else None)
        if found[3] and (value is None or (found[3].startswith(":") and not value)):
            return self._expand(f'"{found[4]}"' if '"' not in found[4] and "'" not in found[4] else found[4], path)
        if value is None:
            return [f"⟨{found[1]}⟩"]
        if isinstance(value, list):
            return value if found[2] else value[:1]
        return [value] if quoted else value.split()

    def _arithmetic(self, text: str, path: Path) -> str:
        named = re.sub(r"(?<![\w$⟨{])([A-Za-z_]\w*)", r"$\1", text)
        words = " ".join(self._expanded(named, path, quoted=True))
        try:
            return str(_number(ast.parse(words.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return "⟨⟩"


def _number(node: ast.expr) -> int:
    """Return the value of whole numbers with + - * / % and parentheses. Raises ValueError for others."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))  # type: ignore[operator]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.operand)))  # type: ignore[operator]
    raise ValueError


def _end(text: str, mark: str, index: int) -> int:
    """Return the next `mark`, the end of the text for none."""
    found = text.find(mark, index)
    return len(text) if found < 0 else found


def _found(text: str, mark: str, index: int) -> int:
    """Return the next `mark` outside of `$(...)`, -1 for none."""
    while index < len(text):
        if text.startswith(("$(", "${"), index):
            index = _closing(text, index + 1, ")" if text[index + 1] == "(" else "}") + 1
            continue
        if text[index] == mark:
            return index
        index += 1
    return -1


def _closing(text: str, index: int, mark: str) -> int:
    """Return where what opens at `index` is closed by `mark`; the end of the text for what is not."""
    opening, depth = text[index], 0
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 1
        elif char == "'" and opening != '"':
            index = max(index, text.find("'", index + 1))
        elif char == '"' and opening != '"':
            index = _closing(text, index, '"')
        elif text.startswith(("$(", "${"), index) and depth:
            index = _closing(text, index + 1, ")" if text[index + 1] == "(" else "}")
        elif char == mark and depth:
            depth -= 1
            if not depth:
                return index
        elif char == opening:
            depth += 1
        index += 1
    return len(text) - 1


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the raw words of every command, quotes included; here-documents and comments are passed over."""
    words, word, index = list[str](), "", 0
    while index < len(text):
        char = text[index]
        if text.startswith("\\\n", index):
            index += 2
            continue
        if char in "'\"`" or text.startswith(("$(", "${"), index) or (char == "(" and word.endswith("=")):
            start = index + (char == "$")
            mark = {"(": ")", "{": "}"}.get(text[start], text[start])
            end = text.find(mark, start + 1) if mark in "'`" else _closing(text, start, mark)
            end = len(text) - 1 if end < 0 else end
            word, index = word + text[index : end + 1], end + 1
            continue
        if found := re.match(r"<<-?\s*['\"]?(\w+)['\"]?.*\n(?:.*\n)*?\s*\1\s*(?:\n|$)", text[index:]):
            index += found.end()
            char = "\n"
            index -= 1
        if char == "#" and not word:
            index = end if (end := text.find("\n", index)) >= 0 else len(text)
            continue
        if char.isspace() or char in ";&|()":
            words += [word] if word else []
            word = ""
            if char not in " \t" and words:
                yield words
                words = []
            if text.startswith(";;", index):
                yield [";;"]
        else:
            word += text[index : index + 2] if char == "\\" else char
            index += char == "\\"
        index += 1
    words += [word] if word else []
    if words:
        yield words
