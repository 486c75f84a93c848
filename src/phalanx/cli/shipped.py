"""The example jobs and the pages of documentation: in the wheel within the package, in a clone beside it."""

from __future__ import annotations

import json
from pathlib import Path

import phalanx
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

_PACKAGE = Path(phalanx.__file__).parent


def folder(name: str) -> Path:
    """Returns the folder `examples` or `docs`. Raises JobError if this installation has none."""
    for place in (_PACKAGE / "shipped" / name, _PACKAGE.parents[1] / name):
        if place.is_dir():
            return place
    raise JobError(f"this installation has no {name}: install the wheel again, or see the clone's folder {name}/")


def files(name: str, ending: str) -> dict[str, Path]:
    """Returns the files of a shipped folder and its folders with this ending, by path without it."""
    top = folder(name)
    found = sorted(path for path in top.rglob(f"*{ending}") if not path.is_dir())
    return {str(path.relative_to(top).with_suffix("")): path for path in found}


def listed(entries: dict[str, str], as_json: bool, end: str = "") -> None:
    """Prints names with their descriptions, then a line `end`; or the names and descriptions as JSON."""
    width = max(map(len, entries))
    lines = [f"{name:{width}}  {about}".rstrip() for name, about in entries.items()]
    echo(json.dumps(entries, indent=1) if as_json else "\n".join([*lines, *filter(None, [end])]), wrap=not as_json)


def pick(word: str, known: dict[str, Path], what: str) -> Path:
    """Returns the file that a word names, with or without folder and ending. Raises JobError with near names."""
    plain = word.removeprefix(f"{what}/")
    plain = plain.removesuffix(Path(plain).suffix) if Path(plain).suffix else plain
    named = [path for name, path in known.items() if plain in (name, name.rpartition("/")[2])]
    if len(named) == 1:
        return named[0]
    raise JobError(f"no page or file {word!r}{did_you_mean(plain, known)} (known: {', '.join(known)})")
