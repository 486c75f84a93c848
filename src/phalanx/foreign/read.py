"""Reads a file of another framework as a job, and says which lines of it another layout changes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.bounded import read_text
from phalanx.config import values, yaml_file
from phalanx.config.fields import sections
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.foreign import accelerate, automodel, axolotl, bridge, deepspeed, frame, megatron, primus, torchtitan
from phalanx.nearest import near_file

FORMATS: tuple[frame.ForeignFormat, ...] = (
    torchtitan.FORMAT,
    deepspeed.FORMAT,
    axolotl.FORMAT,
    accelerate.FORMAT,
    automodel.FORMAT,
    primus.FORMAT,
    bridge.RECIPE,
    bridge.YAML,
    bridge.NEMO,
    bridge.NEMO_YAML,
    megatron.YAML,
    megatron.SCRIPT,
)
"""The known formats. The first that recognises a file reads it."""


@dataclass(frozen=True)
class UnreadFormat:
    """A program whose configuration files are named, and not read."""

    source: str
    """The page that documents them."""
    fields: Mapping[str, str]
    """The field of a job that each of their values becomes."""
    keys: tuple[str, ...] = ()
    """Sets of keys of the first level that only theirs have together, with _ for -."""
    text: str = ""
    """A pattern that only their files match."""
    way: str = ""
    """What else helps."""

    def recognises(self, source: frame.Source) -> bool:
        """Returns whether a file is theirs."""
        keys = {key.replace("-", "_") for key in source.keys}
        return any(keys.issuperset(each.split()) for each in self.keys) or bool(
            self.text and re.search(self.text, source.text)
        )


UNREAD = {
    name: values.read_as(UnreadFormat, stored, f"unread.yaml: {name}")
    for name, stored in values.yaml_data(__file__, "unread.yaml").items()
}


def _unread(source: frame.Source) -> str:
    """Returns which program a file is of that none is read of, and what to write instead; nothing of others."""
    for name, each in UNREAD.items():
        if each.recognises(source):
            fields = ", ".join(f"{theirs} is {ours}" for theirs, ours in each.fields.items())
            hub = "model.from (a folder, or a run of `phalanx import hf hub:OWNER/NAME --out RUN`)"
            return (
                f"{source.path}: is a configuration of {name}, which Phalanx does not read: write a job file "
                f"(`phalanx init` begins one), in which {fields.replace('model.from', hub)}{'; ' * bool(each.way)}"
                f"{each.way}"
            )
    return ""


def read(path: Path, problems: list[str] | None = None) -> frame.ForeignJob:
    """Returns a file of another framework as a job. Nothing in it is executed. Raises JobError with every problem;
    those of single values are added to `problems` instead, if given."""
    source = _source(path)
    if source.keys >= {"model_type", "architectures"}:
        raise JobError(f"{path}: describes a model of Hugging Face, not a run; take it as model=hf:{path}")
    if unread := _unread(source):
        raise JobError(unread)
    found = next((each for each in FORMATS if each.recognises(source)), None)
    if found is None and path.suffix == ".toml":
        try:
            tomllib.loads(source.text)
        except ValueError as error:
            raise JobError(f"{path}: not valid TOML: {error}") from None
    if found is None and path.suffix in (".yaml", ".yml", ".json") and source.root is None:
        raise JobError(yaml_file.parse(source.text, str(path))[1] or f"{path}: is empty")
    if found is None:
        kinds = "; ".join(f"{each.kind} ({each.marks})" for each in FORMATS)
        raise JobError(f"{path}: not a configuration of a known kind; known: {kinds}")
    try:
        table = frame.table_of(found.table)
        parts = frame.Fields(source, table, frame.with_defaults(table, found.parse(source)))
    except RecursionError:
        raise JobError(f"{path}: nested too deeply") from None
    parts.plain()
    found.finish(parts)
    if parts.problems and problems is None:
        raise JobError(parts.problems)
    if problems is not None:
        problems += parts.problems
    return parts.job(found.kind)


def recognised(path: Path) -> str:
    """Returns what a file is and how it is read, if it is of another program; nothing of others, and of jobs."""
    try:
        source = _source(path)
        if {"model_type", "hidden_size"} <= source.keys:
            return f"{path}: describes a model of Hugging Face, not a run; take it as model=hf:{path}"
        ours = source.keys and source.keys <= {section.partition(".")[0] for section in sections()}
        if not ours and (unread := _unread(source)):
            return unread
        kind = "" if ours else next((each.kind for each in FORMATS if each.recognises(source)), "")
    except (JobError, RecursionError):
        return ""
    way = f"phalanx predict, plan and verify read it with --from {path}"
    return f"{path}: is a configuration of {kind}, not a job file; {way}" if kind else ""


def format_named(kind: str) -> frame.ForeignFormat:
    """Returns the format of a kind."""
    return next(each for each in FORMATS if each.kind == kind)


def _source(path: Path) -> frame.Source:
    part = ""
    if ".py:" in path.name and not path.exists():
        name, _, part = path.name.rpartition(":")
        path = path.with_name(name)
    try:
        return frame.Source(path, read_text(path, frame.MOST_BYTES), part)
    except FileNotFoundError:
        raise JobError(f"{path}: there is no such file{near_file(path)}") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: is not UTF-8 text (byte {error.start})") from None


NOT_WRITTEN = ("auto", "bucket_mb", "axes", "accumulation")
"""Fields of a layout that no format states, or that follow from its others."""


def write_back(theirs: frame.ForeignJob, before: Layout, layout: Layout) -> Sequence[frame.ChangedLine]:
    """Returns the lines of the file that change if its layout, `before`, becomes `layout`, in its own format, and a
    note on every field of the layout that the format has no name for."""
    found = format_named(theirs.kind)
    table = frame.table_of(found.table)
    names = {path.removeprefix("layout."): name for path, name in table.by_path().items() if path.startswith("layout.")}
    changed = [each.name for each in fields(Layout) if getattr(layout, each.name) != getattr(before, each.name)]
    changed = [name for name in changed if name not in NOT_WRITTEN]
    wanted: dict[str, Any] = {}
    for name in changed:
        if name in names and name not in found.covers:
            meaning = table.names[names[name]]
            inverse = {ours: word for word, ours in meaning.values.items()}
            value = getattr(layout, name)
            wanted[names[name]] = inverse.get(value, value) if inverse else value
    lines = list[frame.ChangedLine]()
    if found.covers & {*changed} or wanted:
        now = found.written(theirs, before)
        wanted |= {name: value for name, value in found.written(theirs, layout).items() if value != now.get(name)}
    now = dict[int, str]()
    for name, value in wanted.items():
        lines += _changed(theirs, found, now, name, value)
    lines += [frame.ChangedLine(at, theirs.source.lines[at - 1], after) for at, after in now.items()]
    lines += [
        frame.ChangedLine(0, "", "", f"{name}={getattr(layout, name)}: {theirs.kind} has no name for it")
        for name in changed
        if name not in names and name not in found.covers
    ]
    return sorted(lines, key=lambda line: (not line.line, line.line))


def _changed(
    theirs: frame.ForeignJob, found: frame.ForeignFormat, now: dict[int, str], name: str, value: Any
) -> list[frame.ChangedLine]:
    """Returns the change that gives a name a value, or puts it into `now`, the changed lines by their number; what
    begins with a question mark has no name there."""
    if name.startswith("?"):
        return [frame.ChangedLine(0, "", "", f"{name[1:]}: {value}")] if value else []
    stated = theirs.stated.get(name)
    if stated is None or not stated.line or stated.path not in (None, theirs.path):
        return [] if value is None else [frame.ChangedLine(0, "", found.new_line(name, value))]
    if value is None and stated.value in (None, False, "false", 0):
        return []
    before = theirs.source.lines[stated.line - 1]
    line = now.get(stated.line, before)
    if (value is None and not found.absent) or (value is False and not stated.text):
        beside = [each for each in theirs.stated.values() if each.line == stated.line and each is not stated]
        if beside and stated.text:
            return [frame.ChangedLine(0, "", "", f"{name}: goes from line {stated.line}")]
        now[stated.line] = ""
    elif stated.text:
        spelled = found.absent if value is None else found.spelled(value)
        key = line.find(name.rpartition(".")[2])
        place = line.find(stated.text, key) if key >= 0 else line.rfind(stated.text)
        end = place + len(stated.text)
        after = f"{line[:place]}{spelled}{line[end:]}" if place >= 0 else found.new_line(name, value)
        if after != before:
            now[stated.line] = after
    return []
