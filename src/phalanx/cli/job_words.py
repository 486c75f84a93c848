"""What every verb that takes a job does with its words: --help, --print-config, the job itself, the verb's switches."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from phalanx.errors import JobError
from phalanx.job import overrides
from phalanx.job.job import Job
from phalanx.job.load import LoadedJob, load_words
from phalanx.job.presets import PRESETS
from phalanx.job.show import as_dict, as_yaml

COMMON_SWITCHES = {
    "json": "Print one JSON document on standard output and nothing else.",
    "print_config": "Show the resolved job and where each value came from, and stop.",
}


@dataclass(frozen=True)
class JobWords:
    """A verb's words, understood."""

    loaded: LoadedJob
    switches: frozenset[str]

    @property
    def job(self) -> Job:
        return self.loaded.job


@dataclass(frozen=True)
class JobVerb:
    """A verb that takes a job: its name, one line about it, and its switches with what each does."""

    name: str
    about: str
    switches: dict[str, str]

    def parse(self, argv: Sequence[str]) -> JobWords | None:
        """The job and the switches, or None where the words asked for help or the configuration, which was printed.

        Raises JobError with every problem of the words, the files and the job.
        """
        if "-h" in argv or "--help" in argv:
            self._print_help(argv)
            return None
        words = overrides.parse(argv, {*self.switches, *COMMON_SWITCHES})
        loaded = load_words(words)
        if "print_config" in words.switches:
            text = json.dumps(_with_origins(loaded), indent=2) if "json" in words.switches else as_yaml(loaded).rstrip()
            print(text)
            return None
        return JobWords(loaded, frozenset(words.switches))

    def _print_help(self, argv: Sequence[str]) -> None:
        """tyro's page of every field; the defaults it shows are those of the job files on the same command line."""
        import tyro

        words = overrides.parse(
            [word for word in argv if word not in ("-h", "--help")], {*self.switches, *COMMON_SWITCHES}
        )
        try:
            job = load_words(words).job
        except JobError:
            job = Job()  # the page must come even for a job that is wrong
        switches = [
            (name, Annotated[bool, tyro.conf.arg(help=what)], dataclasses.field(default=False))
            for name, what in {**self.switches, **COMMON_SWITCHES}.items()
        ]
        page = dataclasses.make_dataclass(self.name, switches, bases=(Job,), frozen=True)
        page.__doc__ = (
            f"{self.about}\n\nFields may be written as `train.steps=10`, `--train.steps 10` or, where the last name is "
            f"enough, `--steps 10`.\n\nModel presets: {', '.join(PRESETS)}."
        )
        values = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
        try:
            tyro.cli(
                page,
                prog=f"phalanx {self.name} [JOB.yaml ...] [key=value ...]",
                default=page(**values),
                args=["--help"],
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
            )
        except SystemExit:
            sys.stdout.flush()


def _with_origins(loaded: LoadedJob) -> dict[str, object]:
    return {"job": as_dict(loaded.job), "origins": loaded.origins}
