"""Reads the files of sites: those of the package, the user's own, and one named on the command line.

Nothing in a file is executed: modules, variables and folders become quoted words of a script.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from phalanx.bounded import read_text
from phalanx.config import yaml_file
from phalanx.config.clusters import default_path
from phalanx.config.constraints import Interval, Matches, Printable
from phalanx.config.values import LOADER, TypedError, convert, read_as
from phalanx.config.yaml_file import MOST_BYTES, PLAIN_TAGS
from phalanx.errors import JobError
from phalanx.launch.exported import is_secret
from phalanx.nearest import did_you_mean


class _HostPattern:
    """A regular expression for the name of a host. A repeated group can take exponential time: hosts need none."""

    def problem(self, value: str) -> str:
        if len(value) > 200 or re.search(r"\)[*+{]", value):
            return f"{value[:80]!r}: at most 200 characters, and no repeated group"
        try:
            re.compile(value)
        except re.error as error:
            return f"{value[:80]!r} is no regular expression: {error}"
        return ""


class _Variables:
    """A mapping whose keys are names of environment variables, none of them of a secret."""

    def problem(self, value: Mapping[str, str]) -> str:
        wrong = next(
            (name for name in value if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or is_secret(name)), None
        )
        return "" if wrong is None else f"{wrong[:80]!r} cannot be a variable here: a plain name, and no secret"


_Text = Annotated[str, Printable()]
_Count = Annotated[int, Interval(0, 99_999)]
_Patterned = Annotated[_Text, _HostPattern()]
_Environment = Annotated[dict[str, _Text], _Variables()]


@dataclass(frozen=True)
class Site:
    """The settings of one machine. A file has these fields; all but name and scheduler may be left out."""

    name: Annotated[str, Matches("[a-z0-9][a-z0-9._-]{0,62}", "small letters, digits, and . _ -")]
    scheduler: Literal["slurm", "pbs"]
    about: _Text = ""
    source: _Text = ""
    note: _Text = ""  # a note for users, printed with every launch
    hosts: list[_Patterned] = field(default_factory=list)
    """Regular expressions of which one matches the whole name of a host of this site."""
    variables: Annotated[dict[str, _Patterned], _Variables()] = field(default_factory=dict)
    """Variables by which the site is recognised, each with a regular expression for its whole value."""
    devices: _Count = 0  # accelerators of a node, one rank each
    launcher: Literal["srun", "pals", "openmpi", "mpich"] | None = None
    """What starts processes inside a job; by default srun on Slurm, and what mpiexec says on PBS."""
    cpu_bind: _Text = ""  # the launcher's --cpu-bind if it starts every rank of a full node
    cpus_per_rank: _Count = 0  # processors of each rank, if the launcher starts every rank of a full node
    exclusive: bool = True
    """Slurm: whether a job that uses every accelerator of its nodes asks for the nodes alone, with all their cores and
    memory."""
    host_suffix: Annotated[
        str, Matches(r"\.[A-Za-z0-9.-]{1,200}", "the end of a host's address, such as .hsn.example.org")
    ] = ""
    """What follows a node's name in its address on the fast network, such as .hsn.cm.polaris.alcf.anl.gov."""
    account_required: bool = False
    queue: _Text = ""  # the queue or partition unless the user names one
    queue_option: Literal["partition", "qos"] = "partition"  # slurm: the option that takes the queue
    time: Annotated[str, Matches("[0-9:-]{1,20}", "a time limit, such as 1:00:00")] = "1:00:00"
    """The time limit unless the user gives one."""
    filesystems: list[Annotated[str, Matches("[A-Za-z0-9_-]+", "the name of a file system")]] = field(
        default_factory=list
    )
    """PBS: file systems without which a job must not start."""
    directives: list[Annotated[_Text, Matches(r"-[^`$]*", "an option, such as --constraint=gpu")]] = field(
        default_factory=list
    )
    """Further options of sbatch or qsub, one line each; {nodes} stands for the number of nodes."""
    module_paths: list[Annotated[_Text, Matches("/.*", "an absolute path")]] = field(default_factory=list)
    modules: list[Annotated[str, Matches("[A-Za-z0-9][A-Za-z0-9._+/-]*", "the name of a module")]] = field(
        default_factory=list
    )
    """Environment modules to load, in this order."""
    environment: _Environment = field(default_factory=dict)  # variables to set; a user's own values win
    prepend: _Environment = field(default_factory=dict)
    """Folders to put first in variables such as LD_LIBRARY_PATH, in batch scripts."""


