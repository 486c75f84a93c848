"""One run of all tests by several processes: one takes the files from the front, others from the back, until they meet.

    pytest --share FOLDER & pytest --share FOLDER --backwards & pytest --share FOLDER --backwards

A file belongs to the process that makes its mark in FOLDER. Tests that measure time or send signals come first: the
processes that come from the back, at a low priority, disturb them least and reach them last. Tests wait for processes,
stores and pipes a third of their time: two cores are busy with three of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

UNDISTURBED = ("cli", "launch", "machine", "trackers", "serve", "benchmarks", "train", "data")
"""Folders of tests that measure time or send signals."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=Path, metavar="FOLDER", help="run no file that has a mark in this folder")
    parser.addoption("--backwards", action="store_true", help="take the files from the back")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the files that this process gets hold of."""
    folder = session.config.getoption("--share")
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None
    files = [[*items] for _, items in groupby(session.items, lambda item: item.path)]
    files.sort(key=lambda items: _room(items[0]) not in UNDISTURBED)
    claimed = _claimed(files[::-1] if session.config.getoption("--backwards") else files, folder)
    item = next(claimed, None)
    while item is not None:
        following = next(claimed, None)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


def _room(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def _claimed(files: list[list[pytest.Item]], folder: Path) -> Iterator[pytest.Item]:
    for items in files:
        mark = folder / items[0].nodeid.partition("::")[0].replace("/", ".")
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from items
