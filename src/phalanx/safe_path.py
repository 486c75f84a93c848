"""Keeps Python from importing modules of the current directory, which may belong to somebody else: a yaml.py or
numpy.py there would run in place of the library.

The command `phalanx` never imports from there. `python -m` and `python -c` put the current directory first on the path,
unless they are started with -P.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def drop_current_directory() -> None:
    """Removes the current directory from the front of `sys.path`, where `python -m` has put it. Entries of PYTHONPATH
    stay. Must run before any library is imported."""
    if sys.flags.safe_path or not sys.path:
        return
    with suppress(FileNotFoundError):  # a deleted directory holds no modules
        if sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
