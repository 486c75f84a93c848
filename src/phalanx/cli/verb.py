"""A verb: its options, commands and examples, from which its words are read and its pages, docs/reference/cli.md and
completion are made."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import textwrap
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from phalanx.config import values
from phalanx.config.values import row_of
from phalanx.echo import echo, shortened
from phalanx.errors import MOST_PROBLEMS, JobError, PhalanxError
from phalanx.nearest import did_you_mean, nearest

if TYPE_CHECKING:
    from phalanx.check.load import LoadedJob
    from phalanx.config.job import Job
    from phalanx.config.overrides import CommandLine
    from phalanx.config.reference import FieldReference
    from phalanx.foreign.frame import ForeignJob


Example = tuple[str, str]
"""Words after `phalanx`, and what they do."""


def flag_of(name: str) -> str:
    """Returns an option as it is written on the command line: "--nproc-per-node"."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Option:
    """An option beside the fields of a job: `--steps 2`, `--steps=2`, or a switch."""

    about: str
    default: Any = ""
    kind: Any = None
    """The type of one value; that of the default unless given."""
    at_least: int | None = None
    many: bool = False
    """May have several values, which are then a tuple. In a verb that takes a job, they are all words up to the next
    that begins with `--` or names a YAML file; elsewhere the option is repeated."""
    like: str = ""
    """With `many`: a regular expression for the beginning of later words; any word if it is empty."""
    empty: str = ""
    """What to say where the value is the empty text."""
    value: str = ""
    """The name of the value on help pages, such as FILE; that of its kind if it is empty."""
    rare: bool = False
    """The short help page only names it."""
    read: Callable[[str], Any] | None = None
    """Reads its text, if its kind does not say how; raises ValueError for a wrong one."""
    name: str = ""
    """Its name, on pages."""
    commands: tuple[str, ...] = ()
    """On pages: the commands that take it, if others do not."""
    beside: tuple[str, ...] = ()
    """Options of which one must be given for this one to have an effect."""

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "kind", type(self.default))

    @property
    def flag(self) -> str:
        """The option with its value: "--steps N"; a switch (its kind is bool) has none."""
        value = "" if self.kind is bool else f" {self.value or value_name(self.kind)}{' ...' if self.many else ''}"
        return f"{flag_of(self.name)}{value}"

    @property
    def meaning(self) -> str:
        text = f"{self.about[:1].upper()}{self.about[1:].rstrip('.')}."
        return f"({', '.join(self.commands)}) {text}" if self.commands else text

    @property
    def shown_default(self) -> str:
        """The default; nothing if there is none, or if the meaning states it."""
        return "" if self.default in (None, "", (), 0) or "default" in self.about.lower() else f"{self.default}"

    @property
    def text(self) -> str:
        return f"{self.meaning} Default: {self.shown_default}." if self.shown_default else self.meaning

    def convert(self, texts: Sequence[str]) -> tuple[Any, ...]:
        """Converts the given texts. Raises ValueError that says what was expected."""
        if not any(texts):
            raise ValueError(f"is empty: {self.empty}" if texts and self.empty else "needs a value")
        read = self.read or (Path if self.kind is Path else lambda text: values.convert(text, self.kind))
        converted: tuple[Any, ...] = tuple(map(read, texts))
        if self.at_least is not None and min(converted) < self.at_least:
            raise ValueError(f"must be at least {self.at_least}, is {min(converted)}")
        return converted

    def taken(self, left: deque[str], *, of_job: bool) -> list[str]:
        """Removes its values from the words that follow it, and returns them."""
        found: list[str] = []
        while left and not left[0].startswith("--") and (not found or (of_job and self.many)):
            if of_job and self.many and left[0].endswith((".yaml", ".yml")):
                break
            if found and not re.match(self.like, left[0]):
                break
            found.append(left.popleft())
        return found


