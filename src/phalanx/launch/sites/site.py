"""Reads the files of sites: those of the package, the user's own, and one named on the command line.

Nothing in a file is executed: modules, variables and folders become quoted words of a script.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from phalanx.bounded import read_text
from phalanx.config.clusters import default_path
from phalanx.config.yaml_file import MOST_BYTES, PLAIN_TAGS
from phalanx.errors import JobError
from phalanx.launch.exported import is_secret
from phalanx.nearest import did_you_mean


@dataclass(frozen=True)
class Site:
    """The settings of one machine. A file has these fields; all but name and scheduler may be left out."""

    name: str
    scheduler: Literal["slurm", "pbs"]
    about: str = ""
    """A description of the machine, in one line."""
    source: str = ""
    """Where these settings come from."""
    note: str = ""
    """A note for users, printed with every launch."""
    hosts: list[str] = field(default_factory=list)
    """Regular expressions of which one matches the whole name of a host of this site."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables by which the site is recognised, each with a regular expression for its whole value."""
    devices: int = 0
    """Accelerators of a node, one rank each."""
    launcher: Literal["srun", "pals", "openmpi", "mpich"] | None = None
    """What starts processes inside a job; by default srun on Slurm, and what mpiexec says on PBS."""
    cpu_bind: str = ""
    """The launcher's --cpu-bind if it starts every rank of a full node."""
    cpus_per_rank: int = 0
    """Processors of each rank, if the launcher starts every rank of a full node."""
    exclusive: bool = True
    """Slurm: whether a job that uses every accelerator of its nodes asks for the nodes alone, with all their cores and
    memory."""
    host_suffix: str = ""
    """What follows a node's name in its address on the fast network, such as .hsn.cm.polaris.alcf.anl.gov."""
    account_required: bool = False
    queue: str = ""
    """The queue or partition unless the user names one."""
    queue_option: Literal["partition", "qos"] = "partition"
    """Slurm: the option that takes the queue."""
    time: str = "1:00:00"
    """The time limit unless the user gives one."""
    filesystems: list[str] = field(default_factory=list)
    """PBS: file systems without which a job must not start."""
    directives: list[str] = field(default_factory=list)
    """Further options of sbatch or qsub, one line each; {nodes} stands for the number of nodes."""
    module_paths: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    """Environment modules to load, in this order."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables to set; a user's own values win."""
    prepend: dict[str, str] = field(default_factory=dict)
    """Folders to put first in variables such as LD_LIBRARY_PATH, in batch scripts."""


GENERIC: dict[str, Site] = {
    "slurm": Site("slurm", "slurm", "any cluster with Slurm"),
    "pbs": Site("pbs", "pbs", "any cluster with PBS"),
}
"""What holds where no file describes the machine."""


_FIELDS = {field.name: field for field in dataclasses.fields(Site)}
_KINDS = typing.get_type_hints(Site)
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_MOST_ITEMS = 1000
_FORMS = {
    "name": (r"[a-z0-9][a-z0-9._-]{0,62}", "small letters, digits, and . _ -"),
    "time": (r"[0-9:-]{1,20}", "a time limit, such as 1:00:00"),
    "host_suffix": (r"\.[A-Za-z0-9.-]{1,200}", "the end of a host's address, such as .hsn.example.org"),
    "filesystems": (r"[A-Za-z0-9_-]+", "the name of a file system"),
    "modules": (r"[A-Za-z0-9][A-Za-z0-9._+/-]*", "the name of a module"),
    "module_paths": (r"/[^\x00-\x1f]*", "an absolute path"),
    "directives": (r"-[^\x00-\x1f`$]*", "an option, such as --constraint=gpu"),
}


def known(env: Mapping[str, str]) -> dict[str, Site]:
    """Returns every site by name: those of the package, then those of the user's folder, which win.

    Raises JobError with every problem of the files.
    """
    found, problems = dict(GENERIC), []
    for name, read in _files(env):
        try:
            site = parse(read(), name)
        except JobError as error:
            problems += error.problems
        except OSError as error:
            problems.append(f"{name}: cannot be read: {error.strerror or error}")
        except UnicodeDecodeError as error:
            problems.append(f"{name}: is not UTF-8 text (byte {error.start})")
        else:
            found[site.name] = site
    if problems:
        raise JobError(problems)
    return found


def user_folder(env: Mapping[str, str]) -> Path:
    """Returns the folder of the user's own sites, beside the measurements of the machine."""
    return default_path(env).parent / "sites"


