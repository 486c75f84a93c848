"""Mutations of the file of every loader: whatever the file holds, it is read, or it is refused with a message and an
exit code. `make fuzz COUNT=100000` goes on where the test ends."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.loaders import MAKERS
from fuzz.mutations import mutated
from phalanx.cli.main import message_of
from phalanx.errors import PhalanxError

COUNT = int(os.environ.get("PHALANX_FUZZ", "100"))
"""Mutations of each loader."""
LONGEST_MESSAGE = 100_000
SECONDS = 60 * max(1, COUNT / 2000)
"""Most seconds of CPU time for the mutations of a loader, which take one to four."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory if the machine has one: the file of a loader is written thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.mark.parametrize("name", MAKERS)
def test_mutations_are_read_or_refused(name, folder):
    loader = MAKERS[name](folder)
    loader.file.write_bytes(loader.seal(loader.sample))
    loader.load()  # the sample is valid
    began = time.process_time()
    refused = 0
    for number in range(COUNT):
        content = loader.seal(mutated(loader.sample, name, number))
        loader.file.write_bytes(content)
        try:
            loader.load()
        except PhalanxError as error:
            refused += 1
            assert 0 < len(message_of(error)) < LONGEST_MESSAGE
        except BaseException as error:
            error.add_note(f"mutation {number} of {name}: {content[:2000]!r}")
            raise
    assert refused or name in ("outcome", "progress")  # whatever is none is as if there was none
    assert time.process_time() - began < SECONDS
