"""A job file as a list of settings, each with the line it stands on. Only plain YAML: no tags, nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from phalanx.bounded import read_text
from phalanx.config import layout_line
from phalanx.config.added import ADDED, load_for
from phalanx.config.fields import SECTION_SHORTHAND, leaves, resolve, sections, suggestion, within
from phalanx.config.values import LOADER, MOST_NESTING, row_of, too_deep
from phalanx.errors import MOST_PROBLEMS, JobError
from phalanx.nearest import near_file, nearest
from phalanx.units import listed

PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")
}

SET_FIELDS = "set_fields"
"""Key of a run's config.yaml: the fields that somebody set. All others in that file were resolved: defaults, and values
of presets, which a later preset replaces."""
MOST_BYTES = 2**18
"""Most bytes of a job file. A job with every field set and explained has a tenth of that."""


@dataclass(frozen=True)
class Setting:
    """One value that a user gave: its dotted path, its text, and where it was written."""

    path: str
    text: str | list[str]
    origin: str
    alias: str = ""
    """The name that was given, if it is another program's (config/foreign_names.py)."""
    implied: bool = False
    """Whether the field itself was not named: a layout's line sets every field."""
    replaces: bool = False
    """Whether it is meant to replace an earlier setting of the same command line: `++key=value`."""
    resolved: bool = False
    """Whether nobody set it: a run's config.yaml also holds every default and every value of a preset."""
    foreign: bool = False
    """Whether it is from a file of another framework, which may state what has no effect here."""


def read(path: Path) -> tuple[list[Setting], list[str]]:
    """Returns the settings of a job file and its problems: unknown or repeated keys, YAML errors, tags."""
    try:
        text = read_text(path, MOST_BYTES)
    except FileNotFoundError:
        return [], [f"{path}: there is no such file{near_file(path)}"]
    except OSError as error:
        return [], [f"{path}: cannot be read: {error.strerror or error}"]
    except UnicodeDecodeError as error:
        return [], [f"{path}: is not UTF-8 text (byte {error.start})"]
    return parse(text, str(path))


def parse(text: str, name: str) -> tuple[list[Setting], list[str]]:
    """Returns the settings and problems of YAML text; `name` stands for the file in messages and origins."""
    form = "JSON" if name.endswith(".json") else "YAML"
    try:
        if line := too_deep(text):
            return [], [f"{name}:{line}: nested deeper than {MOST_NESTING} levels"]
        root = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        if mark and text[mark.index : mark.index + 1] == "\t":
            return [], [f"{name}{line}: not valid {form}: a tab, where it takes only spaces"]
        return [], [f"{name}{line}: not valid {form}: {error.problem or error.context}"]
    except yaml.YAMLError as error:
        return [], [f"{name}: not valid {form}: {error}"]
    settings: list[Setting] = []
    problems: list[str] = []
    if root is None or (isinstance(root, yaml.MappingNode) and not root.value):
        return settings, [f"{name}: is empty: it sets no field of a job (`phalanx init` begins one)"]
    if not isinstance(root, yaml.MappingNode):
        return settings, [f"{name}:{root.start_mark.line + 1}: a job file is a mapping of sections, such as `train:`"]
    found = next(((key, value) for key, value in root.value if key.value == SET_FIELDS), None)
    if found is not None:
        root.value.remove(found)
    was_set = found[1] if found else None
    _walk(root, "", name, settings, problems)
    if was_set is not None:
        named = set(_texts(was_set)) if isinstance(was_set, yaml.SequenceNode) else set()
        settings = [each if each.path in named else replace(each, resolved=True) for each in settings]
    return settings, problems