def _files(env: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], str]]]:
    for file in sorted(resources.files("phalanx.launch.sites").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            yield file.name, lambda file=file: file.read_text(encoding="utf-8")
    for path in sorted(user_folder(env).glob("*.yaml")):
        yield str(path), lambda path=path: read_text(path, MOST_BYTES)


def chosen(wanted: str, env: Mapping[str, str], host: str) -> Site | None:
    """Returns the site that `wanted` names (a name, or a YAML file), or the one that this host belongs to, or None.

    Raises JobError for an unknown name, and with every problem of a file.
    """
    if wanted.endswith((".yaml", ".yml")):
        try:
            return parse(read_text(Path(wanted), MOST_BYTES), wanted)
        except OSError as error:
            raise JobError(f"--site {wanted}: cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise JobError(f"--site {wanted}: is not UTF-8 text (byte {error.start})") from None
    sites = known(env)
    if wanted:
        if wanted not in sites:
            hint = did_you_mean(wanted, sites) or f"; known: {', '.join(sites)}"
            raise JobError(f"--site {wanted}: no such site{hint} (or give a file: --site FILE.yaml)")
        return sites[wanted]
    return next((site for site in sites.values() if _belongs(site, env, host)), None)


def _belongs(site: Site, env: Mapping[str, str], host: str) -> bool:
    if any(re.fullmatch(pattern, host) for pattern in site.hosts):
        return True
    return bool(site.variables) and all(
        re.fullmatch(pattern, env.get(name, "")) for name, pattern in site.variables.items()
    )


def parse(text: str, name: str) -> Site:
    """Returns the site of YAML text; `name` stands for the file in messages. Raises JobError with every problem."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader):  # before it is composed: a bomb of aliases, or of nesting
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > 2 or isinstance(event, yaml.AliasEvent):
                raise JobError(f"{name}:{event.start_mark.line + 1}: a site has plain values and lists of them only")
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise JobError(f"{name}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise JobError(f"{name}: not valid YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise JobError(f"{name}: a site is a mapping of fields, such as `name: polaris`")
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, node in root.value:
        where = f"{name}:{key.start_mark.line + 1}"
        if key.value not in _FIELDS:
            problems.append(f"{where}: unknown field {key.value}{did_you_mean(str(key.value), _FIELDS)}")
        elif key.value in values:
            problems.append(f"{where}: {key.value} is set again")
        else:
            values[key.value] = None
            try:
                values[key.value] = _checked(key.value, _converted(node, _KINDS[key.value]))
            except ValueError as error:
                problems.append(f"{where}: {key.value}: {error}")
    problems += [f"{name}: {need} is missing" for need in ("name", "scheduler") if need not in values]
    if problems:
        raise JobError(problems)
    return Site(**values)


def _converted(node: yaml.Node, kind: Any) -> Any:
    """Returns a node's value as a field's type. Raises ValueError that says what was expected."""
    if node.tag not in PLAIN_TAGS:
        raise ValueError(f"the tag {node.tag} is not allowed; plain values only")
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = typing.get_args(kind)[0]
    origin = typing.get_origin(kind)
    if origin is list and isinstance(node, yaml.SequenceNode) and len(node.value) <= _MOST_ITEMS:
        return [_converted(item, str) for item in node.value]
    if origin is dict and isinstance(node, yaml.MappingNode) and len(node.value) <= _MOST_ITEMS:
        return {str(key.value): _converted(value, str) for key, value in node.value}
    expected = {list: "a list", dict: "a mapping"}.get(origin, "one value")
    if origin in (list, dict) or not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"expected {expected}")
    text = str(node.value)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, found {text!r}{did_you_mean(text, choices)}")
        return text
    if kind is int:
        if not re.fullmatch("[0-9]{1,5}", text):
            raise ValueError(f"expected a whole number, found {text[:80]!r}")
        return int(text)
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"expected true or false, found {text[:80]!r}")
        return text == "true"
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


def _checked(name: str, value: Any) -> Any:
    """Returns a value that has the form of its field. Raises ValueError."""
    if name in ("hosts", "variables"):
        for pattern in value if isinstance(value, list) else value.values():
            _check_pattern(pattern)
    if name in ("environment", "prepend", "variables"):
        for variable in value:
            if not re.fullmatch(_VARIABLE, variable) or is_secret(variable):
                raise ValueError(f"{variable[:80]!r} cannot be a variable here: a plain name, and no secret")
    if name in _FORMS and value:
        pattern, form = _FORMS[name]
        for item in value if isinstance(value, list) else [value]:
            if not re.fullmatch(pattern, item):
                raise ValueError(f"{item[:80]!r} is not {form}")
    return value


def _check_pattern(pattern: str) -> None:
    # A repeated group can take exponential time: hosts need none.
    if len(pattern) > 200 or re.search(r"\)[*+{]", pattern):
        raise ValueError(f"{pattern[:80]!r}: at most 200 characters, and no repeated group")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from None
