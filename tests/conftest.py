"""Fixtures for all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

import warm

if TYPE_CHECKING:
    from phalanx.launch.pool import Pool

pytest_plugins = ["shared_run"]

# Tests start hundreds of processes; without this each would compile the modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The first example of a test may load a library; pytest-timeout watches over the whole. The same examples in every run,
# so that what failed fails again; PHALANX_RANDOM=1 tries others, and twice as many.
CHANCE = "PHALANX_RANDOM" in os.environ
settings.register_profile("phalanx", deadline=None, derandomize=not CHANCE, max_examples=100 if CHANCE else 50)
settings.load_profile("phalanx")

# A shell without job control starts background commands with Ctrl-C ignored, nohup with SIGHUP ignored, and programs
# inherit that: tests that interrupt one would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    warm.install()  # now that standard error is not captured, on which it tells of a crash
    config.addinivalue_line("markers", "cold: its processes are started afresh, not forked from one that is warm")


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cold"):
        monkeypatch.setattr(warm, "is_cold", True)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Gives the logger of Phalanx its level back, which a run in this process sets."""
    logger = logging.getLogger("phalanx")
    level = logger.level
    yield
    logger.setLevel(level)


def pytest_collection_finish() -> None:
    """Exempts what is loaded from garbage collection, which would walk through it again and again, and sets one thread
    per operation: models are tiny here, and threads that wait burn the cores of a busy machine."""
    gc.collect()
    gc.freeze()
    warm.use_one_thread()
    if "phalanx.train.device" in sys.modules:
        warm.measure_briefly()


def pytest_runtest_teardown() -> None:
    """Sets one thread per operation again: what trains in this process set as many as the machine has cores."""
    warm.use_one_thread()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight warm processes that `ranks` calls: see phalanx.launch.pool."""
    from phalanx.launch.pool import Pool

    preload = ["pytest", "hypothesis", *warm.PRELOAD, *warm.modules(), "warm:measure_briefly"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(warm.__file__).parent))
        patch.setenv("PHALANX_COLD", "1")  # what ranks start is theirs, and not a fork of a test's server
        made = Pool(8, preload)
    with made:
        try:
            made.wait(200)
        except RuntimeError as error:  # of which all tests hear that ask for ranks
            pytest.fail(str(error), pytrace=False)
        yield made


@pytest.fixture(scope="session")
def ranks(pool: Pool) -> Callable[..., list[Any]]:
    """`ranks(fn, world, *args, timeout=180)`: the results of `fn(ranks, *args)` on `world` gloo ranks, by rank.

    `fn` stands at the top of a test module. A call costs about 0.05 s for 2 ranks and 0.1 s for 8; the first imports
    test modules. What a rank raises is raised here, with its traceback.
    """
    return partial(pool.run, timeout=180)