def value_name(kind: Any) -> str:
    """Returns the name of a value: its choices, or N, X, TEXT."""
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(kind) if choice != "")
    if row := row_of(kind):
        return f"[{{{', '.join(f'{field.name}: …' for field in dataclasses.fields(row))}}}]"
    if typing.get_origin(kind) is tuple:
        inner = value_name(typing.get_args(kind)[0])
        return f"{inner},{inner}" if ... not in typing.get_args(kind) else f"{inner},..."
    if typing.get_args(kind):
        return "|".join(map(value_name, typing.get_args(kind)))
    return {int: "N", float: "X", bool: "true|false", str: "TEXT", Path: "TEXT"}[kind]


JSON = {"json": "print one JSON document on standard output and nothing else"}
"""The switch of every command."""
JOB_SWITCHES = {**JSON, "print_config": "print the resolved job with the origin of each value, and exit"}
"""The switches of every verb that takes a job."""
FROM = {
    "from": Option(
        "take the job from a configuration of another framework, which is read and never executed; fields of a job "
        "override it (docs/guides/from.md)",
        None,
        Path,
        value="FILE",
    ),
    "ignore": Option(
        "with --from: names in that file to read as if they were absent, or all that are not understood",
        (),
        str,
        many=True,
        value="NAME",
        beside=("from",),
    ),
}
"""The options of the verbs that take a file of another framework (cli/foreign.py)."""
PREDICTING = ("predict", "plan", "simulate")
"""The verbs that take a model which can be predicted and not trained."""
WHOLE = ""
"""The name of the only command of a verb without commands."""
Options = TypeVar("Options")


