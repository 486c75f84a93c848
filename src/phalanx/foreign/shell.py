"""Reads a shell script as far as its values follow from it, without executing anything.

Understood are assignments, arrays, quotes, continued lines, `$X`, `${X:-default}`, `$((…))` of whole numbers, here
documents, and conditions that compare known texts. Variables of the environment and arguments of the script count as
unset. Whatever else a value depends on (`$(…)`, a loop, a file that is sourced) makes it unresolved, with the reason.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple


class ScriptText(NamedTuple):
    """Text within one line of the script."""

    text: str
    line: int
    source: str
    """The text as that line has it."""
    quoted: bool = False
    """Whether blanks in it divide no words."""
    why: str = ""
    """Why it does not follow from the script; empty if it does."""


Value = list[ScriptText]


@dataclass
class ScriptWord:
    """A word of a command, expanded."""

    segments: Value

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.segments)

    @property
    def why(self) -> str:
        return next((each.why for each in self.segments if each.why), "")

    @property
    def place(self) -> tuple[int, str]:
        """The line that gives the word its text, and the text on it."""
        parts = [each for each in self.segments if each.text] or self.segments
        if not parts:
            return 0, ""
        return parts[0].line, parts[0].source if len(parts) == 1 else "".join(each.source for each in parts)


@dataclass
class _WordPart:
    kind: str
    """literal, variable, arithmetic, or command."""
    text: str
    line: int
    quoted: bool
    operation: str = ""
    parts: list[_WordPart] = field(default_factory=list)


Parts = list[_WordPart]


@dataclass
class _ScriptStatement:
    kind: str
    """simple, if, case, loop, function, or group."""
    joint: str = ""
    """The operator before it: ; && || or |."""
    assignments: list[tuple[str, bool, list[Parts], bool]] = field(default_factory=list)
    """Name, whether it appends, its words, and whether it is an array; one that is none has one word."""
    words: list[Parts] = field(default_factory=list)
    heredoc: list[Parts] = field(default_factory=list)
    branches: list[tuple[Any, list[_ScriptStatement]]] = field(default_factory=list)
    line: int = 0


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?)=")
_SPECIAL = re.compile(r"[0-9@*#?$!-]")
_STOPS = " \t\n;&|()<>"
_ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ";;"}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}


class _ScriptParser:
    """Parses a script into statements."""

    def __init__(self, text: str, *, strict: bool = False):
        self.text, self.place, self.strict = text, 0, strict
        self.starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self.waiting: list[tuple[str, bool, _ScriptStatement]] = []
        """Here documents whose text begins after this line."""

    def line(self, place: int | None = None) -> int:
        return bisect(self.starts, self.place if place is None else place)

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.place)

    def blanks(self) -> None:
        while self.place < len(self.text):
            if self.peek("\\\n"):
                self.place += 2
            elif self.text[self.place] in " \t":
                self.place += 1
            elif self.peek("#") and (self.place == 0 or self.text[self.place - 1] in " \t\n;"):
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            else:
                return

    def newline(self) -> None:
        """Passes the end of a line, and the here documents after it."""
        self.place += 1
        for end, strips, statement in self.waiting:
            while self.place < len(self.text):
                stop = self.text.find("\n", self.place)
                stop = len(self.text) if stop < 0 else stop
                row = self.text[self.place : stop]
                if (row.lstrip("\t") if strips else row) == end:
                    self.place = stop + 1
                    break
                inner = _ScriptParser(row.replace("\\$", "$"))
                inner.starts = [0]
                first = self.line()
                for parts in inner.all_words():
                    statement.heredoc.append([replace(part, line=part.line + first - 1) for part in parts])
                self.place = stop + 1
        self.waiting = []

    def all_words(self) -> Iterator[Parts]:
        """Yields every word, whatever separates them."""
        while self.place < len(self.text):
            self.blanks()
            before = self.place
            if parts := self.word():
                yield parts
            if self.place == before:
                self.place += 1

    def statements(self, ends: Sequence[str] = ()) -> list[_ScriptStatement]:
        found = list[_ScriptStatement]()
        joint = ";"
        while self.place < len(self.text):
            self.blanks()
            if self.place >= len(self.text):
                break
            letter = self.text[self.place]
            if letter == "\n":
                self.newline()
                joint = ";"
            elif self.peek(";;"):
                if ";;" in ends:
                    break
                self.place += 2
            elif self.peek("&&") or self.peek("||"):
                joint = self.text[self.place : self.place + 2]
                self.place += 2
            elif letter in ";&|":
                joint = "|" if letter == "|" else ";"
                self.place += 1
            elif letter == ")":
                if ")" in ends:
                    break
                self.place += 1
            else:
                word = self._keyword()
                if word in ends:
                    break
                before = self.place
                statement = self._statement(word)
                statement.joint = joint
                found.append(statement)
                joint = ";"
                if self.place == before:
                    self.place += 1
        return found

    def _keyword(self) -> str:
        found = re.compile(r"[A-Za-z]+|[{}!]").match(self.text, self.place)
        if not found or (found.end() < len(self.text) and self.text[found.end()] not in _STOPS):
            return ""
        return found[0]

    def _statement(self, word: str) -> _ScriptStatement:
        line = self.line()
        if word == "if":
            return self._if(line)
        if word in ("for", "while", "until", "select"):
            self.place += len(word)
            head = self.statements(("do",)) if word != "for" else self._skipped_head()
            self._pass("do")
            body = self.statements(("done",))
            self._pass("done")
            return _ScriptStatement("loop", branches=[(head, body)], line=line)
        if word == "case":
            return self._case(line)
        if word in ("{", "!") or self.peek("("):
            self.place += 1
            body = self.statements(("}",) if word == "{" else (")",)) if word != "!" else []
            if word != "!":
                self.place += 1
            return _ScriptStatement("group", branches=[(None, body)], line=line)
        if found := re.compile(r"(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\s*\)\s*\{|function\s+([\w-]+)\s*\{").match(
            self.text, self.place
        ):
            self.place = found.end()
            body = self.statements(("}",))
            self._pass("}")
            return _ScriptStatement("function", branches=[(None, body)], line=line)
        if word in _ENDS:
            self.place += len(word)
            return _ScriptStatement("simple", line=line)
        return self._simple(line)

    def _skipped_head(self) -> list[_ScriptStatement]:
        end = re.compile(r"\bdo\b|\{").search(self.text, self.place)
        head = self.text[self.place : end.start() if end else len(self.text)]
        name = _NAME.match(head.strip())
        self.place += len(head)
        return [_ScriptStatement("simple", assignments=[(name[0], False, [[]], False)])] if name else []

    def _pass(self, word: str) -> None:
        if self.peek(word):
            self.place += len(word)

    def _if(self, line: int) -> _ScriptStatement:
        found = _ScriptStatement("if", line=line)
        word = "if"
        while word in ("if", "elif"):
            self.place += len(word)
            condition = self.statements(("then",))
            self._pass("then")
            found.branches.append((condition, self.statements(("elif", "else", "fi"))))
            word = self._keyword()
        if word == "else":
            self.place += 4
            found.branches.append((None, self.statements(("fi",))))
        self._pass("fi")
        return found

    def _case(self, line: int) -> _ScriptStatement:
        self.place += 4
        self.blanks()
        found = _ScriptStatement("case", words=[self.word()], line=line)
        self.blanks()
        self._pass("in")
        while self.place < len(self.text):
            self.blanks()
            if self.peek("\n"):
                self.newline()
                continue
            if self._keyword() == "esac":
                break
            self._pass("(")
            patterns = self._words_in_parentheses()
            found.branches.append((patterns, self.statements((";;", "esac"))))
            self._pass(";;")
        self._pass("esac")
        return found

    def _simple(self, line: int) -> _ScriptStatement:
        found = _ScriptStatement("simple", line=line)
        declares = True
        while self.place < len(self.text):
            self.blanks()
            if self.place >= len(self.text) or self.text[self.place] in "\n;|)" or self.peek("&&"):
                break
            letter = self.text[self.place]
            if letter == "&":
                self.place += 1
                if not self.peek(">"):
                    break
            elif letter in "<>":
                self._redirect(found)
            elif letter == "(":
                self.place += 1
            elif declares and (assigns := _ASSIGNS.match(self.text, self.place)):
                self.place = assigns.end()
                self._assign(found, assigns[1], bool(assigns[3]), bool(assigns[2]))
            else:
                word = self.word()
                if word and word[0].kind == "literal" and word[0].text == "[[" and not found.words:
                    found.words = [word, *self._test()]
                    break
                text = "".join(part.text for part in word) if all(p.kind == "literal" for p in word) else ""
                declares = declares and (text in _DECLARES or (bool(found.words) and text.startswith("-")))
                found.words.append(word)
        return found

    def _test(self) -> list[Parts]:
        found = list[Parts]()
        while self.place < len(self.text) and not self.peek("]]"):
            self.blanks()
            if self.peek("]]"):
                break
            line = self.line()
            if operator_ := re.compile(r"&&|\|\||[<>()]|=~|\n").match(self.text, self.place):
                self.place = operator_.end()
                if operator_[0] != "\n":
                    found.append([_WordPart("literal", operator_[0], line, False)])
            elif parts := self.word():
                found.append(parts)
            else:
                self.place += 1
        self._pass("]]")
        return found

    def _redirect(self, statement: _ScriptStatement) -> None:
        document = re.compile(r"<<(-?)\s*(['\"]?)([\w!]+)\2").match(self.text, self.place)
        if document and not self.peek("<<<"):
            self.place = document.end()
            self.waiting.append((document[3], bool(document[1]), statement))
            return
        found = re.compile(r"[<>]+[&|]?").match(self.text, self.place)
        self.place = found.end() if found else self.place + 1
        self.blanks()
        if not self.peek("\n"):
            self.word()

    def _assign(self, statement: _ScriptStatement, name: str, appends: bool, one: bool) -> None:
        if self.peek("(") and not one:
            self.place += 1
            statement.assignments.append((name, appends, self._words_in_parentheses(), True))
        else:
            statement.assignments.append((name, appends or one, [self.word()], False))

    def _words_in_parentheses(self) -> list[Parts]:
        """Returns the words up to a closing parenthesis, and passes it."""
        words = list[Parts]()
        while self.place < len(self.text):
            self.blanks()
            if self.peek(")"):
                break
            if self.peek("\n"):
                self.newline()
            elif parts := self.word():
                words.append(parts)
            else:
                self.place += 1
        self.place += 1
        return words

    def word(self) -> Parts:
        """Returns the parts of the word at this place; [] if there is none."""
        parts = Parts()
        while self.place < len(self.text):
            letter = self.text[self.place]
            if self.peek("\\\n"):
                self.place += 2
            elif letter in _STOPS:
                break
            elif letter == "'":
                end = self.text.find("'", self.place + 1)
                end = self._unclosed("'", self.line()) if end < 0 else end
                self._literal(parts, self.text[self.place + 1 : end], self.place + 1, True)
                self.place = end + 1
            elif letter == '"':
                self.place += 1
                self._until(parts, '"', True)
                self.place += 1
            elif letter == "\\":
                self._literal(parts, self.text[self.place + 1 : self.place + 2], self.place, True)
                self.place += 2
            elif letter in "$`":
                parts.append(self._expansion(False))
            else:
                end = re.compile(r"[^\s;&|()<>'\"\\$`]+").match(self.text, self.place)
                text = end[0] if end else letter
                self._literal(parts, text, self.place, False)
                self.place += len(text)
        return parts

    def _literal(self, parts: Parts, text: str, place: int, quoted: bool) -> None:
        """Adds literal text, a part per line."""
        for number, row in enumerate(text.split("\n")):
            line = self.line(place)
            parts.append(_WordPart("literal", ("\n" if number else "") + row, line, quoted))
            place += len(row) + 1

    def _unclosed(self, end: str, line: int) -> int:
        """Returns the end of the text, which has no `end`. Raises ValueError in a script."""
        if self.strict:
            raise ValueError(f"what begins on line {line} has no closing {end}")
        return len(self.text)

    def _until(self, parts: Parts, end: str, quoted: bool) -> None:
        """Reads text with expansions up to `end`."""
        start, opened = self.place, self.line()
        while self.place < len(self.text) and not self.peek(end):
            letter = self.text[self.place]
            if letter == "\\":
                self._literal(parts, self.text[start : self.place], start, quoted)
                escaped = self.text[self.place + 1 : self.place + 2]
                if escaped != "\n":
                    self._literal(parts, escaped if escaped in '$`"\\}' else f"\\{escaped}", self.place, quoted)
                self.place += 2
                start = self.place
            elif letter in "$`":
                self._literal(parts, self.text[start : self.place], start, quoted)
                parts.append(self._expansion(quoted))
                start = self.place
            elif letter == '"' and end == "}":
                self._literal(parts, self.text[start : self.place], start, quoted)
                self.place += 1
                self._until(parts, '"', True)
                self.place += 1
                start = self.place
            else:
                self.place += 1
        self._literal(parts, self.text[start : self.place], start, quoted)
        if self.place >= len(self.text):
            self._unclosed(end, opened)

    def _expansion(self, quoted: bool) -> _WordPart:
        line, start = self.line(), self.place
        if self.peek("`") or (self.peek("$(") and not self.peek("$((")):
            self._skip("`" if self.peek("`") else ")", 1 if self.peek("`") else 2)
            return _WordPart("command", self.text[start : self.place], line, quoted)
        if self.peek("$(("):
            self.place += 3
            parts = Parts()
            self._until(parts, "))", True)
            self.place += 2
            return _WordPart("arithmetic", self.text[start : self.place], line, quoted, parts=parts)
        self.place += 1
        if not self.peek("{"):
            found = _NAME.match(self.text, self.place) or _SPECIAL.match(self.text, self.place)
            if not found:
                return _WordPart("literal", "$", line, quoted)
            self.place = found.end()
            return _WordPart("variable", found[0], line, quoted)
        self.place += 1
        length = self.peek("#")
        self.place += length
        found = _NAME.match(self.text, self.place) or _SPECIAL.match(self.text, self.place)
        name = found[0] if found else ""
        self.place += len(name)
        if self.peek("[") and "]" in self.text[self.place :]:
            index = self.text[self.place : self.text.index("]", self.place) + 1]
            self.place += len(index)
            length = length or index not in ("[@]", "[*]")
        operation = re.compile(r":?[-=+?]").match(self.text, self.place)
        parts = Parts()
        if operation:
            self.place = operation.end()
        elif not self.peek("}"):
            length = True
        self._until(parts, "}", quoted)
        self.place += 1
        if length or not name:
            return _WordPart("command", self.text[start : self.place], line, quoted)
        return _WordPart("variable", name, line, quoted, operation[0] if operation else "", parts)

    def _skip(self, end: str, opening: int) -> None:
        """Passes a command substitution, with those inside of it."""
        self.place += opening
        depth, quote = 1, ""
        while self.place < len(self.text) and depth:
            letter = self.text[self.place]
            if letter == "\\":
                self.place += 1
            elif quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            elif letter == "(" and end == ")":
                depth += 1
            elif letter == end:
                depth -= 1
            self.place += 1


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}
LARGEST = 2**62


def arithmetic(text: str) -> int:
    """Returns a sum, difference, product, quotient or remainder of whole numbers. Raises ValueError for all else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            found = _OPERATORS[type(node.op)](value(node.left), value(node.right))
            if abs(found) > LARGEST:
                raise ValueError("too large")
            return found
        raise ValueError("not a sum of whole numbers")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


