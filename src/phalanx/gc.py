"""A pause of Python's garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
"""Whether objects were found frozen once: to count a million of them takes a tenth of a second."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the search for reference cycles: the objects of a layout search, a simulation or an imported library have
    none, and the search takes a tenth (of importing torch) to a third of the time. What is left of them counts as old
    at once, so that no search follows the pause."""
    global _frozen  # noqa: PLW0603
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _frozen = _frozen or gc.get_freeze_count() > 0
            if not _frozen:  # what is frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
