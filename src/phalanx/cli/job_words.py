"""Parses the words of every verb that takes a job: --help, --print-config, the job itself, the verb's switches and
options."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.check.load import LoadedJob, as_dict, as_yaml, load_words, repeated
from phalanx.cli.calibration import check_calibration
from phalanx.cli.option import Option, repeated_option
from phalanx.cli.page import Example, PageOption, VerbPage
from phalanx.config import overrides
from phalanx.config.job import Job
from phalanx.echo import echo, shortened
from phalanx.errors import JobError, PhalanxError
from phalanx.launch.ranks import detect

COMMON_SWITCHES = {
    "json": "Print one JSON document on standard output and nothing else.",
    "print_config": "Print the resolved job with the origin of each value, and exit.",
}


@dataclass(frozen=True)
class JobWords:
    """A verb's parsed words."""

    loaded: LoadedJob
    switches: frozenset[str]
    options: dict[str, Any]
    """The value of every option of the verb."""
    given: tuple[str, ...] = ()
    """The words about the job, as they were given: files and fields, without the verb's switches and options."""

    @property
    def job(self) -> Job:
        return self.loaded.job


@dataclass(frozen=True)
class JobVerb:
    """A verb that takes a job."""

    name: str
    about: str
    examples: tuple[Example, ...]
    switches: Mapping[str, str] = field(default_factory=dict)
    """Options without a value, with their help."""
    options: Mapping[str, Option] = field(default_factory=dict)
    exits: Mapping[int, str] = field(default_factory=dict)
    """Exit codes that mean something of its own."""
    auto: Literal["open", "always", "plan", "measure", "train"] = "plan"
    """The treatment of `layout: auto`: it stays open, even if job files have a layout; the planner chooses; this
    machine may be measured for that, since the verb predicts; or a run keeps the layout that it has
    (cli/auto_layout.py)."""

    @property
    def opens(self) -> str:
        """The origin that leaves the layout to the planner by default: none, or the verb."""
        return f"phalanx {self.name}" if self.auto == "always" else ""

    def parse(self, argv: Sequence[str]) -> JobWords | None:
        """Returns the job and the switches, or None after printing the requested help or configuration.

        Raises JobError with every problem of the words, the files and the job.
        """
        if "-h" in argv or "--help" in argv:
            self._print_help(argv)
            return None
        words, options, rest = self._words(argv)
        if twice := [*repeated(words.settings)]:
            raise JobError([*words.problems, *twice])
        given = load_words(words, opens=self.opens)
        tell(given.answers)
        loaded = self._planned(given, fresh="fresh" in words.switches)
        if "print_config" in words.switches:
            text = json.dumps(_with_origins(loaded), indent=2) if "json" in words.switches else as_yaml(loaded).rstrip()
            echo(text)
            return None
        if self.auto == "measure" and not given.job.layout.auto:  # the planner has checked it otherwise
            check_calibration(loaded.job.cluster, loaded.job.layout.world)
        switches = {*self.switches, *COMMON_SWITCHES}
        about_job = (word for word in rest if word[:2] != "--" or word[2:].replace("-", "_") not in switches)
        return JobWords(loaded, frozenset(words.switches), options, tuple(about_job))

    def command_line(self, argv: Sequence[str]) -> tuple[overrides.CommandLine, dict[str, Any]]:
        """Returns the words and the options' values without loading the job. Raises JobError about words that mean
        nothing, but not about the job."""
        words, options, _ = self._words(argv)
        if words.problems:
            raise JobError(words.problems)
        return words, options

    def _planned(self, loaded: LoadedJob, *, fresh: bool) -> LoadedJob:
        if not loaded.job.layout.auto or self.auto in ("open", "always"):
            return loaded
        from phalanx.cli import auto_layout

        if self.auto == "train":
            return auto_layout.planned_to_train(loaded, fresh=fresh)
        return auto_layout.planned(loaded, measures=self.auto == "measure")

    def _words(self, argv: Sequence[str]) -> tuple[overrides.CommandLine, dict[str, Any], list[str]]:
        """Returns the words of the command line without the verb's options, the options' values, and those words as
        they were given. An option wins over a field of the job with the same short name."""
        found = {name: option.default for name, option in self.options.items()}
        problems: list[str] = []
        rest: list[str] = []
        seen: set[str] = set()
        left = deque(argv)
        while left:
            word = left.popleft()
            flag, equals, text = word.partition("=")
            name = flag[2:].replace("-", "_")
            if not flag.startswith("--") or name not in self.options:
                rest.append(word)
                continue
            option = self.options[name]
            try:
                converted = option.convert([text] if equals else _take(left, option))
            except ValueError as error:
                problems.append(f"{flag}: {error}")
            else:
                problems += repeated_option(flag, found[name], converted[0]) if name in seen and not option.many else ()
                found[name] = (*found[name], *converted) if option.many else converted[0]
                seen.add(name)
        words = overrides.parse(rest, {*self.switches, *COMMON_SWITCHES, *self.options})
        words.problems[:0] = problems
        return words, found, rest

    @property
    def page(self) -> VerbPage:
        """What its pages show."""
        switches = {**self.switches, **COMMON_SWITCHES}
        return VerbPage(
            self.name,
            f"{self.name} [JOB.yaml ...] [key=value ...] [options]",
            self.about,
            (
                *(PageOption(name, option.about, option) for name, option in self.options.items()),
                *(PageOption(name, about) for name, about in switches.items()),
            ),
            self.examples,
            exits=self.exits,
            takes_job=True,
        )

    def _print_help(self, argv: Sequence[str]) -> None:
        """Prints the page; the values shown are those of the job files and fields on the same command line."""
        from phalanx.cli import help_page

        asked, rest = help_page.topics(argv)
        words, _, _ = self._words([word for word in rest if word not in help_page.FLAGS])
        try:
            loaded = load_words(words, opens=self.opens)
        except JobError:
            loaded = LoadedJob(Job(), {})  # the page must come even for a job that is wrong
        help_page.print_page(self.page, asked, loaded)


def tell(answers: Sequence[str]) -> None:
    """Prints what was understood on standard error, once: of several ranks that parse the same words, only rank 0."""
    try:
        ranks = detect(os.environ)
    except PhalanxError:
        ranks = None  # a verb that starts no ranks need not know; `phalanx train` stops with the message
    if ranks is None or ranks.rank == 0:
        for answer in answers:
            echo(shortened(answer), file=sys.stderr)


def _take(left: deque[str], option: Option) -> list[str]:
    """Removes an option's values from the words that follow it, and returns them."""
    taken: list[str] = []
    while left and not left[0].startswith("--") and (option.many or not taken):
        if option.many and left[0].endswith((".yaml", ".yml")):
            break
        if taken and not re.match(option.like, left[0]):
            break
        taken.append(left.popleft())
    return taken


def _with_origins(loaded: LoadedJob) -> dict[str, object]:
    return {"job": as_dict(loaded.job), "origins": loaded.origins}
