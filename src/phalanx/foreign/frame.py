"""Defines the values that a file of another framework states, its table of names, and the fields of a job that they
become."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from phalanx.config import values, yaml_file
from phalanx.config.layout import Layout
from phalanx.config.values import LOADER, read_as, too_deep
from phalanx.config.yaml_file import Setting
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A file of another framework."""

    path: Path
    text: str
    part: str = ""
    """The name of one of several configurations in it: FILE:NAME."""

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @functools.cached_property
    def root(self) -> yaml.Node | None:
        """The content as YAML or JSON; None if it is neither."""
        text = self.text.replace("\t", " ") if self.text.lstrip().startswith("{") else self.text  # JSON may have tabs
        try:
            return None if too_deep(text) else yaml.compose(text, Loader=LOADER)
        except (yaml.YAMLError, ValueError):
            return None

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """The keys of the first level of YAML or JSON."""
        pairs = self.root.value if isinstance(self.root, yaml.MappingNode) else ()
        return frozenset(str(key.value) for key, _ in pairs)


@dataclass(frozen=True)
class Unresolved:
    """A value that does not follow from the file without executing something."""

    text: str
    why: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Stated:
    """One value that a file states."""

    name: str
    """Their name, as the table has it."""
    value: Any
    """A plain value, True for a switch, or Unresolved."""
    line: int = 0
    """The line with the text of the value, from 1; 0: in no line of this file."""
    text: str = ""
    """The value as that line has it; empty for a switch."""
    path: Path | None = None
    """Another file that states it."""
    label: str = ""
    """The name as the file writes it, if not as the table has it."""

    @property
    def shown(self) -> str:
        return self.label or self.name


@dataclass(frozen=True)
class Became:
    """A value of theirs, and the field of a job that it became."""

    name: str
    value: Any
    path: str
    to: Any
    how: str = ""


@dataclass(frozen=True)
class Leftover:
    """A value without a counterpart here, or one that was not understood."""

    name: str
    value: Any
    why: str
    affects: bool = True
    """Whether it would change a predicted figure."""
    path: str = ""
    """The field of a job that it would have become."""


@dataclass(frozen=True)
class ForeignJob:
    """A file of another framework, read."""

    path: Path
    kind: str
    """The framework: "Megatron-LM"."""
    version: str
    """Its version, if the file states one."""
    settings: tuple[Setting, ...]
    """Fields of a job with their origins."""
    became: tuple[Became, ...]
    without_counterpart: tuple[Leftover, ...]
    unknown: tuple[Leftover, ...]
    """Names that no table knows, and values that do not follow from the file."""
    framework: str
    """The framework whose figures predict it (cost/frameworks.py)."""
    recipe: Mapping[str, Any]
    """Facts about how it runs (cost/frameworks.py, as_recipe)."""
    stated: Mapping[str, Stated]
    """Every value by its name."""
    source: Source
    model: str = ""
    """The name of the model in words, if the file has one."""
    needed: Mapping[str, str] = field(default_factory=dict)
    """Fields of a job that the user must give, since they do not follow from the file, with what is missing; of two
    with "or" between them, one."""

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of a name, or the default if it is absent or unresolved."""
        found = self.stated.get(name)
        return default if found is None or isinstance(found.value, Unresolved) else found.value


@dataclass(frozen=True)
class NameMeaning:
    """The meaning of a name in a table."""

    path: str = ""
    """The field of a job."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Their values with another word for it here, by their text in lower case, or with the fields that they set."""
    how: str = ""
    rule: bool = False
    """Whether the format's module reads it."""
    optional: bool = False
    """Whether the job does not need it, so that one that is unresolved is listed and no problem."""
    why: str = ""
    """Why there is no counterpart."""
    affects: bool = False
    """Whether a name without a counterpart would change a predicted figure."""
    assumed: bool = False
    """Whether the prediction assumes that it is on."""


@dataclass(frozen=True)
class NameTable:
    """The names of a format."""

    source: tuple[str, ...]
    """Pages that document them."""
    names: Mapping[str, NameMeaning]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The framework's values of names that a file does not state."""

    def meaning_of(self, name: str) -> NameMeaning | None:
        """Returns what the table says of a name, or of names that begin like it: `log_*`."""
        if name in self.names:
            return self.names[name]
        return next((each for key, each in self._patterns if name.startswith(key[0]) and name.endswith(key[1])), None)

    @functools.cached_property
    def _patterns(self) -> list[tuple[list[str], NameMeaning]]:
        """The names with a star, as what stands before and after it."""
        return [(key.split("*", 1), each) for key, each in self.names.items() if "*" in key]

    def by_path(self) -> dict[str, str]:
        """Returns the plain name of every field that has one."""
        return {meaning.path: name for name, meaning in reversed([*self.names.items()]) if meaning.path}