GENERIC: dict[str, Site] = {
    "slurm": Site("slurm", "slurm", "any cluster with Slurm"),
    "pbs": Site("pbs", "pbs", "any cluster with PBS"),
}


_KINDS = typing.get_type_hints(Site, include_extras=True)
_KINDS["launcher"] = typing.get_args(_KINDS["launcher"])[0]  # without None, which no file says


def known(env: Mapping[str, str]) -> dict[str, Site]:
    """Returns every site by name: those of the package, then those of the user's folder, which win. Raises JobError
    with every problem of the files."""
    found, problems = dict(GENERIC), []
    for folder in (Path(__file__).with_name("sites"), user_folder(env)):
        for path in sorted(folder.glob("*.yaml")):
            try:
                site = _read(path, str(path))
                found[site.name] = site
            except JobError as error:
                problems += error.problems
    if problems:
        raise JobError(problems)
    return found


def user_folder(env: Mapping[str, str]) -> Path:
    """Returns the folder of the user's own sites, beside the measurements of the machine."""
    return default_path(env).parent / "sites"


def _read(path: Path, where: str) -> Site:
    try:
        return parse(read_text(path, MOST_BYTES), str(path))
    except OSError as error:
        raise JobError(f"{where}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"{where}: is not UTF-8 text (byte {error.start})") from None


def chosen(wanted: str, env: Mapping[str, str], host: str) -> Site | None:
    """Returns the site that `wanted` names (a name, or a YAML file), or the one that this host belongs to, or None.
    Raises JobError for an unknown name, and with every problem of a file."""
    if wanted.endswith((".yaml", ".yml")):
        return _read(Path(wanted), f"--site {wanted}")
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
    try:
        depth = 0
        for event in yaml.parse(text, Loader=LOADER):  # before it is composed: a bomb of aliases, or of nesting
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > 2 or isinstance(event, yaml.AliasEvent):
                raise JobError(f"{name}:{event.start_mark.line + 1}: a site has plain values and lists of them only")
        root = yaml.compose(text, Loader=LOADER)
    except yaml.YAMLError as error:
        raise JobError(yaml_file.parse(text, name)[1] or f"{name}: not valid YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise JobError(f"{name}: a site is a mapping of fields, such as `name: polaris`")
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, node in root.value:
        where, field = f"{name}:{key.start_mark.line + 1}", str(key.value)
        if field not in _KINDS:
            problems.append(f"{where}: unknown field {field}{did_you_mean(field, _KINDS)}")
        elif field in values:
            problems.append(f"{where}: {field} is set again")
        else:
            values[field] = None
            try:
                values[field] = read_as(_KINDS[field], _plain(node, _KINDS[field]), field)
            except TypedError as error:
                problems += [f"{where}: {problem}" for problem in error.problems]
            except ValueError as error:
                problems.append(f"{where}: {field}: {error}")
    problems += [f"{name}: {need} is missing" for need in ("name", "scheduler") if need not in values]
    if problems:
        raise JobError(problems)
    return Site(**values)


def _plain(node: yaml.Node, kind: Any) -> Any:
    """Returns a node's value: text, but for numbers and yes or no. Raises ValueError for a tag."""
    if node.tag not in PLAIN_TAGS:
        raise ValueError(f"the tag {node.tag} is not allowed; plain values only")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, str) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value, str) for key, value in node.value}
    plain = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
    return convert(str(node.value), plain) if plain in (int, bool) else str(node.value)
