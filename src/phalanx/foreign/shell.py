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
from itertools import chain, pairwise
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
_Assignment = tuple[str, bool, list[Parts], bool]
"""Name, whether it appends, its words, and whether it is an array; one that is none has one word."""


@dataclass
class _ScriptStatement:
    kind: str
    """simple, if, case, loop, function, or group."""
    line: int
    branches: list[tuple[Any, list[_ScriptStatement]]] = field(default_factory=list)
    words: list[Parts] = field(default_factory=list)
    joint: str = ";"
    """The operator before it: ; && || or |."""
    assignments: list[_Assignment] = field(default_factory=list)
    heredoc: list[Parts] = field(default_factory=list)


_STOP = r"[ \t\n;&|()<>]"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]"
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

    def match(self, pattern: str) -> re.Match[str] | None:
        """Passes a pattern that begins here."""
        if found := re.compile(pattern).match(self.text, self.place):
            self.place = found.end()
        return found

    def passed(self, text: str) -> bool:
        """Passes a text if it begins here, and returns whether it does."""
        found = self.peek(text)
        self.place += len(text) if found else 0
        return found

    def more(self, end: str = "") -> bool:
        """Passes blanks and comments, and returns whether there is more before `end`."""
        self.match(r"(?:\\\n|[ \t]|(?<![^ \t\n;])#[^\n]*)*")
        return self.place < len(self.text) and not (end and self.peek(end))

    def newline(self) -> None:
        """Passes the end of a line, and the here documents after it."""
        self.place += 1
        for end, strips, statement in self.waiting:
            while self.place < len(self.text):
                first, found = self.line(), self.match(r"[^\n]*")
                row = found[0] if found else ""
                self.place += 1
                if (row.lstrip("\t") if strips else row) == end:
                    break
                for parts in _ScriptParser(row.replace("\\$", "$")).words():
                    statement.heredoc.append([replace(part, line=part.line + first - 1) for part in parts])
        self.waiting = []

    def words(self, end: str = "") -> Iterator[Parts]:
        """Yields the words up to `end`, whatever separates them."""
        while self.more(end):
            before = self.place
            if self.peek("\n"):
                self.newline()
            elif parts := self.word():
                yield parts
            self.place += self.place == before

    def statements(self, *ends: str) -> list[_ScriptStatement]:
        found, joint = list[_ScriptStatement](), ";"
        while self.more():
            if self.peek("\n"):
                self.newline()
                joint = ";"
            elif stop := next((each for each in (";;", ")") if self.peek(each)), ""):
                if stop in ends:
                    break
                self.place += len(stop)
            elif sign := self.match(r"&&|\|\||[;&|]"):
                joint = sign[0] if sign[0] in ("&&", "||", "|") else ";"
            else:
                word, before = self._keyword(), self.place
                if word in ends:
                    break
                found.append(self._statement(word))
                found[-1].joint, joint = joint, ";"
                self.place += self.place == before
        return found

    def _keyword(self) -> str:
        found = re.compile(rf"(?:[A-Za-z]+|[{{}}!])(?={_STOP}|\Z)").match(self.text, self.place)
        return found[0] if found else ""

    def _body(self, *ends: str) -> list[_ScriptStatement]:
        """Returns the statements up to an end, and passes it."""
        found = self.statements(*ends)
        self.passed(ends[0])
        return found

    def _statement(self, word: str) -> _ScriptStatement:
        line = self.line()
        if word == "if":
            return self._if(line)
        if word == "case":
            return self._case(line)
        if word in ("for", "while", "until", "select"):
            self.place += len(word)
            head = self.statements("do") if word != "for" else self._skipped_head()
            self.passed("do")
            return _ScriptStatement("loop", line, [(head, self._body("done"))])
        if word in ("{", "!") or self.peek("("):
            self.place += 1
            body = self.statements("}" if word == "{" else ")") if word != "!" else []
            self.place += word != "!"
            return _ScriptStatement("group", line, [(None, body)])
        if self.match(r"(?:function\s+)?[A-Za-z_][\w-]*\s*\(\s*\)\s*\{|function\s+[\w-]+\s*\{"):
            return _ScriptStatement("function", line, [(None, self._body("}"))])
        if word in _ENDS:
            self.place += len(word)
            return _ScriptStatement("simple", line)
        return self._simple(line)

    def _skipped_head(self) -> list[_ScriptStatement]:
        end = re.compile(r"\bdo\b|\{").search(self.text, self.place)
        head = self.text[self.place : end.start() if end else len(self.text)]
        self.place += len(head)
        name = re.match(_VARIABLE, head.strip())
        return [_ScriptStatement("simple", 0, assignments=[(name[0], False, [[]], False)])] if name else []

    def _if(self, line: int) -> _ScriptStatement:
        found, word = _ScriptStatement("if", line), "if"
        while word in ("if", "elif"):
            self.place += len(word)
            condition = self._body("then")
            found.branches.append((condition, self.statements("elif", "else", "fi")))
            word = self._keyword()
        if word == "else":
            self.place += 4
            found.branches.append((None, self.statements("fi")))
        self.passed("fi")
        return found

    def _case(self, line: int) -> _ScriptStatement:
        self.place += 4
        self.more()
        found = _ScriptStatement("case", line, words=[self.word()])
        self.more()
        self.passed("in")
        while self.more():
            if self.peek("\n"):
                self.newline()
                continue
            if self._keyword() == "esac":
                break
            self.passed("(")
            patterns = self._array()
            found.branches.append((patterns, self.statements(";;", "esac")))
            self.passed(";;")
        self.passed("esac")
        return found

    def _array(self) -> list[Parts]:
        """Returns the words up to a closing parenthesis, and passes it."""
        found = [*self.words(")")]
        self.place += 1
        return found

    def _simple(self, line: int) -> _ScriptStatement:
        found, declares = _ScriptStatement("simple", line), True
        while self.more() and not re.compile(r"[\n;|)]|&&|&(?!>)").match(self.text, self.place):
            if self.passed("&"):
                continue
            if self.peek("("):
                options = any(word and word[0].text.startswith("--") for word in found.words)
                if self.strict and options and self.text[self.place - 1] not in "<>@?*+!":
                    raise ValueError(f"line {self.line()} has a ( outside of quotes")
                self.place += 1
                continue
            if self.text[self.place] in "<>":
                self._redirect(found)
            elif declares and (assigns := self.match(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?)=")):
                one, appends = bool(assigns[2]), bool(assigns[3])
                if self.peek("(") and not one:
                    self.place += 1
                    found.assignments.append((assigns[1], appends, self._array(), True))
                else:
                    found.assignments.append((assigns[1], appends or one, [self.word()], False))
            else:
                word = self.word()
                plain = "".join(part.text for part in word) if all(p.kind == "literal" for p in word) else ""
                if not found.words and word and (word[0].kind, word[0].text) == ("literal", "[["):
                    found.words = [word, *self._test()]
                    break
                declares = declares and (plain in _DECLARES or (bool(found.words) and plain.startswith("-")))
                found.words.append(word)
        self.match(r"&(?!&)")
        return found

    def _test(self) -> list[Parts]:
        found = list[Parts]()
        while self.more("]]"):
            line = self.line()
            if sign := self.match(r"&&|\|\||[<>()]|=~|\n"):
                found += [[_WordPart("literal", sign[0], line, False)]] if sign[0] != "\n" else []
            elif parts := self.word():
                found.append(parts)
            else:
                self.place += 1
        self.passed("]]")
        return found

    def _redirect(self, statement: _ScriptStatement) -> None:
        if document := self.match(r"<<(?!<)(-?)\s*(['\"]?)([\w!]+)\2"):
            self.waiting.append((document[3], bool(document[1]), statement))
            return
        self.match(r"[<>]+[&|]?")
        if self.more() and not self.peek("\n"):
            self.word()

    def word(self) -> Parts:
        """Returns the parts of the word at this place; [] if there is none."""
        parts = Parts()
        while self.place < len(self.text):
            start, opened = self.place, self.line()
            if self.passed("\\\n"):
                continue
            if self.text[start] in " \t\n;&|()<>":
                break
            if self.passed("'"):
                end = self.text.find("'", start + 1)
                end = self._unclosed("'", opened) if end < 0 else end
                self._literal(parts, self.text[start + 1 : end], start + 1, True)
                self.place = end + 1
            elif self.passed('"'):
                self._until(parts, '"', True)
            elif self.passed("\\"):
                self._literal(parts, self.text[start + 1 : start + 2], start, True)
                self.place += 1
            elif self.text[start] in "$`":
                parts.append(self._expansion(False))
            else:
                self.place += 1
                self.match(r"[^\s;&|()<>'\"\\$`]*")
                self._literal(parts, self.text[start : self.place], start, False)
        return parts

    def _literal(self, parts: Parts, text: str, place: int, quoted: bool) -> None:
        """Adds literal text, a part per line."""
        for number, row in enumerate(text.split("\n")):
            parts.append(_WordPart("literal", ("\n" if number else "") + row, self.line(place), quoted))
            place += len(row) + 1

    def _unclosed(self, end: str, line: int) -> int:
        """Returns the end of the text, which has no `end`. Raises ValueError in a script."""
        if self.strict:
            raise ValueError(f"what begins on line {line} has no closing {end}")
        return len(self.text)

    def _until(self, parts: Parts, end: str, quoted: bool) -> None:
        """Reads text with expansions up to `end`, and passes it."""
        opened = self.line()
        while True:
            start = self.place
            while self.place < len(self.text) and not self.peek(end) and self.text[self.place] not in '\\$`"':
                self.place += 1
            if self.peek('"') and end not in ('"', "}"):
                self.place += 1
                self._literal(parts, self.text[start : self.place], start, quoted)
                continue
            self._literal(parts, self.text[start : self.place], start, quoted)
            start = self.place
            if start >= len(self.text) or self.passed(end):
                break
            if self.passed("\\"):
                letter = self.text[self.place : self.place + 1]
                if letter != "\n":
                    self._literal(parts, letter if letter in '$`"\\}' else f"\\{letter}", start, quoted)
                self.place += 1
            elif self.passed('"'):
                self._until(parts, '"', True)
            else:
                parts.append(self._expansion(quoted))
        if start >= len(self.text):
            self._unclosed(end, opened)
            self.place += len(end)

    def _expansion(self, quoted: bool) -> _WordPart:
        line, start = self.line(), self.place
        parts = Parts()

        def part(kind: str, text: str = "", operation: str = "") -> _WordPart:
            return _WordPart(kind, text or self.text[start : self.place], line, quoted, operation, parts)

        if self.passed("$(("):
            self._until(parts, "))", True)
            return part("arithmetic")
        if opening := self.match(r"`|\$\("):
            end = "`" if opening[0] == "`" else ")"
            depth, quote = 1, ""
            while self.place < len(self.text) and depth:
                letter = self.text[self.place]
                if letter == "\\":
                    self.place += 1
                elif quote:
                    quote = "" if letter == quote else quote
                elif letter in "'\"":
                    quote = letter
                else:
                    depth += (letter == "(" and end == ")") - (letter == end)
                self.place += 1
            return part("command")
        self.place += 1
        if not self.passed("{"):
            found = self.match(_VARIABLE)
            return part("variable", found[0]) if found else part("literal", "$")
        length = self.passed("#")
        found = self.match(_VARIABLE)
        if index := self.match(r"\[[^\]]*\]"):
            length = length or index[0] not in ("[@]", "[*]")
        operation = self.match(r":?[-=+?]")
        length = length or not (operation or self.peek("}"))
        self._until(parts, "}", quoted)
        if length or not found:
            return part("command")
        return part("variable", found[0], operation[0] if operation else "")


LARGEST = 2**62
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}