@functools.cache
def table_of(name: str) -> NameTable:
    """Returns the table of NAME.yaml in this folder."""
    written = values.yaml_data(__file__, f"{name}.yaml")
    base = table_of(written["extends"]) if "extends" in written else NameTable((), {})
    names = dict[str, NameMeaning]()
    for key, meaning in (written.get("fields") or {}).items():
        stored: dict[str, Any] = {"path": meaning} if isinstance(meaning, str) else dict(meaning)
        if "values" in stored:
            stored["values"] = {_word(theirs): ours for theirs, ours in stored["values"].items()}
        names[key] = read_as(NameMeaning, stored, f"{name}.yaml: {key}")
    names |= {key: NameMeaning(rule=True) for key in written.get("rules") or ()}
    for section, affects in (("nothing", False), ("cost", True)):
        for why, several in (written.get(section) or {}).items():
            names |= {key: NameMeaning(why=why, affects=affects) for key in several}
    names |= {key: NameMeaning(why=ASSUMED, assumed=True) for key in written.get("assumed") or ()}
    pages = written["source"]
    pages = [pages] if isinstance(pages, str) else pages
    names |= {key: meaning for key, meaning in base.names.items() if key not in names}
    return NameTable((*base.source, *pages), names, {**base.defaults, **(written.get("defaults") or {})})


def _word(value: Any) -> str:
    """Returns a value as tables have it: true, null, and other values in lower case."""
    return "null" if value is None else str(value).lower()


ASSUMED = "it is what the prediction assumes"
NO_EFFECT = "it has no effect beside the other values, or is what is predicted"
NOT_ASSUMED = "the prediction assumes that it is on"


