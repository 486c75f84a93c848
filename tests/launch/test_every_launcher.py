"""Every launcher that is installed, as `make launchers` tries it, and interrupted jobs of Slurm: `make faults`.

Two nodes are network namespaces; Slurm is what sinfo shows, or a cluster of the two."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.launchers.interrupted import INTERRUPTIONS, LongJob
from benchmarks.launchers.job import STEPS, Run, long_steps
from benchmarks.launchers.launchers import LAUNCHERS
from benchmarks.launchers.results import problems
from benchmarks.launchers.rig import MissingError, Rig
from benchmarks.launchers.trials import Trials

pytestmark = [
    pytest.mark.skipif("PHALANX_FAULTS" not in os.environ, reason="minutes; set PHALANX_FAULTS=1 to run it"),
    pytest.mark.timeout(3600),
]
PER_NODE = 1


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig"), PER_NODE) as rig:
        yield rig


@pytest.fixture(scope="module")
def alone(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, float]:
    """The run of `phalanx train` by itself, and the seconds to its first step."""
    trials = Trials(LAUNCHERS[0], LAUNCHERS[0].command(rig), tmp_path_factory.mktemp("control"), PER_NODE, None)
    ended = trials.good()
    assert (ended["exit"], ended["steps"]) == (0, STEPS), ended
    return trials.control, ended["first_step_s"]


@pytest.fixture(scope="module")
def long_job(rig: Rig, alone: tuple[Run, float], tmp_path_factory: pytest.TempPathFactory) -> LongJob:
    control, start_s = alone
    return LongJob(rig, tmp_path_factory.mktemp("long"), long_steps(control), start_s)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.key)
def test_it_trains_the_same_and_says_a_mistake_once(rig: Rig, alone, tmp_path: Path, launcher) -> None:
    try:
        command = launcher.command(rig)
    except MissingError as error:
        pytest.skip(str(error))
    trials = Trials(launcher, command, tmp_path, PER_NODE, alone[0])
    row = {"good": trials.good(), "mistake": trials.mistake(), "killed": trials.killed()}
    assert problems(launcher.key, {"starts": launcher.starts, **row}) == [], row
    assert row["killed"]["message"], "somebody says that a rank was killed"
    others = re.findall(r"Rank 0 \S+ is gone", row["killed"].get("output", ""))
    assert not others, "rank 0 has said why it ends; its node's watchdog is silent"


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_an_interrupted_job_of_slurm_resumes_with_the_same_bits(long_job: LongJob, interruption: str) -> None:
    try:
        found = INTERRUPTIONS[interruption](long_job)
    except MissingError as error:
        pytest.skip(str(error))
    assert problems(interruption, found) == [], found
    if interruption != "shrinks":
        assert found["loss_max_rel"] == found["weights_max_rel"] == 0.0
