"""Parses a shell script into statements, without executing anything."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
class WordPart:
    kind: str
    """literal, variable, arithmetic, or command."""
    text: str
    line: int
    quoted: bool
    operation: str = ""
    parts: list[WordPart] = field(default_factory=list)


Parts = list[WordPart]
_Assignment = tuple[str, bool, list[Parts], bool]
"""Name, whether it appends, its words, and whether it is an array; one that is none has one word."""


@dataclass
class ScriptStatement:
    kind: str
    """simple, if, case, loop, function, group, subshell, or arithmetic."""
    line: int
    branches: list[tuple[Any, list[ScriptStatement]]] = field(default_factory=list)
    words: list[Parts] = field(default_factory=list)
    joint: str = ";"
    """The operator before it: ; && || or |."""
    assignments: list[_Assignment] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    """Arrays of which it sets one item."""
    heredoc: list[Parts] = field(default_factory=list)


_STOP = r"[ \t\n;&|()<>]"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]"
_ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ";;"}
DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_SETS = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)?(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""What changes a variable in arithmetic."""


def changed_by(expression: str) -> set[str]:
    """Returns the names of variables that an arithmetic expression changes."""
    return {one or two for one, two in _SETS.findall(expression)}


def _with_inner(words: list[Parts]) -> list[Parts]:
    """Returns the words of a here document whose variables are those of the script in it: what it sets itself does not
    follow."""
    own = {found[1] for parts in words if parts and (found := re.match(r"([A-Za-z_]\w*)\+?=", parts[0].text))}
    return [
        [replace(part, kind="inner") if part.kind == "variable" and part.text in own else part for part in parts]
        for parts in words
    ]


class ScriptParser:
    """Parses a script into statements."""

    def __init__(self, text: str, *, strict: bool = False):
        self.text, self.place, self.strict = text, 0, strict
        self.starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self.waiting: list[tuple[str, bool, bool, ScriptStatement]] = []
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
        for end, strips, quoted, statement in self.waiting:
            begins, literal = len(statement.heredoc), quoted
            while self.place < len(self.text):
                first, found = self.line(), self.match(r"[^\n]*")
                row = found[0] if found else ""
                self.place += 1
                if (row.lstrip("\t") if strips else row) == end:
                    break
                literal = literal or "\\$" in row
                for parts in ScriptParser(row.replace("\\$", "$")).words():
                    statement.heredoc.append([replace(part, line=part.line + first - 1) for part in parts])
            if literal:
                statement.heredoc[begins:] = _with_inner(statement.heredoc[begins:])
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

    def statements(self, *ends: str) -> list[ScriptStatement]:
        found, joint = list[ScriptStatement](), ";"
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

    def _body(self, *ends: str) -> list[ScriptStatement]:
        """Returns the statements up to an end, and passes it."""
        found = self.statements(*ends)
        self.passed(ends[0])
        return found

    def _statement(self, word: str) -> ScriptStatement:
        line = self.line()
        if word == "if":
            return self._if(line)
        if word == "case":
            return self._case(line)
        if word in ("for", "while", "until", "select"):
            self.place += len(word)
            head = self.statements("do") if word != "for" else self._skipped_head()
            self.passed("do")
            return ScriptStatement("loop", line, [(head, self._body("done"))])
        if sum_ := self.match(r"\(\((?:[^()]|\([^()]*\))*\)\)"):
            return ScriptStatement("arithmetic", line, words=[[WordPart("literal", sum_[0], line, False)]])
        if word in ("{", "!") or self.peek("("):
            kind = "subshell" if self.peek("(") else "group"
            self.place += 1
            body = self.statements("}" if word == "{" else ")") if word != "!" else []
            self.place += word != "!"
            return ScriptStatement(kind, line, [(None, body)])
        if opening := self.match(r"(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\s*\)\s*\{|function\s+([\w-]+)\s*\{"):
            name = [WordPart("literal", opening[1] or opening[2], line, False)]
            return ScriptStatement("function", line, [(None, self._body("}"))], [name])
        if word in _ENDS:
            self.place += len(word)
            return ScriptStatement("simple", line)
        return self._simple(line)

    def _skipped_head(self) -> list[ScriptStatement]:
        end = re.compile(r"\bdo\b|\{").search(self.text, self.place)
        head = self.text[self.place : end.start() if end else len(self.text)]
        self.place += len(head)
        name = re.match(_VARIABLE, head.strip())
        names = [name[0]] if name else sorted(changed_by(head))
        return [ScriptStatement("simple", 0, assignments=[(each, False, [[]], False) for each in names])]

    def _if(self, line: int) -> ScriptStatement:
        found, word = ScriptStatement("if", line), "if"
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

    def _case(self, line: int) -> ScriptStatement:
        self.place += 4
        self.more()
        found = ScriptStatement("case", line, words=[self.word()])
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

    def _simple(self, line: int) -> ScriptStatement:
        found, declares = ScriptStatement("simple", line), True
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
                elif one:
                    found.items.append(assigns[1])
                    self.word()
                else:
                    found.assignments.append((assigns[1], appends, [self.word()], False))
            else:
                word = self.word()
                plain = "".join(part.text for part in word) if all(p.kind == "literal" for p in word) else ""
                if not found.words and word and (word[0].kind, word[0].text) == ("literal", "[["):
                    found.words = [word, *self._test()]
                    break
                declares = declares and (plain in DECLARES or (bool(found.words) and plain.startswith("-")))
                found.words.append(word)
        self.match(r"&(?!&)")
        return found

    def _test(self) -> list[Parts]:
        found = list[Parts]()
        while self.more("]]"):
            line = self.line()
            if sign := self.match(r"&&|\|\||[<>()]|=~|\n"):
                found += [[WordPart("literal", sign[0], line, False)]] if sign[0] != "\n" else []
            elif parts := self.word():
                found.append(parts)
            else:
                self.place += 1
        self.passed("]]")
        return found

    def _redirect(self, statement: ScriptStatement) -> None:
        if document := self.match(r"<<(?!<)(-?)\s*(['\"]?)([\w!]+)\2"):
            self.waiting.append((document[3], bool(document[1]), bool(document[2]), statement))
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
            parts.append(WordPart("literal", ("\n" if number else "") + row, self.line(place), quoted))
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

    def _expansion(self, quoted: bool) -> WordPart:
        line, start = self.line(), self.place
        parts = Parts()

        def part(kind: str, text: str = "", operation: str = "") -> WordPart:
            return WordPart(kind, text or self.text[start : self.place], line, quoted, operation, parts)

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