class Fields:
    """The values of a file while they become the fields of a job."""

    def __init__(self, source: Source, table: NameTable, stated: Sequence[Stated]):
        self.source, self.table = source, table
        self.stated: dict[str, Stated] = {}
        """The last one wins, as in every one of these formats."""
        self.settings: dict[str, Setting] = {}
        self.became: list[Became] = []
        self.leftovers: list[Leftover] = []
        self.unknown: list[Leftover] = []
        self.problems: list[str] = []
        self.recipe: dict[str, Any] = {}
        self.framework = ""
        self.version = ""
        self.model = ""
        self.taken: set[str] = set()
        self._told: set[str] = set()
        self.needed: dict[str, str] = {}
        self._setters: dict[str, Stated] = {}
        """The value that set each field by a plain name."""
        for each in stated:
            refers = isinstance(each.value, str) and "${" in each.value
            value = Unresolved(str(each.value), "it refers to another value") if refers else each.value
            self.stated[each.name] = replace(each, value=value)

    def origin(self, name: str) -> str:
        """Returns where a value stands, and its name: "train.sh:12 --tp"."""
        found = self.stated.get(name)
        if found is None:
            return f"{self.source.path}"
        return f"{found.path or self.source.path}{f':{found.line}' if found.line else ''} {found.shown}"

    def has(self, name: str) -> bool:
        """Returns whether the file states a name, with a value that follows from it."""
        found = self.stated.get(name)
        return found is not None and not isinstance(found.value, Unresolved)

    def take(self, name: str, kind: type[T], default: T) -> T:
        """Returns the value of a name as a type, or the default. A value of another type is a problem; one that is
        unresolved is listed as not understood."""
        self.taken.add(name)
        value = self.stated[name].value if self.has(name) else None  # `plain` lists what is unresolved
        if value is None or kind is object:
            return default if value is None else value
        try:
            return converted(value, kind)
        except ValueError as error:
            bare = value is True and not self.stated[name].text  # an option of a command line
            self.problems.append(f"{self.origin(name)}: {'needs a value' if bare else error}")
            return default

    def choice(self, name: str, default: str, known: Iterable[str], path: str = "") -> str:
        """Returns the word of a name in lower case, or the default. One that is not among the known words is listed as
        not understood."""
        word, several = self.take(name, str, default).lower(), [*known]
        if word in several or word == default.lower():
            return word
        self.unknown_value(name, filter(None, several), path)
        return default

    def set(self, path: str, value: Any, names: str | Sequence[str], how: str = "") -> None:
        """Sets a field of the job to what one or several names say."""
        several = [names] if isinstance(names, str) else [*names]
        stated = [name for name in several if name in self.stated]
        self.taken.update(several)
        self._told.update(several)
        origin = self.origin(stated[0]) if stated else f"{self.source.path}"
        self.settings[path] = Setting(path, _setting_text(value), origin, foreign=True)
        shown = ", ".join(self.stated[name].shown for name in stated) or "(by default)"
        theirs = [self.stated[name].value for name in stated]
        self.became = [each for each in self.became if each.path != path]
        self.became.append(Became(shown, theirs[0] if len(theirs) == 1 else theirs or None, path, value, how))

    def on(self, *names: str) -> bool:
        """Returns whether one of several switches is on."""
        return True in [self.take(name, bool, False) for name in names]

    def word(self, *names: str) -> str:
        """Returns the first text of several names that is not empty; "" if there is none."""
        return next(filter(None, [self.take(name, str, "") for name in names]), "")

    def first(self, *names: str) -> int:
        """Returns the first whole number of several names that is not 0; 0 if there is none."""
        return next(filter(None, [self.take(name, int, 0) for name in names]), 0)

    def put(self, path: str, name: str, default: T, how: str = "") -> T:
        """Sets a field to the value of a name if it is above the default, which says its type, and returns it."""
        value: Any = self.take(name, type(default), default)
        if value > default:
            self.set(path, value, name, how)
        return value

    def leave(self, names: str | Iterable[str], why: str, *, affects: bool = True) -> None:
        """Lists stated names as ones without a counterpart. One that is read, and neither set nor left, is listed as
        one without an effect."""
        for name in [names] if isinstance(names, str) else names:
            self.taken.add(name)
            if name in self.stated and name not in self._told:
                self._told.add(name)
                self.leftovers.append(Leftover(self.stated[name].shown, self.stated[name].value, why, affects))

    def refuse(self, name: str, why: str, path: str = "") -> None:
        """Lists a stated name as one that is not understood."""
        self._told.add(name)
        self.unknown.append(Leftover(self.stated[name].shown, self.stated[name].value, why, path=path))

    def unknown_value(self, name: str, known: Iterable[str], path: str = "") -> None:
        """Lists a value that has no counterpart."""
        self.refuse(name, f"no counterpart of this value is known (known: {', '.join(known)})", path)

    def exclude(self, *pairs: tuple[str, str]) -> None:
        """Adds a problem for each pair of names that are both on, and of which the framework takes one."""
        for pair in pairs:
            if all(self.has(name) and self.stated[name].value not in (None, False, "false", "") for name in pair):
                other = self.stated[pair[1]].shown
                self.problems.append(f"{self.origin(pair[0])} and {other} exclude each other: give one of them")

    def no_multiple(self, name: str, sequences: int, micro: int) -> None:
        self.problems.append(f"{self.origin(name)}: {sequences} sequences are no multiple of micro-batches of {micro}")

    def need(self, path: str, what: str) -> None:
        """Says that a field of the job does not follow from the file: the user gives it."""
        self.needed[path] = what

    def plain(self) -> None:
        """Applies the table to every name that it says something plain about."""
        for name, found in self.stated.items():
            meaning = self.table.meaning_of(name)
            if meaning is None:
                meant = did_you_mean(name, self.table.names) if len(self.unknown) < MOST_HINTS else ""
                self.refuse(name, f"this name is not known{meant}")
            elif meaning.why:
                is_off = found.value is None or found.value is False or found.value in ("", "none", "null")
                affects = is_off and found.value is not None if meaning.assumed else meaning.affects and not is_off
                why = NOT_ASSUMED if meaning.assumed and affects else meaning.why
                self.leftovers.append(Leftover(found.shown, found.value, why, affects))
            elif isinstance(found.value, Unresolved) and meaning.optional:
                self.leave(name, found.value.why, affects=False)
            elif isinstance(found.value, Unresolved):
                self.refuse(name, found.value.why, meaning.path)
            elif meaning.path and found.value is not None:
                self._plain(name, found.value, meaning)

    def _plain(self, name: str, value: Any, meaning: NameMeaning) -> None:
        if meaning.values:
            if (word := _word(value)) not in meaning.values:
                self.unknown_value(name, [*meaning.values], meaning.path)
                return
            ours = meaning.values[word]
            for path, to in ours.items() if isinstance(ours, dict) else [(meaning.path, ours)]:
                if to is not None:
                    self._once(path, to, name, meaning.how)
                    continue
                self._told.add(name)
                self.became.append(Became(self.stated[name].shown, value, path, "(its default)", meaning.how))
            return
        if isinstance(value, Mapping):
            self.problems.append(f"{self.origin(name)}: expected a value, found an object")
            return
        self._once(meaning.path, value, name, meaning.how)

    def _once(self, path: str, value: Any, name: str, how: str) -> None:
        """Sets a field. A name is not understood where another one has set the field to something else, but what a file
        states wins over the files that it builds on."""
        first, ours = self._setters.get(path), self.stated[name]
        if first and first.line and ours.line and first.path in (None, ours.path):
            before = self.settings[path].text
            if not _same(before, _setting_text(value)):
                self.refuse(name, f"{first.shown} {first.value} says otherwise: keep one of them", path)
                return
        self.set(path, value, name, how)
        self._setters[path] = ours

    def job(self, kind: str) -> ForeignJob:
        """Returns the job, as far as there are no `problems`."""
        for name, found in self.stated.items():
            meaning, taken = self.table.meaning_of(name), name in self.taken
            if name in self._told or (found.value is False and not found.line):
                continue
            if meaning and meaning.rule and not isinstance(found.value, Unresolved):
                why = NO_EFFECT if taken else "it is not read beside the other values of this file"
                (self.leftovers if taken else self.unknown).append(
                    Leftover(found.shown, found.value, why, affects=False)
                )
        several = tuple(self.settings.values()), tuple(self.became), tuple(self.leftovers), tuple(self.unknown)
        facts = self.framework, dict(self.recipe), self.stated, self.source, self.model, dict(self.needed)
        return ForeignJob(self.source.path, kind, self.version, *several, *facts)