def arithmetic(text: str) -> int:
    """Returns a sum, difference, product, quotient or remainder of whole numbers. Raises ValueError for all else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            found = _OPERATORS[type(node.op)](value(node.left), value(node.right))
            if abs(found) <= LARGEST:
                return found
        raise ValueError("not a sum of whole numbers, or too large")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


@dataclass
class Script:
    """The commands and variables that follow from a script."""

    commands: list[list[ScriptWord]] = field(default_factory=list)
    """Commands that run, expanded, and the words of here documents, in order."""
    doubtful: list[tuple[list[ScriptWord], str]] = field(default_factory=list)
    """Commands of which it does not follow that they run, and why."""
    variables: dict[str, list[ScriptWord]] = field(default_factory=dict)
    """The last value of every variable; one of an array has several words."""
    sourced: list[ScriptWord] = field(default_factory=list)
    """Files whose commands run, too, and that are not read."""
    comments: list[tuple[int, str]] = field(default_factory=list)
    """Lines that begin with #SBATCH."""


MOST_WORDS = 50_000


def run_through(text: str) -> Script:
    """Returns what follows from a script. Raises RecursionError if it is nested too deeply."""
    text = text.replace("\r\n", "\n")
    script = Script(comments=[(n, row) for n, row in enumerate(text.splitlines(), 1) if row.startswith("#SBATCH")])
    _ScriptReader(script).block(_ScriptParser(text, strict=True).statements())
    return script