@dataclass(frozen=True)
class Command:
    subjects: tuple[str, ...] = ()
    """The names of the arguments besides options; those in brackets may be left out."""
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names of options."""
    switches: Mapping[str, str] = field(default_factory=lambda: JSON)
    """Options without a value, with their help."""
    more: bool = False
    """The last argument may be given several times."""
    about: str = ""
    """Its purpose, for help pages; empty where a verb has only this command."""
    of_job: bool = False
    """Its arguments are job files and fields, which phalanx.config.overrides reads."""

    @property
    def described(self) -> dict[str, Option]:
        return {**self.options, **{name: Option(about, False) for name, about in self.switches.items()}}

    def takes(self, count: int) -> bool:
        """Returns whether it can have so many arguments."""
        least = sum(not subject.startswith("[") for subject in self.subjects)
        return self.of_job or least <= count <= (inf if self.more else len(self.subjects))

    @property
    def names(self) -> list[str]:
        """The names of the arguments as the help page shows them: ["RUN ..."]."""
        if not self.more:
            return [*self.subjects]
        *first, last = self.subjects
        return [*first, f"{last.rstrip(']')} ...{']' * last.endswith(']')}"]

    def read(self, name: str, argv: Sequence[str]) -> tuple[Words, list[str]]:
        """Returns the words and every problem of them. An option wins over a field of a job with its name."""
        left, problems = deque(argv), list[str]()
        subjects, switches, stated = list[str](), set[str](), set[str]()
        found = {each: option.default for each, option in self.options.items()}
        while left:
            word = left.popleft()
            flag, equals, text = word.partition("=")
            if equals and flag in self.aliases:  # as a job has it
                flag = f"--{flag}"
            option = flag[2:].replace("-", "_")
            option = self.aliases.get(option, option)
            if flag.startswith("--") and option in self.options:
                taken = self.options[option]
                try:
                    converted = taken.convert([text] if equals else taken.taken(left, of_job=self.of_job))
                except ValueError as error:
                    problems.append(f"{flag}: {error}")
                    continue
                if taken.many:
                    found[option] = (*found[option], *converted)
                else:
                    if option in stated and found[option] != converted[0]:
                        problems.append(f"{flag} {found[option]} and {flag} {converted[0]}: give one of them")
                    found[option] = converted[0]
                stated.add(option)
            elif self.of_job or not flag.startswith("-") or word == "-":
                subjects.append(word)
            elif flag.startswith("--") and option in self.switches and not equals:
                switches.add(option)
            else:
                names = [*self.options, *self.aliases, *self.switches]
                meant = nearest(option, names) if len(problems) < MOST_PROBLEMS else None
                problems.append(f"unknown option {flag}" + (f"; did you mean {flag_of(meant)}?" if meant else ""))
                if not equals and left and not left[0].startswith("-"):
                    left.popleft()  # its value: one mistake is one message
        for each in sorted(stated):
            if (others := self.options[each].beside) and stated.isdisjoint(others):
                problems.append(f"{flag_of(each)} has no effect without {' or '.join(map(flag_of, others))}")
        return Words(name, tuple(subjects), found, frozenset(stated), frozenset(switches)), problems


@dataclass(frozen=True)
class Words:
    command: str
    subjects: tuple[str, ...]
    """The arguments besides options; of a verb that takes a job the words about it, as they were given."""
    options: dict[str, Any]
    """The value of every option."""
    stated: frozenset[str]
    """The options that are given."""
    switches: frozenset[str]
    about_job: LoadedJob | None = None
    theirs: ForeignJob | None = None
    """The file of --from."""
    before: LoadedJob | None = None
    """The job of that file with its own layout, if the verb leaves the layout to the planner."""

    @property
    def loaded(self) -> LoadedJob:
        """The job of a verb that takes one, with the origins of its values."""
        assert self.about_job is not None, "the verb takes no job"
        return self.about_job

    @property
    def job(self) -> Job:
        return self.loaded.job

    @property
    def subject(self) -> str:
        (subject,) = self.subjects
        return subject

    @property
    def as_json(self) -> bool:
        return "json" in self.switches

    def show(self, document: object, text: str, *, indent: int | None = 1, wrap: bool = True) -> None:
        """Prints a result: with --json the document, otherwise the text."""
        echo(json.dumps(document, indent=indent) if self.as_json else text, wrap=wrap and not self.as_json)

    def given(self, names: Mapping[str, Option]) -> dict[str, Any]:
        """Returns the given options among `names`."""
        return {name: self.options[name] for name in names if name in self.stated}


@dataclass(eq=False)
class Verb:
    name: str
    about: str
    commands: Mapping[str, Command]
    """Its commands by name, or one of the name WHOLE."""
    examples: tuple[Example, ...]
    notes: tuple[str, ...] = ()
    """Paragraphs of the help page about what the words mean."""
    exits: Mapping[int, str] = field(default_factory=dict)
    """Exit codes that mean something of its own."""
    default: str | None = None
    """The command that runs where no word is given; without one the verb then prints its help page."""
    hint: Callable[[str], str] = lambda word: ""
    """Returns what to say about a word that is no command, instead of the nearest command; or nothing."""
    auto: Literal["", "open", "always", "plan", "measure", "train"] = ""
    """The treatment of `layout: auto` by a verb that takes a job: it stays open, even if job files have a layout
    (always); the planner chooses; this machine may be measured for that, since the verb predicts; or a run keeps the
    layout that it has (cli/auto_layout.py)."""
    run: Callable[[Sequence[str]], int] = field(init=False, repr=False)
    """Runs it with the words after its name, and returns the exit code."""

    @property
    def takes_job(self) -> bool:
        return bool(self.auto)

    def runs(self, work: Callable[[Words], int | None]) -> Callable[[Sequence[str]], int]:
        """Decorates the function that works with the verb's words, and returns the exit code if it is not 0."""

        def run(argv: Sequence[str]) -> int:
            words = self.parse(argv)
            return 0 if words is None else work(words) or 0

        return self.starts(run)

    def starts(self, run: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
        """Decorates the function that runs the verb, if it reads the words itself."""
        self.run = run
        return run

    def parse(self, argv: Sequence[str]) -> Words | None:
        """Returns the parsed words, or None after printing the help page or the configuration that they ask for. Raises
        JobError with every problem of the words, the files and the job."""
        if self.answers_help(argv):
            return None
        if self.takes_job:
            return self._with_job(argv)
        words, problems = self.read(argv)
        if problems:
            raise JobError(problems)
        return words

    def answers_help(self, argv: Sequence[str]) -> bool:
        """Prints the help page and returns true if the words ask for it. Raises JobError about a name after --help that
        there is not."""
        asks = "-h" in argv or "--help" in argv
        if not asks and (self.takes_job or not (argv[:1] == ["help"] or (not argv and self.default is None))):
            return False

        asked, rest = topics(argv)
        if self.takes_job:
            print_page(self, asked, self._shown_job([word for word in rest if word not in ("-h", "--help")]))
            return True
        named = [word for word in (*asked, *rest[:1]) if word and word in self.commands]
        # An argument may stand after --help, too: a run's directory is no name of an option.
        names = [word for word in asked if word not in self.commands and not os.path.exists(word)]
        print_page(self._of_command(named[0]) if named else self, names)
        return True

    def read(self, argv: Sequence[str]) -> tuple[Words, list[str]]:
        """Returns the words after the verb and every problem of them. Raises JobError if they name no command."""
        name, words = WHOLE, list(argv)
        if WHOLE not in self.commands:
            by_default = not argv or (self.default and argv[0].startswith("-"))
            name, *words = [self.default or "", *argv] if by_default else argv
        if name not in self.commands:
            meant = nearest(name, self.commands)
            there_are = f"there are: {', '.join(self.commands)}"
            nearby = f"did you mean `phalanx {self.name} {meant}`?" if meant else there_are
            raise JobError(f"phalanx {self.name} has no command {name!r}; {self.hint(name) or nearby}")
        read, problems = self.commands[name].read(name, words)
        if not self.commands[name].takes(len(read.subjects)):
            full_name = " ".join(filter(None, (self.name, name)))
            wanted = " and ".join(self.commands[name].names) or "options only"
            found = " ".join(read.subjects) or "nothing"
            problems.append(f"phalanx {full_name} takes {wanted}, found {found}")
        return read, problems

    def read_as(self, kind: type[Options], argv: Sequence[str]) -> tuple[Options, list[str]]:
        """Returns the options of a verb without commands as its dataclass, with the defaults where a word is wrong, and
        every problem of the words. Raises JobError with them if the verb's argument is missing."""
        words, problems = self.read(argv)
        if not self.commands[WHOLE].takes(len(words.subjects)):
            raise JobError(problems)
        (name, subject), *_ = _options_of(kind).items()
        given = {**words.given(words.options), **dict.fromkeys(words.switches, True)}
        given[name] = subject.convert(words.subjects) if subject.many else subject.convert(words.subjects)[0]
        for section, hint in typing.get_type_hints(kind).items():
            if dataclasses.is_dataclass(hint):
                inner = cast("type[Any]", hint)
                given[section] = inner(**{each: given.pop(each) for each in _options_of(inner) if each in given})
        return kind(**given), problems

    def command_line(self, argv: Sequence[str]) -> tuple[Words, CommandLine]:
        """Returns the words of a verb that takes a job without loading it, and the job files, fields and switches among
        them, with the problems of both."""
        from phalanx.config import overrides

        words, problems = self.read(argv)
        command = self.commands[WHOLE]
        line = overrides.parse(words.subjects, {*command.switches, *command.options})
        line.problems[:0] = problems
        return words, line

    def _with_job(self, argv: Sequence[str]) -> Words | None:
        """Returns the words with the job, or None after printing it. Raises JobError with every problem of both."""
        from phalanx.blocks.kinds import not_trained
        from phalanx.check.load import as_dict, as_yaml, load_words, repeated

        words, line = self.command_line(argv)
        if "print_config" in line.switches:
            idle = (
                each
                for each in sorted(words.stated - {*FROM})
                if each == "sweep" or self.commands[WHOLE].options[each].value == "FILE"
            )
            line.problems += [f"{flag_of(each)} has no effect beside --print-config" for each in idle]
        if twice := [*repeated(line.settings)]:
            raise JobError([*line.problems, *twice])
        theirs = before = None
        if isinstance(path := words.options.get("from"), Path):
            from phalanx.cli import foreign

            theirs = foreign.put_below(path, words.options["ignore"], line, needs_cluster=self.name in PREDICTING)
            before = load_words(line) if self._opens else None
        switches = self.commands[WHOLE].switches
        rest = (word for word in words.subjects if word[:2] != "--" or word[2:].replace("-", "_") not in switches)
        words = replace(words, subjects=tuple(rest))
        try:
            given = load_words(line, opens=self._opens)
        except JobError:
            from phalanx.foreign.read import recognised

            if theirs is None and (files := [*filter(None, map(recognised, line.files))]):
                raise JobError(files) from None
            if not (swept := words.options.get("sweep")) or line.problems:
                raise
            from phalanx.cli import sweep

            given = sweep.first_legal(swept, words.subjects)
        if self.name not in PREDICTING and (reason := not_trained(given.job.model)):
            raise JobError(f"{reason}; phalanx {', '.join(PREDICTING)} take it")
        tell(given.answers)
        loaded = given
        if given.job.layout.auto and self.auto not in ("open", "always"):
            from phalanx.cli import auto_layout

            if self.auto == "train":
                loaded = auto_layout.planned_to_train(given, fresh="fresh" in line.switches)
            else:
                loaded = auto_layout.planned(given, measures=self.auto == "measure")
        if "print_config" in line.switches:
            origins = {"job": as_dict(loaded.job), "origins": loaded.origins}
            echo(json.dumps(origins, indent=2) if "json" in line.switches else as_yaml(loaded).rstrip())
            return None
        if self.auto == "measure" and not given.job.layout.auto:  # the planner has checked it otherwise
            from phalanx.cli.auto_layout import check_calibration

            check_calibration(loaded.job.cluster, loaded.job.layout.world)
        return replace(words, switches=frozenset(line.switches), about_job=loaded, theirs=theirs, before=before)

    @property
    def _opens(self) -> str:
        """The origin that leaves the layout to the planner by default: none, or the verb."""
        return f"phalanx {self.name}" if self.auto == "always" else ""

    def _shown_job(self, argv: Sequence[str]) -> LoadedJob:
        """Returns the job of the words, whose values the help page shows."""
        from phalanx.check.load import LoadedJob, load_words
        from phalanx.config.job import Job

        try:
            return load_words(self.command_line(argv)[1], opens=self._opens)
        except JobError:
            return LoadedJob(Job(), {})  # the page must come even for a job that is wrong

    @property
    def usage(self) -> str:
        """The form of its command line: the words after `phalanx`."""
        named = "COMMAND" if self.default is None else "[COMMAND]"
        return " ".join([self.name, *(self.commands[WHOLE].names if WHOLE in self.commands else [named]), "[options]"])

    @property
    def listed(self) -> tuple[Example, ...]:
        """Every command as the words after the verb, and what it does."""
        several = ((name, command) for name, command in self.commands.items() if name)
        return tuple((" ".join([name, *command.names]), command.about) for name, command in several)

    @property
    def options(self) -> list[Option]:
        """Every option once, those of every verb last, with the commands that take it if others do not."""
        found: dict[str, Option] = {}
        for name, command in self.commands.items():
            for each, option in command.described.items():
                known = found.get(each, option)
                found[each] = replace(known, name=each, commands=(*known.commands, name))
        options = sorted(found.values(), key=lambda option: option.name in JOB_SWITCHES)
        return [replace(each, commands=()) if len(each.commands) == len(self.commands) else each for each in options]

    def _of_command(self, command: str) -> Verb:
        """Returns one command as a verb of its own, for its page."""
        start, about = f"{self.name} {command}", self.commands[command].about
        mine = tuple(each for each in self.examples if f"{each[0]} ".startswith(f"{start} "))
        only, said = {WHOLE: self.commands[command]}, f"{about[:1].upper()}{about[1:]}."
        return replace(self, name=start, about=said, commands=only, examples=mine or self.examples)


def alone(subjects: tuple[str, ...] = (), options: Mapping[str, Option] = {}, **more: Any) -> dict[str, Command]:
    return {WHOLE: Command(subjects, options, **more)}


def job_verb(
    name: str,
    about: str,
    examples: tuple[Example, ...],
    switches: Mapping[str, str] = {},
    options: Mapping[str, Option] = {},
    exits: Mapping[int, str] = {},
    auto: Literal["open", "always", "plan", "measure", "train"] = "plan",
) -> Verb:
    subjects = ("[JOB.yaml ...]", "[key=value ...]")
    commands = alone(subjects, options, switches={**switches, **JOB_SWITCHES}, of_job=True)
    return Verb(name, about, commands, examples, exits=exits, auto=auto)


def tell(answers: Sequence[str]) -> None:
    """Prints what was understood on standard error, once: of several ranks that parse the same words, only rank 0."""
    from phalanx.launch.ranks import detect

    try:
        ranks = detect(os.environ)
    except PhalanxError:
        ranks = None  # a verb that starts no ranks need not know; `phalanx train` stops with the message
    if ranks is None or ranks.rank == 0:
        for answer in answers:
            echo(shortened(answer), file=sys.stderr)


def command_of(kind: type[Any]) -> dict[str, Command]:
    """Returns the only command of a verb, whose options are the fields of a dataclass, each explained below it.

    The first field, without a default, is the command's argument; several of a tuple. A field of type bool is a switch;
    one that is a dataclass stands for its own fields. Its type may be annotated with more about the option:
    `Annotated[Path, {"value": "FILE"}]`.
    """
    (subject, first), *others = _options_of(kind).items()
    options = {name: option for name, option in others if option.kind is not bool}
    switches = {name: option.about for name, option in others if option.kind is bool}
    return alone((subject.removesuffix("s").upper(),), options, switches=switches, more=first.many)


def _options_of(kind: type[Any]) -> dict[str, Option]:
    """Returns the fields of a dataclass as options, whose type is that of one value."""
    from phalanx.config.reference import texts_below

    found: dict[str, Option] = {}
    texts, hints = texts_below(kind), typing.get_type_hints(kind, include_extras=True)
    for each in dataclasses.fields(kind):
        hint, facts = hints[each.name], {}
        if typing.get_origin(hint) is typing.Annotated:
            hint, facts = typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            found |= _options_of(cast("type[Any]", hint))
            continue
        is_tuple = typing.get_origin(hint) is tuple
        if is_tuple or type(None) in typing.get_args(hint):
            hint = typing.get_args(hint)[0]
        found[each.name] = Option(texts[each.name], each.default, hint, many=is_tuple, **facts)
    return found


# The help pages: short by default; one section, field, option or command; or everything.
FLAGS = ("-h", "--help")
EVERYTHING = "all"
"""The word after --help that asks for every option and field in full."""
MOST_LINES = 42
"""Lines from which on the short page cuts the text of each option to one line."""
MOST_COLUMNS = 120
"""Widest page: longer lines are hard to read."""
GAP, LONGEST_FIRST, LEAST_SECOND = 2, 30, 20
"""Columns between the two columns of a page, the longest text in the first that shares its line with the second, and
the fewest columns of the second."""


def topics(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words right after --help, which name what to explain, and the rest of the command line without the
    flag."""
    start = next((place for place, word in enumerate(argv) if word in FLAGS), None)
    if start is None:
        return [], list(argv)
    end = start + 1
    while end < len(argv) and not (
        argv[end].startswith("-") or "=" in argv[end] or argv[end].endswith((".yaml", ".yml")) or isfile(argv[end])
    ):
        end += 1
    return list(argv[start + 1 : end]), [*argv[:start], *argv[end:]]


def print_page(page: Verb, asked: Sequence[str], loaded: LoadedJob | None = None) -> None:
    """Prints the page of a verb: the short one, or what is `asked` about.

    Args:
        page: what there is to say.
        asked: names of options, and of sections and fields of a job if the verb takes one; or "all".
        loaded: the job whose values are shown, if the verb takes one.

    Raises JobError about a name of none of these.
    """
    width = page_width()
    options = {option.name: option for option in page.options}
    names = [word for word in asked if word != EVERYTHING]
    _refuse([word for word in names if _plain(word) not in options], [*options], takes_job=loaded is not None)
    if not asked:
        echo("\n".join(_short(page, width)))
        return
    lines: list[str] = []
    if EVERYTHING in asked:
        lines += [*_page(page, width), ""]
        names = []
    for name in dict.fromkeys(map(_plain, names)):
        if name in options:
            lines += [*in_columns([(options[name].flag, options[name].text)], width), ""]
    if loaded is not None:
        fields = outer_sections() if EVERYTHING in asked else [*dict.fromkeys(names)]
        for name in fields:
            if _plain(name) not in options:
                lines += [*explained(name, loaded, width), ""]
    echo("\n".join(lines[:-1]))


def _refuse(words: Sequence[str], options: Sequence[str], *, takes_job: bool) -> None:
    """Raises JobError if there is a word, none of which is an option, unless it names a section or field of a job."""
    if takes_job and words:
        problems = [*problems_of(words, options)]
    else:
        problems = [f"--help {word}: no option of this name{did_you_mean(word, options)}" for word in words]
    if problems:
        raise JobError(problems)


def _plain(word: str) -> str:
    return word.replace("-", "_")


def _short(page: Verb, width: int) -> list[str]:
    """Returns the lines of the whole page, or of a page with one line per option if it is long."""
    hidden = [option.name for option in page.options if option.rare]
    lines = [*_page(page, width, hidden=hidden)]
    return lines if len(lines) <= MOST_LINES else [*_page(page, width, hidden=hidden, clips=True)]


def _page(page: Verb, width: int, *, hidden: Collection[str] = (), clips: bool = False) -> Iterator[str]:
    first, *rest = filled(f"usage: phalanx {page.usage}", width)
    yield from ([first, *filled(" ".join(rest), width, indent=len("usage: "))] if rest else [first])
    yield from ("", *filled(page.about, width))
    if page.listed:
        yield from ("", "commands:", *in_columns(page.listed, width, clips=clips))
    for note in page.notes:
        yield from ("", *filled(note, width))
    yield from ("", "examples:")
    yield from in_columns([(f"phalanx {words}", what) for words, what in page.examples], width)
    yield from ("", "options:")
    rows = [(option.flag, option.text) for option in page.options if option.name not in hidden]
    rows.append(
        ("-h, --help [NAME]", f"This page; {'a section, a field, ' if page.takes_job else ''}an option, or all.")
    )
    yield from in_columns(rows, width, clips=clips)
    if hidden or clips:
        names = f"{', '.join(flag_of(name) for name in hidden)}: " if hidden else "In full: "
        one = f"`phalanx {page.name} COMMAND --help`, or " if page.listed else ""
        yield from ("", *filled(f"{names}{one}`phalanx {page.name} --help {EVERYTHING}`.", width))
    if page.exits:
        codes = "; ".join(f"{code} {meaning}" for code, meaning in page.exits.items())
        yield from ("", *filled(f"Exit codes: {codes}.", width))
    if page.takes_job:
        text = (
            f"Fields of a job are set as key=value or --key value. Sections: {', '.join(outer_sections())}. "
            "`--help layout` explains a section, `phalanx docs job` every field."
        )
        yield from ("", *filled(text, width))


def section_names() -> list[str]:
    """Returns the names of all sections, outer ones before those inside of them."""
    from phalanx.config.added import ADDED
    from phalanx.config.fields import sections  # here and below: they read every field of a job

    known = sections()
    around = [added for added in ADDED if any(each.startswith(f"{added}.") for each in known)]
    return [*dict.fromkeys([*(each.partition(".")[0] for each in known), *around, *known])]


def outer_sections() -> list[str]:
    """Returns the names of the sections that lie in no other."""
    return [name for name in section_names() if "." not in name]


def problems_of(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yields a message about every word after --help that is no section and no field. `options` are other names that
    could be meant."""
    from phalanx.config import reference
    from phalanx.config.added import load_for
    from phalanx.config.fields import resolve

    for word in words:
        load_for(word)
    known = [*section_names(), *options, *(field.short for field in reference.fields().values())]
    for word in words:
        if word not in section_names() and resolve(word) is None:
            yield (
                f"--help {word}: no section or field of this name{did_you_mean(word, known)}; sections: "
                f"{', '.join(outer_sections())}"
            )


def explained(name: str, loaded: LoadedJob, width: int) -> Iterator[str]:
    """Yields the lines about a section with those inside of it, or about one field."""
    from phalanx.config import reference
    from phalanx.config.fields import resolve

    if name not in section_names():
        yield from _field(reference.fields()[resolve(name) or name], loaded, width)
        return
    for section, text in reference.section_texts().items():
        if f"{section}.".startswith(f"{name}.") and not section.startswith(reference.MEASURED):
            if section != name:
                yield ""
            yield from (section, *filled(text, width), "")
            for field in reference.fields().values():
                if field.section == section:
                    yield from _field(field, loaded, width)


def _field(field: FieldReference, loaded: LoadedJob, width: int) -> Iterator[str]:
    from phalanx.config.fields import get
    from phalanx.config.reference import shown

    flag = flag_of(field.path)
    if field.kind is bool:
        section, _, last = field.path.rpartition(".")
        flag = f"{flag}, {flag_of(f'{section}.no_{last}')}"
    else:
        flag = f"{flag} {value_name(field.kind)}"
    value, origin = get(loaded.job, field.path), loaded.origins.get(field.path, "default")
    now = f"default {shown(field.default)}"
    if origin != "default":
        now = f"{shown(value)} ({origin}); {now}"
    limits = "; ".join(words for each in field.ranges if (words := each.words))
    facts = "; ".join(part for part in (limits, now) if part)
    yield from filled(flag, width, indent=2)
    yield from filled(f"{field.about} [{facts}]", width, indent=6)


def page_width() -> int:
    """Returns the width of a page in columns: the terminal's ($COLUMNS, or 80 where there is none)."""
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


def in_columns(rows: Sequence[tuple[str, str]], width: int, *, clips: bool = False) -> Iterator[str]:
    """Yields the lines of rows in two columns. A long first cell has its own line, or several that a shell reads as
    one. The second cell is wrapped, or with `clips` cut to one line."""
    longest = min(LONGEST_FIRST, width * 2 // 5)
    left = max((len(first) for first, _ in rows if len(first) <= longest), default=0)
    indent = " " * (left + 2 * GAP)
    room = max(width - len(indent), LEAST_SECOND)
    for first, second in rows:
        lines = [clipped(second, room)] if clips else filled(second, room)
        if len(first) > left:
            yield from command_lines(first, width, GAP)
        else:
            yield f"{' ' * GAP}{first:<{left}}{' ' * GAP}{lines.pop(0) if lines else ''}".rstrip()
        yield from (f"{indent}{line}" for line in lines)


def command_lines(words: str, width: int, indent: int = 0) -> list[str]:
    """Returns a command in lines that a shell reads as one."""
    first, later = " " * indent, " " * (indent + 2 * GAP)
    lines = textwrap.wrap(
        words, width - len(" \\"), initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def filled(text: str, width: int, indent: int = 0) -> list[str]:
    start = " " * indent
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def clipped(text: str, room: int) -> str:
    """Returns a text that fits into `room` columns: if it is longer its first sentence or clause, unless that says
    little, or its first words."""
    for mark in (". ", "; ", ": "):
        clause = text.partition(mark)[0]
        if len(text) > room and len(clause) >= room // 2:
            text = clause
    return text if len(text) <= room else f"{text[: room - 2].rsplit(' ', 1)[0]} …"
