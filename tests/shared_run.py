"""One run of all tests by several processes: `pytest --beside 3` has three more, forks of the one that has collected
all tests, which take the files from the back, until they meet.

A file belongs to the process that makes its mark in a folder. Tests that measure time or send signals come first: the
processes that come from the back, at a low priority, disturb them least and reach them last. Tests wait for processes,
stores and pipes a third of their time: two cores are busy with four of these.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest

import warm
from phalanx.launch.lifeline import die_with_parent

UNDISTURBED = ("cli", "launch", "machine", "trackers", "serve", "benchmarks", "train", "data")
"""Folders of tests that measure time or send signals."""
LONG = (
    "families/test_exported_fields.py",
    "dryrun/test_sums.py",
    "families/test_layouts.py",
    "train/test_predicted_memory.py",
    "parallel/test_context.py",
    "parallel/test_pipeline.py",
    "train/test_memory.py",
    "train/test_offload.py",
    "parallel/test_composition.py",
    "parallel/test_context_and_experts.py",
    "train/optimizers/test_optimizer_layouts.py",
    "parallel/test_structure.py",
    "verify/test_measure.py",
    "dryrun/test_rehearse.py",
    "dryrun/test_chain.py",
)
"""Files of half a minute and more, the longest first: with these the processes that come from the back begin, so that
none of them is begun last, while a core is idle."""
SESSION = pytest.StashKey[pytest.Session]()
BESIDE = pytest.StashKey[dict[int, Path]]()
"""The processes beside this one, with the files that they write their reports to."""
NICENESS = 10
LOST = pytest.StashKey[int]()
"""How many tests in a row failed after LOST_S."""
LOST_S, MOST_LOST = 150, 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--beside", type=int, default=0, metavar="N", help="run the tests in so many processes more")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Imports what takes three seconds and each of the processes would, before conftest.py freezes what is loaded."""
    if session.config.option.beside:
        with suppress(ImportError):
            import_module("transformers.modeling_utils")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the files that this process, or one beside it, gets hold of."""
    config = session.config
    if not config.option.beside or session.testsfailed or config.option.collectonly:
        return None
    files = [[*items] for _, items in groupby(session.items, lambda item: item.path)]
    files.sort(key=lambda items: _place(items[0]))
    folder = Path(tempfile.mkdtemp())
    beside, parent = config.stash.setdefault(BESIDE, {}), os.getpid()
    for number in range(config.option.beside):
        report = folder / f"{number}.log"
        if not (pid := os.fork()):
            beside.clear()
            die_with_parent(parent)
            os.nice(NICENESS)
            warm.install_in_fork()
            warm.use_one_thread()  # before threads do: what each sees of torch's pool, lost in the fork, is made anew
            _write_to(report, config)
            files.reverse()
            break
        beside[pid] = report
    claimed = _claimed(files, folder)
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Stops where one test after the other took all its time: what all of them need is broken."""
    report = yield
    if report.failed and report.duration > LOST_S:
        lost = item.session.stash[LOST] = item.session.stash.get(LOST, 0) + 1
        if lost == MOST_LOST:
            item.session.shouldfail = f"{lost} tests in a row failed after {LOST_S} s and more"
    elif report.passed and report.when == "call":
        item.session.stash[LOST] = 0
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Waits for the processes beside this one, which fails if one of them did."""
    session.config.stash[SESSION] = session
    for pid in session.config.stash.get(BESIDE, {}):
        if os.waitpid(pid, 0)[1] and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints what the processes beside this one wrote, and ends: threads that a test left, for which the interpreter
    would wait, hold up nobody."""
    if BESIDE not in config.stash:
        return
    for report in (reports := config.stash[BESIDE]).values():
        print("Beside it:", report.read_text(encoding="utf-8", errors="replace"), sep="\n", flush=True)
    for folder in {report.parent for report in reports.values()}:
        shutil.rmtree(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash[SESSION].exitstatus)


def _write_to(report: Path, config: pytest.Config) -> None:
    """Directs the output of this process, also that which pytest will have captured, to a file."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    with report.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def _place(item: pytest.Item) -> tuple[int, bool]:
    path = item.path.relative_to(Path(__file__).parent)
    name = path.as_posix()
    return LONG[::-1].index(name) + 1 if name in LONG else 0, path.parts[0] not in UNDISTURBED


def _claimed(files: list[list[pytest.Item]], folder: Path) -> Iterator[pytest.Item]:
    for items in files:
        mark = folder / items[0].nodeid.partition("::")[0].replace("/", ".")
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from items