@dataclass
class Script:
    """The commands and variables that follow from a script."""

    commands: list[list[ScriptWord]]
    """Commands that run, expanded, and the words of here documents, in order."""
    doubtful: list[tuple[list[ScriptWord], str]]
    """Commands of which it does not follow that they run, and why."""
    variables: dict[str, list[ScriptWord]]
    """The last value of every variable; one of an array has several words."""
    sourced: list[ScriptWord]
    """Files whose commands run, too, and that are not read."""
    comments: list[tuple[int, str]]
    """Lines that begin with #SBATCH."""


MOST_WORDS = 50_000


def run_through(text: str) -> Script:
    """Returns what follows from a script. Raises RecursionError if it is nested too deeply."""
    reader = _ScriptReader()
    text = text.replace("\r\n", "\n")
    reader.block(_ScriptParser(text, strict=True).statements())
    comments = [(n, row) for n, row in enumerate(text.splitlines(), start=1) if row.startswith("#SBATCH")]
    return Script(reader.commands, reader.doubtful, reader.variables, reader.sourced, comments)


class _ScriptReader:
    def __init__(self) -> None:
        self.variables: dict[str, list[ScriptWord]] = {}
        self.commands: list[list[ScriptWord]] = []
        self.doubtful: list[tuple[list[ScriptWord], str]] = []
        self.sourced: list[ScriptWord] = []
        self.words = 0

    def block(self, statements: Sequence[_ScriptStatement]) -> None:
        for statement in statements:
            self._run(statement)

    def _run(self, statement: _ScriptStatement) -> None:
        if statement.joint in ("&&", "||") and statement.kind == "simple":
            self._lose(statement, "whether it runs depends on the command before it")
        elif statement.kind == "simple":
            self._simple(statement)
        elif statement.kind == "group":
            self.block(statement.branches[0][1])
        elif statement.kind == "if":
            self._branch(statement, [self._holds(condition) for condition, _ in statement.branches])
        elif statement.kind == "case":
            subject = self._one(statement.words[0])
            matches = [
                None if subject.why else any(fnmatchcase(subject.text, self._one(each).text) for each in patterns)
                for patterns, _ in statement.branches
            ]
            self._branch(statement, matches)
        else:
            loop = statement.kind == "loop"
            if loop and self._holds(statement.branches[0][0]) is False:
                return
            why = "it is set in a loop" if loop else "it is set in a function"
            for each in (*(statement.branches[0][0] or ()), *statement.branches[0][1]):
                self._lose(each, why)

    def _branch(self, statement: _ScriptStatement, holds: Sequence[bool | None]) -> None:
        """Runs the branch whose condition holds; if that is not known, what the branches set is not known either."""
        for held, (_, body) in zip(holds, statement.branches, strict=True):
            if held is None:
                why = f"the condition on line {statement.line} does not follow from the file"
                for _, each in statement.branches:
                    for inner in each:
                        self._lose(inner, why, doubtful=True)
                return
            if held:
                self.block(body)
                return

    def _lose(self, statement: _ScriptStatement, why: str, *, doubtful: bool = False) -> None:
        """Makes unknown what a statement sets. Its commands count, unless it is doubtful that they run."""
        self._assign(statement, why)
        for words in (statement.words, statement.heredoc):
            if words and statement.kind == "simple":
                command = self._expanded(words)
                self.doubtful += [(command, why)] if doubtful else []
                self.commands += [] if doubtful else [command]
        for head, body in statement.branches:
            for each in (
                *(head if isinstance(head, list) and head and isinstance(head[0], _ScriptStatement) else ()),
                *body,
            ):
                self._lose(each, why, doubtful=doubtful)

    def _simple(self, statement: _ScriptStatement) -> None:
        words = self._expanded(statement.words)
        if words and words[0].text in ("source", ".") and len(words) > 1:
            self.sourced.append(words[1])
        elif words and words[0].text == "unset":
            for word in words[1:]:
                self.variables.pop(word.text, None)
        if not words or words[0].text in _DECLARES:
            self._assign(statement)
        elif words[0].text == "read":
            for word in words[1:]:
                self.variables[word.text] = [
                    ScriptWord([ScriptText(word.text, 0, "", why="it is read as the script runs")])
                ]
        if words:
            self.commands.append(words)
        if statement.heredoc:
            self.commands.append(self._expanded(statement.heredoc))

    def _assign(self, statement: _ScriptStatement, why: str = "") -> None:
        for name, appends, value, is_array in statement.assignments:
            if is_array:
                words = self._expanded(value)
            else:
                words = [ScriptWord([each._replace(quoted=True) for each in self._segments(value[0])])]
            if why and not is_array:
                words = [ScriptWord([ScriptText(f"${name}", statement.line, "", True, why)])]
            elif why:
                empty = [ScriptText(name, statement.line, "", True)]
                words = [
                    ScriptWord([each._replace(why=each.why or why) for each in word.segments or empty])
                    for word in words
                ]
            before = self.variables.get(name, []) if appends else []
            if appends and not is_array and before:
                self.variables[name] = [*before[:-1], ScriptWord([*before[-1].segments, *words[0].segments])]
            else:
                self.variables[name] = words
            self.words += len(self.variables[name]) if not appends else len(words)
            if appends and is_array:
                self.variables[name] = [*before, *words]
        if self.words > MOST_WORDS:
            raise ValueError(f"more than {MOST_WORDS:,} words")

    def _one(self, parts: Parts) -> ScriptWord:
        return ScriptWord(self._segments(parts))

    def _expanded(self, words: Sequence[Parts]) -> list[ScriptWord]:
        found = list[ScriptWord]()
        for parts in words:
            found += _split(self._segments(parts), keeps=any(part.quoted for part in parts))
        self.words += len(found)
        if self.words > MOST_WORDS:
            raise ValueError(f"more than {MOST_WORDS:,} words")
        return found

    def _segments(self, parts: Parts) -> Value:
        found = Value()
        for part in parts:
            found += self._part(part)
        if sum(len(each.text) for each in found) > 2**20:
            raise ValueError("a value of more than a million characters")
        return found

    def _part(self, part: _WordPart) -> Value:
        if part.kind == "literal":
            return [ScriptText(part.text, part.line, part.text, part.quoted)]
        if part.kind == "command":
            return [ScriptText(part.text, part.line, part.text, part.quoted, "a command is not executed")]
        if part.kind == "arithmetic":
            inner = self._segments(part.parts)
            text = "".join(each.text for each in inner)
            why = next((each.why for each in inner if each.why), "")
            known = re.sub(r"[A-Za-z_]\w*", lambda name: self._plain(name[0]), text)
            try:
                return [ScriptText(str(arithmetic(known)), part.line, part.text, part.quoted, why)]
            except ValueError:
                return [ScriptText(part.text, part.line, part.text, part.quoted, why or "it is not computed")]
        return self._variable(part)

    def _plain(self, name: str) -> str:
        words = self.variables.get(name, [])
        return words[0].text if len(words) == 1 and not words[0].why else name

    def _variable(self, part: _WordPart) -> Value:
        name, operation = part.text, part.operation
        source = f"${{{name}}}" if operation else f"${name}"
        if name == "#":
            return [ScriptText("0", part.line, "$#", part.quoted)]
        words = self.variables.get(name)
        empty = words is None or not "".join(word.text for word in words)
        missing = empty if operation.startswith(":") else words is None
        if operation[-1:] in ("-", "=") and missing:
            return [each._replace(quoted=each.quoted or part.quoted) for each in self._segments(part.parts)]
        if operation[-1:] == "+":
            return [] if missing else self._segments(part.parts)
        if words is None:
            if name.isdigit() or name in "@*":
                return [ScriptText(source, part.line, source, part.quoted, "it is an argument of the script")]
            why = f"{name} is not set in the file"
            return [ScriptText(source, part.line, source, part.quoted, why)]
        found = Value()
        for number, word in enumerate(words):
            if number:
                found.append(ScriptText(" ", part.line, " ", False))
            found += [each._replace(quoted=part.quoted and len(words) == 1) for each in word.segments]
        return found

    def _holds(self, statements: Sequence[_ScriptStatement] | None) -> bool | None:
        """Returns whether a condition holds; None if that does not follow from the file."""
        if statements is None:
            return True
        found: bool | None = None
        negates = False
        for statement in statements:
            if statement.kind == "group" and not statement.branches[0][1]:
                negates = True
                continue
            if statement.kind != "simple":
                return None
            held = self._test([self._one(parts) for parts in statement.words])
            held = held if held is None or not negates else not held
            negates = False
            if statement.joint == "&&":
                found = False if False in (found, held) else None if None in (found, held) else True
            elif statement.joint == "||":
                found = True if True in (found, held) else None if None in (found, held) else False
            else:
                found = held
        return found

    def _test(self, words: list[ScriptWord]) -> bool | None:
        if words and words[0].text in ("true", "false"):
            return words[0].text == "true"
        if not words or words[0].text not in ("[", "[[", "test"):
            return None
        inner = words[1:-1] if words[-1].text == "]" else words[1:]
        for joint, joined in (("||", any), ("&&", all)):
            places = [n for n, word in enumerate(inner) if word.text == joint]
            if places:
                edges = [-1, *places, len(inner)]
                several = [self._compared(inner[a + 1 : b]) for a, b in pairwise(edges)]
                decisive = joint == "||"
                return decisive if decisive in several else None if None in several else joined(map(bool, several))
        return self._compared(inner)

    def _compared(self, words: list[ScriptWord]) -> bool | None:
        if words and words[0].text == "!":
            found = self._compared(words[1:])
            return None if found is None else not found
        unset = [each.why.endswith("is not set in the file") for each in words]
        if len(words) == 2 and words[0].text in ("-z", "-n"):
            if words[1].why and not unset[1]:
                return None
            empty = unset[1] or not words[1].text
            return empty if words[0].text == "-z" else not empty
        if len(words) != 3 or any(each.why and not missing for each, missing in zip(words, unset, strict=True)):
            return None
        one, comparison, other = ("" if missing else each.text for each, missing in zip(words, unset, strict=True))
        if comparison in ("=", "=="):
            return fnmatchcase(one, other)
        if comparison == "!=":
            return not fnmatchcase(one, other)
        orders = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge}
        orders |= {"-lt": operator.lt, "-le": operator.le}
        if comparison in orders and re.fullmatch("-?[0-9]{1,18}", one) and re.fullmatch("-?[0-9]{1,18}", other):
            return orders[comparison](int(one), int(other))
        return None


def _split(segments: Value, *, keeps: bool) -> list[ScriptWord]:
    """Returns the words that the shell makes of expanded text. With `keeps`, an empty quoted text is a word."""
    found, current = list[ScriptWord](), Value()
    for segment in segments:
        if segment.quoted or segment.why:
            current.append(segment)
            continue
        for piece in re.findall(r"\s+|[^\s]+", segment.text):
            if piece.isspace():
                if current:
                    found.append(ScriptWord(current))
                current = Value()
            else:
                source = segment.source if piece == segment.text else piece
                current.append(ScriptText(piece, segment.line, source, False))
    if current and (keeps or any(each.text or each.why for each in current)):
        found.append(ScriptWord(current))
    return found


def words_of(text: ScriptWord) -> list[ScriptWord]:
    """Returns the words within a word of several, as a command line in quotes has."""
    return _split([each._replace(quoted=False) for each in text.segments], keeps=False)
