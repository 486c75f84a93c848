"""`phalanx completion SHELL`: a script with every verb, option, field and name, so that a Tab starts no program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.check.schema import known_names
from phalanx.cli import completion_scripts
from phalanx.cli.commands import Command, CommandVerb
from phalanx.cli.completion_scripts import Words
from phalanx.cli.job_words import JobVerb
from phalanx.cli.page import flag_of
from phalanx.cli.verbs import VERBS, description_of
from phalanx.config import reference
from phalanx.config.fields import SECTION_SHORTHAND, short_names
from phalanx.config.layout_line import AUTO, SECTION
from phalanx.echo import echo

SHELLS = {"bash": completion_scripts.bash, "zsh": completion_scripts.zsh, "fish": completion_scripts.fish}
VERB = CommandVerb(
    "completion",
    "Prints a script that completes verbs, options, fields (layout.tp=) and their names in a shell. Write it once, and "
    "again after an update or a new package.",
    {
        "bash": Command(switches={}, about="for bash 4 or later: ~/.bashrc has `source ~/.phalanx.bash`"),
        "zsh": Command(switches={}, about="for zsh: ~/.zshrc has `source ~/.phalanx.zsh` after compinit"),
        "fish": Command(switches={}, about="for fish, which reads its folder of completions by itself"),
    },
    (
        ("completion bash > ~/.phalanx.bash", "for bash"),
        ("completion fish > ~/.config/fish/completions/phalanx.fish", "for fish"),
    ),
)


def run(argv: Sequence[str]) -> int:
    parsed = VERB.parse(argv)
    if parsed is None:
        return 0
    echo(SHELLS[parsed.command](words()))
    return 0


def words() -> Words:
    """Returns everything that is completed."""
    return Words(
        verbs=dict(VERBS),
        arguments={verb: [*_arguments(verb)] for verb in VERBS},
        takes_job=[verb for verb in VERBS if isinstance(description_of(verb), JobVerb)],
        keys=[*_keys()],
        values=_values(),
    )


def _arguments(verb: str) -> Iterator[str]:
    """Yields the commands of a verb and its options."""
    described = description_of(verb)
    if isinstance(described, JobVerb):
        yield from described.name.split()[1:]
    else:
        yield from filter(None, described.commands)
    yield from (flag_of(option.name) for option in described.page.options)
    yield "--help"


def _keys() -> Iterator[str]:
    """Yields the names by which the command line sets fields: sections as one word, short names, and dotted paths."""
    yield from (SECTION, *SECTION_SHORTHAND)
    fields = [field for field in reference.fields().values() if not field.path.startswith(reference.MEASURED)]
    yield from dict.fromkeys(name for field in fields for name in (field.short, field.path))


def _values() -> dict[str, list[str]]:
    """Returns the values of every key that has a list of them."""
    known, found = known_names(), {SECTION: [AUTO]}
    for field in reference.fields().values():
        choices = known.get(field.path) or [*map(str, field.choices)]
        choices = choices or (["true", "false"] if field.kind is bool else [])
        if choices and not field.path.startswith(reference.MEASURED):
            found.update(dict.fromkeys((field.path, field.short), choices))
            if field.name not in short_names():  # the value decides: schedule=zb_v, schedule=cosine
                found[field.name] = [*found.get(field.name, []), *choices]
    return {**found, **{section: found[path] for section, path in SECTION_SHORTHAND.items() if path in found}}
