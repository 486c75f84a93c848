"""The words after `phalanx VERB`: job files, `key=value` and `--key value` overrides, names of other programs for them,
and the verb's own switches."""

from __future__ import annotations

import os
import re
import typing
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.config import foreign_names, layout_line, values
from phalanx.config.fields import leaves, resolve, suggestion
from phalanx.config.foreign_names import Derived
from phalanx.config.layout import Layout
from phalanx.config.layout_line import AUTO, SECTION
from phalanx.config.values import not_unicode
from phalanx.config.yaml_file import Setting, layout_settings
from phalanx.errors import MOST_PROBLEMS
from phalanx.nearest import nearest

REPLACES = "++"
"""Before key=value: an earlier word of the command line for that field gives way, as in hydra. Otherwise two words with
different values are an error."""


@dataclass
class CommandLine:
    """The parsed words of a command line."""

    files: list[Path] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    """Names of other programs whose value depends on the rest of the job."""
    groups: list[Setting] = field(default_factory=list)
    """Settings that one word stands for. The others of the command line win over them."""
    answers: list[str] = field(default_factory=list)
    """What was understood, for the user."""
    base: list[Setting] = field(default_factory=list)
    """Settings below those of job files: those of a file of another framework."""
    missing: tuple[str, ...] = ()
    """Patterns of the fields whose problems follow from what that file lacks, which `problems` say."""


def parse(argv: Sequence[str], switches: Collection[str] = ()) -> CommandLine:
    """Parses a command line. `switches` are the verb's own flags without a value ("json", "fresh").

    `train.steps=10`, `--train.steps 10`, `--train.steps=10`, `--steps 10` and `--train.compile` (a true/false field
    without a value) all set a field; `-` and `_` are the same in names. `layout=auto` and `layout=tp=2,sp=true` set the
    whole section, and so does a line alone, as verbs print it: `tp=2,sp=true`, also behind `layout:` and with spaces.
    Names of ezpz, wordplay and nanoGPT are taken too (foreign_names.py).
    """
    words = CommandLine()
    rest = deque(argv)
    while rest:
        word = rest.popleft()
        while word.endswith(",") and rest and _is_layout_line(word + rest[0]):  # a table's cell of several lines
            word += rest.popleft()
        if not word.isascii() and not_unicode(word):
            words.problems.append(f"{word!a} is not UTF-8: config.yaml could not be written with it")
        elif word.startswith("--") and len(word) > 2:
            _flag(word, rest, switches, words)
        elif word == f"{SECTION}:" and rest:  # as in the log of a run
            _set(SECTION, rest[0], f"{word} {rest.popleft()}", words)
        elif _is_layout_line(word):
            _set(SECTION, word, word, words)
        # A run that is named after its layout has a file with "=" in its path: runs/tp=2/config.yaml.
        elif "=" in word and word[0] not in "-./" and not ("/" in word.partition("=")[0] and os.path.isfile(word)):
            name, _, text = word.partition("=")
            before = len(words.settings)
            _set(name.removeprefix(REPLACES), text, word, words)
            if name.startswith(REPLACES):
                words.settings[before:] = [replace(each, replaces=True) for each in words.settings[before:]]
        elif word.endswith((".yaml", ".yml")) or os.path.isfile(word):
            words.files.append(Path(word))
        else:
            own = os.path.join(word, "config.yaml")
            of_run = f"; the job of this run is {own}" if os.path.isfile(own) else ""
            words.problems.append(f"unexpected {word!r}: expected a job file (.yaml), key=value or --key value{of_run}")
    return words


def _is_layout_line(word: str) -> bool:
    """Returns whether a word is a layout's line: an item of the layout first, and others after a comma."""
    first, *others = layout_line.items(word)
    name, equals, _ = first.partition("=")
    name = name.replace("-", "_").removeprefix(f"{SECTION}.")
    return any("=" in item for item in others) and (name in leaves(Layout) if equals else name == AUTO)