def once(source: Source, stated: Sequence[Stated]) -> Sequence[Stated]:
    """Returns values. Raises JobError for those that a file gives two names, and several values."""
    first, problems = dict[str, Stated](), list[str]()
    for each in stated:
        before = first.setdefault(each.name, each)
        if before.shown != each.shown and before.value != each.value:
            at = f"{source.path}:{each.line} {each.shown} {each.value}"
            problems.append(f"{at}: line {before.line} has {before.shown} {before.value}: keep one of them")
    if problems:
        raise JobError(problems)
    return stated


def _same(one: Any, two: Any) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        return float(one) == float(two)
    return one == two


def converted(value: Any, kind: type[T]) -> T:
    """Returns a value, or the text of one, as a type. Raises ValueError that says what was expected."""
    words: Any = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
    found: Any = value
    if kind is bool and isinstance(value, str | int) and str(value).lower() in words:
        found = words[str(value).lower()]
    elif kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            found = float(value)
            found = int(found) if kind is int and found == int(found) else found
    elif kind is str and isinstance(value, int | float):
        found = str(value)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        what = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
        raise ValueError(f"expected {what.get(kind, kind.__name__)}, found {str(value)[:80]!r}")
    return found


def _setting_text(value: Any) -> str | list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else _text(value)


def _text(value: Any) -> str:
    plain = f"{value:.12g}" if isinstance(value, float) else str(value)
    return plain.lower() if isinstance(value, bool) else plain


