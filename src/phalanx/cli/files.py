"""Files that a verb writes on request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.cli.png import write_png
from phalanx.errors import JobError, RunError


def check_folders(options: Mapping[str, Any], *names: str) -> None:
    """Raises JobError, before any computation, if an option names a file that cannot be written."""
    problems = []
    for name in names:
        path = Path(options[name])
        if options[name] and not os.path.isdir(path.parent):
            problems.append(f"--{name} {path}: folder {path.parent} does not exist; create it, or name another")
        elif options[name] and os.path.isdir(path):
            problems.append(f"--{name} {path} is a folder; name a file in it")
    if problems:
        raise JobError(problems)


def write(path: str, text: str) -> None:
    """Writes the file: text as it is, and an SVG document as PNG if the file's name ends so. Raises RunError if that
    fails."""
    if path.endswith(".png") and text.startswith("<svg"):
        write_png(path, text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from None
