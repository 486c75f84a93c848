"""`phalanx extensions`: what installed packages add to the tables of schedules, machines, corpora and so on."""

from __future__ import annotations

import json
from collections.abc import Sequence

from phalanx.cli.commands import Command, CommandVerb
from phalanx.echo import echo
from phalanx.extend import TABLES
from phalanx.registry import GROUP, OWN, installed

VERB = CommandVerb(
    "extensions",
    "Lists what installed packages add. A package adds entries through an entry point of the group "
    f"{GROUP} (`phalanx docs extending`).",
    {
        "list": Command(about="list every package and its entries; this is done without a command, too"),
        "names": Command(about="list all names of every table, the project's own too"),
    },
    (
        ("extensions list", "by package"),
        ("extensions names --json", "by table, for programs"),
    ),
    default="list",
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    (_list if words.command == "list" else _names)(words.as_json)
    return 0


def _list(as_json: bool) -> None:
    added = {str(package): _added_by(str(package)) for package in installed()}
    if as_json:
        echo(json.dumps(added, indent=1))
        return
    for package, entries in added.items():
        echo(package)
        for kind, names in entries.items():
            echo(f"  {kind}: {', '.join(names)}")
    if not added:
        echo(f"no installed package has an entry point of the group {GROUP}")


def _added_by(package: str) -> dict[str, list[str]]:
    """Returns what a package has added, by kind."""
    by_kind = {kind: [name for name in table if table.package(name) == package] for kind, table in TABLES.items()}
    return {kind: names for kind, names in by_kind.items() if names}


def _names(as_json: bool) -> None:
    if as_json:
        names = {kind: {name: table.package(name) for name in table} for kind, table in TABLES.items()}
        echo(json.dumps(names, indent=1))
        return
    for kind, table in TABLES.items():
        shown = [name if table.package(name) == OWN else f"{name} ({table.package(name)})" for name in table]
        echo(f"{kind}: {', '.join(shown)}")
