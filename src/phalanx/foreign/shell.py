"""Reads a shell script as far as its values follow from it, without executing anything.

Understood are assignments, arrays, quotes, continued lines, `$X`, `${X:-default}`, `$((…))` of whole numbers, here
documents, and conditions that compare known texts. Variables of the environment and arguments of the script count as
unset. Whatever else a value depends on (`$(…)`, `((…))`, `let`, `eval`, a loop, a function that is called, a file that
is sourced) makes it unresolved, with the reason.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, pairwise

from phalanx.foreign.shell_parser import (
    DECLARES,
    Parts,
    ScriptParser,
    ScriptStatement,
    ScriptText,
    ScriptWord,
    Value,
    WordPart,
    changed_by,
)

_HARMLESS = re.compile(
    r"\b(conda|mamba|micromamba|pyenv|direnv|brew|spack|module|modulecmd|lmod|ssh-agent|dircolors|tput|resize)\b"
)
"""Programs whose output, as `eval` runs it, sets up a session and no value of a training command."""
_SESSION = re.compile(r"(^|/)(activate|deactivate|\.?bashrc|\.?(bash_|z)?profile|conda\.sh|modules?\.sh|init/(ba)?sh)$")
"""Files that set up a session."""
LARGEST = 2**62
ARGUMENT = "it is an argument of the script"
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
    evaluated: list[ScriptWord] = field(default_factory=list)
    """Texts that `eval` runs, and that do not follow from the file."""
    comments: list[tuple[int, str]] = field(default_factory=list)
    """Lines that begin with #SBATCH."""


MOST_WORDS = 50_000


def run_through(text: str) -> Script:
    """Returns what follows from a script. Raises RecursionError if it is nested too deeply."""
    text = text.replace("\r\n", "\n")
    script = Script(comments=[(n, row) for n, row in enumerate(text.splitlines(), 1) if row.startswith("#SBATCH")])
    _ScriptReader(script).block(ScriptParser(text, strict=True).statements())
    return script


def _is_unset(word: ScriptWord) -> bool:
    return word.why.endswith("is not set in the file")