def _walk(node: yaml.MappingNode, prefix: str, name: str, settings: list[Setting], problems: list[str]) -> None:
    first_seen: dict[str, int] = {}
    for key_node, value in node.value:
        origin = f"{name}:{key_node.start_mark.line + 1}"
        key = key_node.value
        if not isinstance(key, str) or key == "<<":
            problems.append(f"{origin}: a key must be a plain name")
            continue
        path = within(f"{prefix}{key}")
        load_for(path)
        if path in first_seen:
            problems.append(f"{origin}: {path} is set again (first on line {first_seen[path]})")
            continue
        first_seen[path] = key_node.start_mark.line + 1
        has_rows = row_of(leaves().get(path)) is not None
        foreign = next(_foreign_tags(value, nested=has_rows), None)
        if foreign and (path in leaves() or foreign not in PLAIN_TAGS):
            problems.append(f"{origin}: {path}: the tag {foreign} is not allowed; plain values only")
        elif has_rows and not value.tag.endswith(":null"):
            settings.append(Setting(path, yaml.serialize(value), origin))
        elif isinstance(value, yaml.MappingNode):
            if any(leaf.startswith(f"{path}.") for leaf in leaves()):
                _walk(value, f"{path}.", name, settings, problems)
            elif path in leaves():
                problems.append(f"{origin}: {path} is one value, not a section")
            else:
                hint = _meant_section(path) if len(problems) < MOST_PROBLEMS else ""
                problems.append(f"{origin}: unknown section {path}{hint}")
        else:
            target = path if path in leaves() or path == layout_line.SECTION else SECTION_SHORTHAND.get(path)
            inside = leaves() if target is None else ()
            if inner := [leaf.rpartition(".")[2] for leaf in inside if leaf.startswith(f"{path}.")]:
                problems.append(f"{origin}: {path} is a section, not one value; its fields: {listed(inner, 6)}")
            elif target is None:
                hint = _meant_key(path, key, value) if len(problems) < MOST_PROBLEMS else ""
                problems.append(f"{origin}: unknown key {path}{hint}")
            elif value.tag.endswith(":null"):
                problems.append(f"{origin}: {path} has no value")
            elif target == layout_line.SECTION:
                found, wrong = layout_settings(",".join(_texts(value)), origin)
                settings += found
                problems += wrong
            elif isinstance(value, yaml.SequenceNode):
                settings.append(Setting(target, _texts(value), origin))
            else:
                settings.append(Setting(target, value.value, origin))


def _meant_section(path: str) -> str:
    if f"{path}.".startswith(tuple(f"{each}." for each in ADDED)):
        return suggestion(path)
    meant = nearest(path, sections())
    return f"; did you mean {meant}?" if meant else f" (sections: {', '.join(sections())})"


def _meant_key(path: str, key: str, value: yaml.Node) -> str:
    # A short name (`lr: 1e-3`) is for the command line; files name the section for their readers.
    meant = resolve(key, value.value if isinstance(value, yaml.ScalarNode) else None)
    return f"; did you mean {meant}?" if meant else suggestion(path)


def layout_settings(text: str, origin: str) -> tuple[list[Setting], list[str]]:
    """Returns the settings of `layout: TEXT` (layout_line.settings_of) and its problems."""
    try:
        named, implied = layout_line.settings_of(text)
        settings = [Setting(path, value, origin, implied=True) for path, value in implied.items()]
        return [*settings, *(Setting(path, value, origin) for path, value in named.items())], []
    except JobError as error:
        return [], [f"{origin}: {problem}" for problem in error.problems]


def _texts(node: yaml.Node) -> list[str]:
    """Returns the text of a scalar, or of each item of a list of scalars."""
    return [str(item.value) for item in node.value] if isinstance(node, yaml.SequenceNode) else [str(node.value)]


def _foreign_tags(node: yaml.Node, *, nested: bool) -> Iterator[str]:
    """Yields tags such as !!python/object at this node or, one level down, in a list; with `nested` at any depth."""
    if node.tag not in PLAIN_TAGS:
        yield node.tag
    if nested and isinstance(node, yaml.CollectionNode):
        for part in node.value:
            for each in part if isinstance(part, tuple) else (part,):
                yield from _foreign_tags(each, nested=True)
    elif isinstance(node, yaml.SequenceNode):
        yield from (
            item.tag for item in node.value if not isinstance(item, yaml.ScalarNode) or item.tag not in PLAIN_TAGS
        )