def _is_unset(word: ScriptWord) -> bool:
    return word.why.endswith("is not set in the file")


def _all(several: Sequence[bool | None]) -> bool | None:
    """Returns whether all hold; None if that is not known."""
    return False if False in several else None if None in several else True


def _not(held: bool | None) -> bool | None:
    return None if held is None else not held


_ORDERS: dict[str, Callable[[int, int], bool]] = {
    f"-{each.__name__}": each for each in (operator.eq, operator.ne, operator.gt, operator.ge, operator.lt, operator.le)
}


class _ScriptReader:
    """Fills a script with what its statements do."""

    def __init__(self, script: Script) -> None:
        self.script, self.variables, self.words = script, script.variables, 0

    def block(self, statements: Sequence[_ScriptStatement]) -> None:
        for statement in statements:
            self._run(statement)

    def _run(self, statement: _ScriptStatement) -> None:
        branches = statement.branches
        if statement.kind == "simple" and statement.joint in ("&&", "||"):
            self._lose(statement, "whether it runs depends on the command before it")
        elif statement.kind == "simple":
            self._simple(statement)
        elif statement.kind == "group":
            self.block(branches[0][1])
        elif statement.kind == "if":
            self._branch(statement, [self._holds(condition) for condition, _ in branches])
        elif statement.kind == "case":
            subject, names = self._one(statement.words[0]), [[self._one(p).text for p in some] for some, _ in branches]
            held = [None if subject.why else any(fnmatchcase(subject.text, name) for name in some) for some in names]
            self._branch(statement, held)
        elif statement.kind == "function" or self._holds(branches[0][0]) is not False:
            for each in (*(branches[0][0] or ()), *branches[0][1]):
                self._lose(each, f"it is set in a {statement.kind}")

    def _branch(self, statement: _ScriptStatement, holds: Sequence[bool | None]) -> None:
        """Runs the branch whose condition holds; if that is not known, what the branches set is not known either."""
        for held, (_, body) in zip(holds, statement.branches, strict=True):
            if held is None:
                why = f"the condition on line {statement.line} does not follow from the file"
                for inner in chain.from_iterable(each for _, each in statement.branches):
                    self._lose(inner, why, doubtful=True)
            elif held:
                self.block(body)
            if held is not False:
                return

    def _lose(self, statement: _ScriptStatement, why: str, *, doubtful: bool = False) -> None:
        """Makes unknown what a statement sets. Its commands count, unless it is doubtful that they run."""
        self._assign(statement, why)
        for words in (statement.words, statement.heredoc):
            if words and statement.kind == "simple" and doubtful:
                self.script.doubtful.append((self._expanded(words), why))
            elif words and statement.kind == "simple":
                self.script.commands.append(self._expanded(words))
        for head, body in statement.branches:
            for each in (*(each for each in head or () if isinstance(each, _ScriptStatement)), *body):
                self._lose(each, why, doubtful=doubtful)

    def _simple(self, statement: _ScriptStatement) -> None:
        words = self._expanded(statement.words)
        name = words[0].text if words else ""
        if name.startswith("--") and words[0].segments[0].source == words[0].segments[0].text:
            raise ValueError(
                f"line {statement.line} begins a command with {name}: a line before it must end in \\, with no blank "
                "and no comment behind it"
            )
        if name in ("source", ".") and len(words) > 1:
            self.script.sourced.append(words[1])
        for word in words[1:]:
            if name == "unset":
                self.variables.pop(word.text, None)
            elif name == "read":
                text = ScriptText(word.text, 0, "", why="it is read as the script runs")
                self.variables[word.text] = [ScriptWord([text])]
        if not words or name in _DECLARES:
            self._assign(statement)
        self.script.commands += [words] if words else []
        self.script.commands += [self._expanded(statement.heredoc)] if statement.heredoc else []

    def _assign(self, statement: _ScriptStatement, why: str = "") -> None:
        for name, appends, value, is_array in statement.assignments:
            words = self._expanded(value) if is_array else [self._one(value[0], quoted=True)]
            if why and is_array:
                empty = [ScriptText(name, statement.line, "", True)]
                words = [
                    ScriptWord([each._replace(why=each.why or why) for each in w.segments or empty]) for w in words
                ]
            elif why:
                words = [ScriptWord([ScriptText(f"${name}", statement.line, "", True, why)])]
            before = self.variables.get(name, []) if appends else []
            if before and not is_array:
                words = [ScriptWord([*before[-1].segments, *words[0].segments])]
                before = before[:-1]
            self.variables[name] = [*before, *words]
            self._count(len(words))

    def _count(self, words: int) -> None:
        self.words += words
        if self.words > MOST_WORDS:
            raise ValueError(f"more than {MOST_WORDS:,} words")

    def _one(self, parts: Parts, *, quoted: bool = False) -> ScriptWord:
        found = self._segments(parts)
        return ScriptWord([each._replace(quoted=True) for each in found] if quoted else found)

    def _expanded(self, words: Sequence[Parts]) -> list[ScriptWord]:
        found = list[ScriptWord]()
        for parts in words:
            found += _split(self._segments(parts), keeps=any(part.quoted for part in parts))
        self._count(len(found))
        return found

    def _segments(self, parts: Parts) -> Value:
        found = [*chain.from_iterable(map(self._part, parts))]
        if sum(len(each.text) for each in found) > 2**20:
            raise ValueError("a value of more than a million characters")
        return found

    def _part(self, part: _WordPart) -> Value:
        text, why = part.text, ""
        if part.kind == "variable":
            return self._variable(part)
        if part.kind == "command":
            why = "a command is not executed"
        elif part.kind == "arithmetic":
            inner = self._one(part.parts)
            try:
                text = str(arithmetic(re.sub(r"[A-Za-z_]\w*", lambda name: self._plain(name[0]), inner.text)))
                why = inner.why
            except ValueError:
                why = inner.why or "it is not computed"
        return [ScriptText(text, part.line, part.text, part.quoted, why)]

    def _plain(self, name: str) -> str:
        words = self.variables.get(name, [])
        return words[0].text if len(words) == 1 and not words[0].why else name

    def _variable(self, part: _WordPart) -> Value:
        name, operation = part.text, part.operation
        source = f"${{{name}}}" if operation else f"${name}"
        if name == "#":
            return [ScriptText("0", part.line, "$#", part.quoted)]
        words = self.variables.get(name)
        missing = words is None or (operation.startswith(":") and not "".join(word.text for word in words))
        if operation[-1:] in ("-", "=") and missing:
            return [each._replace(quoted=each.quoted or part.quoted) for each in self._segments(part.parts)]
        if operation[-1:] == "+":
            return [] if missing else self._segments(part.parts)
        if words is None:
            argument = name.isdigit() or name in "@*"
            why = "it is an argument of the script" if argument else f"{name} is not set in the file"
            return [ScriptText(source, part.line, source, part.quoted, why)]
        found = Value()
        for number, word in enumerate(words):
            found += [ScriptText(" ", part.line, " ", False)] if number else []
            found += [each._replace(quoted=part.quoted and len(words) == 1) for each in word.segments]
        return found

    def _holds(self, statements: Sequence[_ScriptStatement] | None) -> bool | None:
        """Returns whether a condition holds; None if that does not follow from the file."""
        found = True if statements is None else None
        negates = False
        for statement in statements or ():
            if statement.kind == "group" and not statement.branches[0][1]:
                negates = True
                continue
            if statement.kind != "simple":
                return None
            held = self._test([self._one(parts) for parts in statement.words])
            held, negates = _not(held) if negates else held, False
            if statement.joint == "&&":
                found = _all((found, held))
            else:
                found = _not(_all((_not(found), _not(held)))) if statement.joint == "||" else held
        return found

    def _test(self, words: list[ScriptWord]) -> bool | None:
        if words and words[0].text in ("true", "false"):
            return words[0].text == "true"
        if not words or words[0].text not in ("[", "[[", "test"):
            return None
        inner = words[1:-1] if words[-1].text == "]" else words[1:]
        for joint in ("||", "&&"):
            places = [n for n, word in enumerate(inner) if word.text == joint]
            if places:
                several = [self._compared(inner[a + 1 : b]) for a, b in pairwise([-1, *places, len(inner)])]
                return _all(several) if joint == "&&" else _not(_all([*map(_not, several)]))
        return self._compared(inner)

    def _compared(self, words: list[ScriptWord]) -> bool | None:
        if words and words[0].text == "!":
            return _not(self._compared(words[1:]))
        if len(words) == 2 and words[0].text in ("-z", "-n"):
            empty = _is_unset(words[1]) or not words[1].text
            return None if words[1].why and not _is_unset(words[1]) else empty == (words[0].text == "-z")
        if len(words) != 3 or any(each.why and not _is_unset(each) for each in words):
            return None
        one, comparison, other = ("" if _is_unset(each) else each.text for each in words)
        if comparison in ("=", "==", "!="):
            return fnmatchcase(one, other) == (comparison != "!=")
        numbers = all(re.fullmatch("-?[0-9]{1,18}", each) for each in (one, other))
        return _ORDERS[comparison](int(one), int(other)) if comparison in _ORDERS and numbers else None


def _split(segments: Value, *, keeps: bool) -> list[ScriptWord]:
    """Returns the words that the shell makes of expanded text. With `keeps`, an empty quoted text is a word."""
    found, current = list[ScriptWord](), Value()
    for segment in segments:
        if segment.quoted or segment.why:
            current.append(segment)
            continue
        for piece in re.findall(r"\s+|[^\s]+", segment.text):
            if not piece.isspace():
                current.append(ScriptText(piece, segment.line, segment.source if piece == segment.text else piece))
            elif current:
                found.append(ScriptWord(current))
                current = Value()
    if current and (keeps or any(each.text or each.why for each in current)):
        found.append(ScriptWord(current))
    return found


def words_of(text: ScriptWord) -> list[ScriptWord]:
    """Returns the words within a word of several, as a command line in quotes has."""
    return _split([each._replace(quoted=False) for each in text.segments], keeps=False)