def is_absent(word: ScriptWord) -> bool:
    """Returns whether a word is a variable of the environment or an argument of the script, which count as unset."""
    return _is_unset(word) or word.why == ARGUMENT


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
        self.functions: dict[str, ScriptStatement] = {}
        self.integers: set[str] = set()
        self.ended, self.depth = "", 0
        """Why nothing more runs, and the number of conditions around a statement."""

    def block(self, statements: Sequence[ScriptStatement]) -> None:
        for statement in statements:
            if self.ended:
                self._lose(statement, self.ended, doubtful=True)
            else:
                self._run(statement)

    def _run(self, statement: ScriptStatement) -> None:
        branches = statement.branches
        if statement.kind != "function" and statement.joint in ("&&", "||"):
            self._lose(statement, "whether it runs depends on the command before it")
        elif statement.kind == "simple":
            self._simple(statement)
        elif statement.kind == "group":
            self.block(branches[0][1])
        elif statement.kind == "subshell":
            before, ended = dict(self.variables), self.ended
            self.block(branches[0][1])
            self.variables.clear()
            self.variables.update(before)
            self.ended = ended
        elif statement.kind == "arithmetic":
            self._change(self._one(statement.words[0]).text, statement.line, "((…))")
        elif statement.kind == "if":
            self._branch(statement, [self._holds(condition) for condition, _ in branches])
        elif statement.kind == "case":
            subject, names = self._one(statement.words[0]), [[self._one(p).text for p in some] for some, _ in branches]
            held = [None if subject.why else any(fnmatchcase(subject.text, name) for name in some) for some in names]
            self._branch(statement, held)
        elif statement.kind == "function":
            self._define(statement)
        elif self._holds(branches[0][0]) is not False:
            for each in (*(branches[0][0] or ()), *branches[0][1]):
                self._lose(each, "it is set in a loop")

    def _define(self, statement: ScriptStatement) -> None:
        """Keeps a function for its calls. Its commands count as if it were called here."""
        self.functions[self._one(statement.words[0]).text] = statement
        arguments = {name: self.variables.get(name) for name in (*"123456789@*", "#")}
        for name in arguments:
            self._forget(name, statement.line, "it is an argument of a function")
        for each in statement.branches[0][1]:
            self._lose(each, "it is set in a function")
        for name, before in arguments.items():
            self.variables.pop(name)
            self.variables |= {name: before} if before else {}

    def _branch(self, statement: ScriptStatement, holds: Sequence[bool | None]) -> None:
        """Runs the branch whose condition holds; if that is not known, what the branches set is not known either."""
        for held, (_, body) in zip(holds, statement.branches, strict=True):
            if held is None:
                why = f"the condition on line {statement.line} does not follow from the file"
                for inner in chain.from_iterable(each for _, each in statement.branches):
                    self._lose(inner, why, doubtful=True)
            elif held:
                self.depth += 1
                self.block(body)
                self.depth -= 1
            if held is not False:
                return

    def _change(self, expression: str, line: int, what: str) -> None:
        """Makes unknown what an arithmetic expression changes."""
        for name in changed_by(expression):
            self._forget(name, line, f"{what} on line {line} changes it")

    def _forget(self, name: str, line: int, why: str) -> None:
        self.variables[name] = [ScriptWord([ScriptText(f"${name}", line, "", True, why)])]

    def _changes(self, statement: ScriptStatement, words: Sequence[ScriptWord]) -> None:
        """Makes unknown what a command changes, beside its assignments."""
        names = [word.text for word in words if not word.why]
        name, line = names[0] if names else "", statement.line
        if name == "let":
            self._change(" ".join(names[1:]), line, name)
        elif name == "eval":
            self._evaluated(words[1:], line)
        elif name in ("source", ".") and len(words) > 1 and not _SESSION.search(words[1].text):
            self.script.sourced.append(words[1])
        elif name == "set" and "--" in names:
            self._forget("#", line, f"set on line {line} gives the arguments")
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for each in names[1:]:
                self._forget(each, line, "it is read as the script runs")
        elif name == "printf" and names[1:2] == ["-v"] and len(names) > 2:
            self._forget(names[2], line, f"printf on line {line} writes it")
        elif name in DECLARES:
            flags = {letter for each in names[1:] if each.startswith("-") for letter in each[1:]}
            ours = {each for each, *_ in statement.assignments} | {each for each in names[1:] if each.isidentifier()}
            self.integers |= ours if "i" in flags else set()
            if "n" in flags:
                targets = {word.text for each in ours for word in self.variables.get(each, [])}
                for each in ours | targets:
                    self._forget(each, line, f"{name} -n on line {line} makes a reference")
        for each in names[: 2 if name in ("time", "!") else 1]:
            if function := self.functions.pop(each, None):
                for inner in function.branches[0][1]:
                    self._unset(inner, f"the function {each}, called on line {line}, sets it")
                self.functions[each] = function
        for each in statement.items:
            self._forget(each, line, f"line {line} sets one of its items")

    def _evaluated(self, words: Sequence[ScriptWord], line: int) -> None:
        if unknown := [word for word in words if word.why and not _is_unset(word)]:
            if not _HARMLESS.search(" ".join(segment.source for word in unknown for segment in word.segments)):
                self.script.evaluated += unknown[:1]
            return
        for statement in ScriptParser(" ".join(word.text for word in words)).statements():
            self._unset(statement, f"eval on line {line} sets it")

    def _unset(self, statement: ScriptStatement, why: str) -> None:
        """Makes unknown what a statement sets, and nothing else."""
        self._assign(statement, why)
        if statement.kind == "arithmetic":
            self._change(self._one(statement.words[0]).text, statement.line, "((…))")
        else:
            self._changes(statement, self._expanded(statement.words))
        for head, body in statement.branches if statement.kind != "function" else ():
            for each in (*(each for each in head or () if isinstance(each, ScriptStatement)), *body):
                self._unset(each, why)

    def _lose(self, statement: ScriptStatement, why: str, *, doubtful: bool = False) -> None:
        """Makes unknown what a statement sets. Its commands count, unless it is doubtful that they run."""
        self._assign(statement, why)
        if statement.kind == "simple":
            self._changes(statement, self._expanded(statement.words))
        elif statement.kind == "arithmetic":
            self._change(self._one(statement.words[0]).text, statement.line, "((…))")
        elif statement.kind == "function":
            self._define(statement)
            return
        for words in (statement.words, statement.heredoc):
            if words and statement.kind == "simple" and doubtful:
                self.script.doubtful.append((self._expanded(words), why))
            elif words and statement.kind == "simple":
                self.script.commands.append(self._expanded(words))
        for head, body in statement.branches:
            for each in (*(each for each in head or () if isinstance(each, ScriptStatement)), *body):
                self._lose(each, why, doubtful=doubtful)

    def _simple(self, statement: ScriptStatement) -> None:
        words = self._expanded(statement.words)
        name = words[0].text if words else ""
        if name.startswith("--") and words[0].segments[0].source == words[0].segments[0].text:
            raise ValueError(
                f"line {statement.line} begins a command with {name}: a line before it must end in \\, with no blank "
                "and no comment behind it"
            )
        for word in words[1:] if name == "unset" else ():
            self.variables.pop(word.text, None)
        if not words or name in DECLARES:
            self._assign(statement)
        self._changes(statement, words)
        if not self.depth and (name in ("exit", "return") or (name == "exec" and len(words) > 1)):
            self.ended = f"{name} on line {statement.line} ends the script before it"
        self.script.commands += [words] if words else []
        self.script.commands += [self._expanded(statement.heredoc)] if statement.heredoc else []

    def _assign(self, statement: ScriptStatement, why: str = "") -> None:
        for name, appends, value, is_array in statement.assignments:
            words = self._expanded(value) if is_array else [self._one(value[0], quoted=True)]
            if why and is_array:
                empty = [ScriptText(name, statement.line, "", True)]
                words = [
                    ScriptWord([each._replace(why=each.why or why) for each in w.segments or empty]) for w in words
                ]
            elif why:
                words = [ScriptWord([ScriptText(f"${name}", statement.line, "", True, why)])]
            elif name in self.integers and (appends or not re.fullmatch("[1-9][0-9]*|0", words[0].text)):
                why_not = words[0].why or "it is declared as a whole number, which is not computed"
                words = [ScriptWord([ScriptText(f"${name}", statement.line, "", True, why_not)])]
            before = self.variables.get(name, []) if appends and name not in self.integers else []
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

    def _part(self, part: WordPart) -> Value:
        text, why = part.text, ""
        if part.kind == "variable":
            return self._variable(part)
        if part.kind == "command":
            why = "a command is not executed"
        elif part.kind == "inner":
            text, why = f"${part.text}", "the script in the here document sets it"
        elif part.kind == "arithmetic":
            inner = self._one(part.parts)
            self._change(inner.text, part.line, "$((…))")
            try:
                text = str(arithmetic(re.sub(r"[A-Za-z_]\w*", lambda name: self._plain(name[0]), inner.text)))
                why = inner.why
            except ValueError:
                why = inner.why or "it is not computed"
        return [ScriptText(text, part.line, part.text, part.quoted, why)]

    def _plain(self, name: str) -> str:
        words = self.variables.get(name, [])
        return words[0].text if len(words) == 1 and not words[0].why else name

    def _variable(self, part: WordPart) -> Value:
        name, operation = part.text, part.operation
        source = f"${{{name}}}" if operation else f"${name}"
        if name == "#" and name not in self.variables:
            return [ScriptText("0", part.line, "$#", part.quoted)]
        words = self.variables.get(name)
        missing = words is None or (operation.startswith(":") and not "".join(word.text for word in words))
        if operation[-1:] == "=" and missing:
            self.variables[name] = words = [self._one(part.parts, quoted=True)]
        elif operation[-1:] == "-" and missing:
            return [each._replace(quoted=each.quoted or part.quoted) for each in self._segments(part.parts)]
        if operation[-1:] == "+":
            return [] if missing else self._segments(part.parts)
        if words is None:
            argument = name.isdigit() or name in "@*"
            why = ARGUMENT if argument else f"{name} is not set in the file"
            return [ScriptText(source, part.line, source, part.quoted, why)]
        found = Value()
        for number, word in enumerate(words):
            found += [ScriptText(" ", part.line, " ", False)] if number else []
            found += [each._replace(quoted=part.quoted and len(words) == 1) for each in word.segments]
        return found

    def _holds(self, statements: Sequence[ScriptStatement] | None) -> bool | None:
        """Returns whether a condition holds; None if that does not follow from the file."""
        found = True if statements is None else None
        negates = False
        for statement in statements or ():
            if statement.kind == "group" and not statement.branches[0][1]:
                negates = True
                continue
            if statement.kind != "simple":
                self._unset(statement, f"the condition on line {statement.line} sets it")
                return None
            self._changes(statement, self._expanded(statement.words))
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