def _flag(word: str, rest: deque[str], switches: Collection[str], words: CommandLine) -> None:
    name, equals, text = word[2:].partition("=")
    plain = name.replace("-", "_")
    if plain in switches and equals:
        words.problems.append(f"--{name} takes no value, found {text!r}: give it alone, or leave it out")
        return
    if plain in switches and not equals:
        words.switches.add(plain)
        return
    following = rest[0] if rest else None
    path = SECTION if plain == SECTION else resolve(plain, text if equals else following)
    if path is None and _alias_flag(plain, text if equals else None, word, rest, switches, words):
        return
    negated = resolve(re.sub(r"(^|\.)no_([^.]+)$", r"\1\2", plain))
    if path is None and negated and _is_switch(negated) and not equals:
        words.settings.append(Setting(negated, "false", f"command line: {word}"))
    elif path is None:
        words.problems.append(f"unknown option {word.partition('=')[0]}{_meant(plain, words, switches)}")
        if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
            rest.popleft()  # its value, so that one mistake gives one message
    elif equals:
        _set(name, text, word, words)
    elif _is_switch(path):
        words.settings.append(Setting(path, "true", f"command line: {word}"))
    elif not rest or rest[0].startswith("--"):
        words.problems.append(f"{word} needs a value")
    else:
        _set(name, rest[0], f"{word} {rest[0]}", words)
        rest.popleft()


def _set(name: str, text: str, word: str, words: CommandLine) -> None:
    if not name:
        words.problems.append(f"{word!r} names no field: expected key=value")
        return
    path = resolve(name, text)
    if path is None and _alias(name, text, word, words):
        return
    if name == SECTION:
        found, wrong = layout_settings(text, f"command line: {word}")
        words.settings += found
        words.problems += wrong
    elif path is None:
        words.problems.append(f"unknown key {name} in {word!r}{_meant(name, words)}")
    else:
        if leaves()[path] in (int, float, bool):
            text = text.rstrip(":,")  # pasted from a sentence: "dp_shard=8 pp=2: the best is 1.06 × as fast"
        words.settings.append(Setting(path, text, f"command line: {shown(word)}"))


def _alias_flag(
    name: str, text: str | None, word: str, rest: deque[str], switches: Collection[str], words: CommandLine
) -> bool:
    """Takes `--name [value]`, if the name is an alias, and returns whether it is."""
    if text is None and name in foreign_names.FLAGS:
        path, value = foreign_names.FLAGS[name]
        words.settings.append(Setting(path, value, f"command line: {word}", alias=name))
        return True
    if text is None and foreign_names.SWITCHES.get(name) in switches:
        words.switches.add(foreign_names.SWITCHES[name])
        words.answers.append(f"{word}: taken as --{foreign_names.SWITCHES[name]}")
        return True
    found = foreign_names.find(name)
    if found is None:
        return False
    if (
        text is None
        and _is_switch(found[1].path)
        and not (rest and rest[0].lower() in {*values.TRUE, *values.FALSE, *found[1].values})
    ):
        text = "true"
    elif text is None and (not rest or rest[0].startswith("--")):
        words.problems.append(f"{word} needs a value")
        return True
    elif text is None:
        text = rest.popleft()
        word = f"{word} {text}"
    return _alias(name, text, word, words)


def _is_switch(path: str) -> bool:
    """Returns whether a field is true or false, so that its name alone says true."""
    kind = leaves().get(path)
    return kind is bool or bool in typing.get_args(kind)


def _alias(name: str, text: str, word: str, words: CommandLine) -> bool:
    """Takes `name=text`, if the name is an alias, and returns whether it is."""
    word = shown(word)
    name, origin = name.lstrip("+"), f"command line: {word}"  # hydra's + adds a key
    if group := foreign_names.GROUPS.get(f"{name}={text}"):
        words.groups += [Setting(path, value, origin) for path, value in group.items()]
        words.answers.append(f"{word}: taken as {', '.join(f'{path}={value}' for path, value in group.items())}")
        return True
    found = foreign_names.find(name)
    if found is None:
        return False
    known, alias = found
    if what := alias.nothing.get(text.lower()):
        words.answers.append(f"{word}: nothing to set, {what}")
    elif alias.rule:
        words.derived.append(Derived(known, text, origin))
    elif alias.path:
        words.settings.append(Setting(alias.path, alias.values.get(text.lower(), text), origin, alias=known))
    else:
        words.problems.append(f"{origin}: {foreign_names.ADVICE[known.rpartition('.')[2]]}")
    return True


def shown(word: str) -> str:
    """Returns a word as messages show it: without a password before a host, which is no legal value."""
    return re.sub("://[^/@]*@", "://…@", word)


def _meant(name: str, words: CommandLine, switches: Collection[str] = ()) -> str:
    """Returns a hint about an unknown name, while the error still lists its problem: a hint takes milliseconds."""
    if len(words.problems) >= MOST_PROBLEMS:
        return ""
    meant = nearest(name, switches)
    return f"; did you mean --{meant.replace('_', '-')}?" if meant else suggestion(name)
