"""Files that a verb writes on request."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from phalanx.cli.png import write_png
from phalanx.errors import JobError, RunError

DARK = {"dark": "a picture in .png on a dark ground instead of a white one"}
"""The switch of every verb that draws pictures."""


PICTURES = (".svg", ".png")
"""Endings of the files that pictures are written to."""
_DRAWN = ("svg", "failures_svg")
"""Options that take a picture."""


def wants_dark(switches: Collection[str], options: Mapping[str, Any], *names: str) -> bool:
    """Returns whether `--dark` is given. Raises JobError if none of the options names a PNG: an SVG follows the
    reader's preference."""
    if "dark" in switches and not any(str(options.get(name, "")).endswith(".png") for name in names):
        flags = " or ".join(f"--{name.replace('_', '-')}" for name in names)
        raise JobError(f"--dark is for a PNG, an SVG follows the reader's preference: give {flags} a name in .png")
    return "dark" in switches


def check_folders(options: Mapping[str, Any], *names: str) -> None:
    """Raises JobError, before any computation, if an option names a file that cannot be written."""
    problems = [
        f"--{name} {options[name]}: a picture is written as {' or '.join(PICTURES)}; name a file that ends so"
        for name in names
        if name in _DRAWN and options[name] and Path(options[name]).suffix not in PICTURES
    ]
    for name in names:
        path = Path(options[name])
        if options[name] and not os.path.isdir(path.parent):
            problems.append(f"--{name} {path}: folder {path.parent} does not exist; create it, or name another")
        elif options[name] and os.path.isdir(path):
            problems.append(f"--{name} {path} is a folder; name a file in it")
    if problems:
        raise JobError(problems)


def write(path: str, text: str, dark: bool = False) -> None:
    """Writes the file: text as it is, and an SVG document as PNG if the file's name ends so, on a white or a dark
    ground. Raises RunError if that fails."""
    if path.endswith(".png") and text.startswith("<svg"):
        write_png(path, text, dark)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from None
