"""A verb: its options, commands and examples, from which its words are read and its pages, docs/reference/cli.md and
completion are made."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from phalanx.cli.option import Example, Option, PageOption, VerbPage, flag_of
from phalanx.echo import echo, shortened
from phalanx.errors import MOST_PROBLEMS, JobError, PhalanxError
from phalanx.nearest import nearest

if TYPE_CHECKING:
    from phalanx.check.load import LoadedJob
    from phalanx.config.job import Job
    from phalanx.config.overrides import CommandLine

JSON = {"json": "print one JSON document on standard output and nothing else"}
"""The switch of every command."""
JOB_SWITCHES = {**JSON, "print_config": "print the resolved job with the origin of each value, and exit"}
"""The switches of every verb that takes a job."""
PREDICTING = ("predict", "plan", "simulate")
"""The verbs that take a model which can be predicted and not trained."""
WHOLE = ""
"""The name of the only command of a verb without commands."""
Options = TypeVar("Options")


@dataclass(frozen=True)
class Command:
    """The arguments of a command."""

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
        return Words(name, tuple(subjects), found, frozenset(stated), frozenset(switches)), problems


@dataclass(frozen=True)
class Words:
    """A parsed command line."""

    command: str
    subjects: tuple[str, ...]
    """The arguments besides options; of a verb that takes a job the words about it, as they were given."""
    options: dict[str, Any]
    """The value of every option."""
    stated: frozenset[str]
    """The options that are given."""
    switches: frozenset[str]
    about_job: LoadedJob | None = None

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
        """The only argument."""
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
    """A verb."""

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
        from phalanx.cli.help_page import print_page, topics

        asked, rest = topics(argv)
        if self.takes_job:
            print_page(self.page, asked, self._shown_job([word for word in rest if word not in ("-h", "--help")]))
            return True
        page = self.page
        if named := [word for word in (*asked, *rest[:1]) if word and word in self.commands]:
            page = page.of_command(named[0])
        # An argument may stand after --help, too: a run's directory is no name of an option.
        print_page(page, [word for word in asked if word not in self.commands and not os.path.exists(word)])
        return True

    def read(self, argv: Sequence[str]) -> tuple[Words, list[str]]:
        """Returns the words after the verb and every problem of them. Raises JobError if they name no command."""
        name, words = WHOLE, list(argv)
        if WHOLE not in self.commands:
            name, *words = argv or [self.default or ""]
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
        if twice := [*repeated(line.settings)]:
            raise JobError([*line.problems, *twice])
        given = load_words(line, opens=self._opens)
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
            from phalanx.cli.predicting import check_calibration

            check_calibration(loaded.job.cluster, loaded.job.layout.world)
        switches = self.commands[WHOLE].switches
        rest = (word for word in words.subjects if word[:2] != "--" or word[2:].replace("-", "_") not in switches)
        return replace(words, subjects=tuple(rest), switches=frozenset(line.switches), about_job=loaded)

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
    def page(self) -> VerbPage:
        """What its pages show."""
        several = {name: command for name, command in self.commands.items() if name}
        named = "COMMAND" if self.default is None else "[COMMAND]"
        return VerbPage(
            self.name,
            " ".join([self.name, *([named] if several else self.commands[WHOLE].names), "[options]"]),
            self.about,
            tuple(self._page_options(several)),
            self.examples,
            self.notes,
            self.exits,
            self.takes_job,
            tuple((" ".join([name, *command.names]), command.about) for name, command in several.items()),
        )

    def _page_options(self, several: Mapping[str, Command]) -> Iterator[PageOption]:
        """Yields every option once, those of every verb last, with the commands that take it if others do not."""
        options: dict[str, PageOption] = {}
        for command in self.commands.values():
            for name, option in command.options.items():
                options.setdefault(name, PageOption(name, option.about, option))
            for name, about in command.switches.items():
                options.setdefault(name, PageOption(name, about))
        for option in sorted(options.values(), key=lambda option: option.name in JOB_SWITCHES):
            taking = tuple(
                name for name, each in several.items() if option.name in each.options or option.name in each.switches
            )
            yield replace(option, commands=taking if len(taking) < len(several) else ())


def job_verb(
    name: str,
    about: str,
    examples: tuple[Example, ...],
    switches: Mapping[str, str] = {},
    options: Mapping[str, Option] = {},
    exits: Mapping[int, str] = {},
    auto: Literal["open", "always", "plan", "measure", "train"] = "plan",
) -> Verb:
    """Returns a verb that takes a job."""
    subjects = ("[JOB.yaml ...]", "[key=value ...]")
    command = Command(subjects, options, switches={**switches, **JOB_SWITCHES}, of_job=True)
    return Verb(name, about, {WHOLE: command}, examples, exits=exits, auto=auto)


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


def command_of(kind: type[Any]) -> Command:
    """Returns the command whose options are the fields of a dataclass, each explained by the text below it.

    The first field, without a default, is the command's argument; several of a tuple. A field of type bool is a switch;
    one that is a dataclass stands for its own fields. Its type may be annotated with more about the option:
    `Annotated[Path, {"value": "FILE"}]`.
    """
    (subject, first), *others = _options_of(kind).items()
    options = {name: option for name, option in others if option.kind is not bool}
    switches = {name: option.about for name, option in others if option.kind is bool}
    return Command((subject.removesuffix("s").upper(),), options, switches=switches, more=first.many)


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
        found[each.name] = Option(hint, each.default, texts[each.name], many=is_tuple, **facts)
    return found