@dataclass(frozen=True)
class ForeignFormat:
    """A kind of file."""

    kind: str
    """The framework's name."""
    table: str
    """The name of its table, without .yaml."""
    recognises: Callable[[Source], bool]
    """Whether a file is of this kind, by its content."""
    parse: Callable[[Source], Sequence[Stated]]
    """Returns the values of a file. Raises JobError with every problem."""
    finish: Callable[[Fields], None]
    """Sets what the table cannot say, and the framework that predicts it."""
    written: Callable[[ForeignJob, Layout], Mapping[str, Any]] = lambda theirs, layout: {}
    """Returns the values of the names of rules that give a layout; None: the name is left out."""
    covers: frozenset[str] = frozenset()
    """Fields of a layout that `written` gives."""
    new_line: Callable[[str, Any], str] = lambda name, value: f"{name}: {_text(value)}"
    """Returns a line that states a value, in its format."""
    spelled: Callable[[Any], str] = _text
    """Returns a value as a line of its format has it."""
    absent: str = ""
    """The value that switches a name off; empty: its line goes."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a layout that the framework cannot choose, which the planner keeps."""
    keeps: Sequence[str] = ()
    """Fields of a layout that the planner keeps as the file has them."""
    chooses: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of which it offers only these values; the planner searches once per combination."""
    marks: str = ""
    """The message about a file of no known kind names these marks of its files."""


@dataclass(frozen=True)
class ChangedLine:
    """A line of their file that a layout changes."""

    line: int
    """From 1; 0: a new line."""
    before: str
    after: str
    """Empty: the line goes."""
    note: str = ""
    """Without a line: what their format has no name for."""


def with_defaults(table: NameTable, stated: Sequence[Stated]) -> list[Stated]:
    """Returns values with the framework's own for names that are not stated."""
    known = {each.name for each in stated}
    return [*(Stated(name, value) for name, value in table.defaults.items() if name not in known), *stated]


MOST_BYTES = 2**20
"""Most bytes of a file, and of each one that it names."""
MOST_HINTS = 6
"""Unknown names that the nearest known one is looked for."""
MOST_VALUES = 20_000
"""Most values of a file; aliases of YAML multiply."""


def yaml_values(source: Source, node: yaml.Node | None = None, prefix: str = "") -> list[Stated]:
    """Returns every value of YAML or JSON, or of one node, with dotted names: a list of plain values is one value, and
    of other lists each item is named by its place. Raises JobError if it is not valid, has a name twice, or too many
    values."""
    node = source.root if node is None else node
    if node is None:
        raise JobError(yaml_file.parse(source.text, str(source.path))[1] or f"{source.path}: is empty")
    found = list[Stated]()
    _walk(source, node, prefix, found)
    return found


def _walk(source: Source, node: yaml.Node, name: str, found: list[Stated]) -> None:
    if len(found) > MOST_VALUES:
        raise JobError(f"{source.path}: more than {MOST_VALUES:,} values")
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode) and node.value:
        _require_once(source, node, name)
        for key, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):  # what is merged comes first
            inner = f"{name}.{key.value}" if name else str(key.value)
            _walk(source, value, name if key.value == "<<" else inner, found)
    elif isinstance(node, yaml.SequenceNode) and not all(isinstance(each, yaml.ScalarNode) for each in node.value):
        for place, each in enumerate(node.value):
            _walk(source, each, f"{name}.{place}", found)
    elif isinstance(node, yaml.ScalarNode):
        found.append(Stated(name, plain_value(node), line, source.text[node.start_mark.index : node.end_mark.index]))
    else:
        several = [plain_value(each) for each in node.value] if isinstance(node, yaml.SequenceNode) else {}
        found.append(Stated(name, several, line, source.text[node.start_mark.index : node.end_mark.index]))


def _require_once(source: Source, node: yaml.MappingNode, name: str) -> None:
    """Raises JobError for names that a mapping has twice: programs take the last, its writer may see the first."""
    first, problems = dict[str, int](), list[str]()
    for key, _ in node.value:
        word, line = str(key.value), key.start_mark.line + 1
        if word in first and word != "<<":
            path = f"{name}.{word}" if name else word
            problems.append(f"{source.path}:{line} {path} is set again (first on line {first[word]})")
        first.setdefault(word, line)
    if problems:
        raise JobError(problems)


def plain_value(node: yaml.ScalarNode) -> Any:
    """Returns the value of a scalar of YAML: text, a number, true or false, None; or Unresolved for one with a tag."""
    kind = node.tag.rpartition(":")[2]
    if node.tag not in yaml_file.PLAIN_TAGS:
        return Unresolved(node.value, f"the tag {node.tag} is not followed")
    text = str(node.value)
    if kind == "str" and _EXPONENT.fullmatch(text):  # YAML 1.1 reads 1e-5 as text, which no writer means
        kind = "float"
    if kind in ("null", "bool"):
        return None if kind == "null" else text.lower() in values.TRUE
    if kind == "int" and (meant := values.leading_zero(text)):
        return Unresolved(text, f"programs read it differently: {meant}")
    try:
        return int(text.replace("_", ""), 0) if kind == "int" else float(text) if kind == "float" else text
    except ValueError:
        return text


_EXPONENT = re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+")
