"""Checks of the scheduler's allocation and of the launcher's variables."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.doctor.findings import CheckResult, DoctorCheck, error, ok, warn
from phalanx.doctor.machine import CheckedMachine
from phalanx.errors import JobError
from phalanx.launch.environment import HEARTBEATS, LAUNCHER_PID, LOG_DIR, STORE
from phalanx.launch.grace import grace_left
from phalanx.launch.hosts import expand, names_of, read_hosts
from phalanx.launch.ranks import detect
from phalanx.units import counted, listed, seconds

_ENDS_SOON_S = 600.0
_SHOWN_HOSTS = 8
_SUBMITTERS = {"sbatch": "Slurm", "qsub": "PBS", "bsub": "LSF"}
_OWN = (LAUNCHER_PID, LOG_DIR, STORE, HEARTBEATS)


def checks(machine: CheckedMachine) -> list[DoctorCheck]:
    """Returns the checks of this group."""
    return [
        DoctorCheck("launch", "scheduler", lambda: scheduler(machine, time.time())),
        DoctorCheck("launch", "launcher", lambda: launcher(machine)),
    ]


def scheduler(machine: CheckedMachine, now: float) -> Iterator[CheckResult]:
    """Yields the allocation in which this process is; `now` in seconds since the epoch."""
    env = machine.env
    if "SLURM_JOB_ID" in env:
        yield from _slurm(machine, now)
    elif "PBS_JOBID" in env:
        yield from _pbs(env)
    elif "LSB_JOBID" in env:
        hosts = dict.fromkeys(env.get("LSB_HOSTS", "").split())
        yield ok(f"LSF job {env['LSB_JOBID']}" + (f" on {listed(list(hosts), _SHOWN_HOSTS)}" if hosts else ""))
    elif "FLUX_JOB_ID" in env:
        yield ok(f"Flux job {env['FLUX_JOB_ID']}")
    elif "KUBERNETES_SERVICE_HOST" in env:
        index = env.get("JOB_COMPLETION_INDEX")
        yield ok("a Kubernetes pod" + (f", index {index} of an Indexed Job" if index else ""))
    else:
        path = env.get("PATH", "")
        submits = next((name for name in _SUBMITTERS if shutil.which(name, path=path)), None)
        where = f"; {submits} is installed: a login node of {_SUBMITTERS[submits]}" if submits else ""
        yield ok(f"no allocation{where}")


def _slurm(machine: CheckedMachine, now: float) -> Iterator[CheckResult]:
    env = machine.env
    nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    text = f"Slurm job {env['SLURM_JOB_ID']}, {nodes} node{'s' if nodes != '1' else ''}"
    if names := env.get("SLURM_JOB_NODELIST"):
        text += f": {names[:200]}"
        try:
            expand(names)
        except ValueError as problem:
            yield error(
                f"Slurm job {env['SLURM_JOB_ID']}; SLURM_JOB_NODELIST is {problem}",
                "unset the variables of another job, or run this inside the allocation",
            )
            return
    left = _slurm_left(machine, now)
    if left is None:
        yield ok(f"{text}; time left not known")
        return
    text += f"; {seconds(max(0.0, left))} left"
    stated = machine.job.run.grace_s
    if left < stated:
        yield error(
            f"{text}, less than run.grace_s={stated:g} s, in which a stopped run saves its checkpoint",
            "ask for a new allocation",
        )
    elif left < _ENDS_SOON_S:
        grace = grace_left(stated, env, now)
        yield warn(
            f"{text}; a signal to stop now leaves {seconds(grace)}",
            "ask for more time, or submit with --signal=USR1@120 --requeue: the run saves, stops and resumes",
        )
    else:
        yield ok(text)


def _slurm_left(machine: CheckedMachine, now: float) -> float | None:
    """Returns the seconds until Slurm ends the allocation, or None. Slurm before 23.02 does not set the variable, but
    squeue tells: "4:59", "1-02:03:04", or a word for no limit."""
    end = machine.env.get("SLURM_JOB_END_TIME", "")
    if re.fullmatch(r"[0-9]{1,12}", end):
        return int(end) - now
    squeue = shutil.which("squeue", path=machine.env.get("PATH", ""))
    if squeue is None:
        return None
    with suppress(OSError):
        told = machine.call([squeue, "-h", "-j", machine.env["SLURM_JOB_ID"], "-o", "%L"], machine.seconds / 2).out
        if found := re.fullmatch(r"(?:([0-9]{1,4})-)?(?:([0-9]{1,2}):)?([0-9]{1,2}):([0-9]{1,2})", told.strip()):
            days, hours, minutes, rest = (int(number or 0) for number in found.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    return None


def _pbs(env: Mapping[str, str]) -> Iterator[CheckResult]:
    text, file = f"PBS job {env['PBS_JOBID']}", env.get("PBS_NODEFILE", "")
    try:
        nodes = names_of(read_hosts(Path(file))) if file else ()
    except JobError as problem:
        yield warn(
            f"{text}; its node file, PBS_NODEFILE, is of no use: {problem.problems[0]}",
            "run this on the first node of the allocation, or unset the variables of an old job",
        )
        return
    yield ok(
        f"{text}, {counted(len(nodes), 'node')}: {listed(nodes, _SHOWN_HOSTS)}" if nodes else f"{text}; no node file"
    )


def launcher(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields which launcher started this process, and what contradicts that."""
    if left := [name for name in _OWN if name in machine.env]:
        yield error(
            f"{', '.join(left)} set: `phalanx train` would take itself for a rank of a run that is not there",
            f"unset {' '.join(left)}",
        )
        return
    try:
        ranks = detect(machine.env)
    except JobError as problem:
        message, _, advice = str(problem).rpartition("\n")
        yield error(" ".join(message.split()), advice)
        return
    if ranks is None:
        yield ok("no launcher: `phalanx train` starts its own processes")
        return
    yield ok(
        f"{ranks.source}: {ranks.world} ranks, {ranks.local_world or '?'} on this node"
        + (f", node {ranks.node_rank}" if ranks.node_rank is not None else "")
    )
    if machine.has_job and ranks.world != machine.job.layout.processes:
        layout = machine.job.layout
        yield error(
            f"{ranks.source} started {ranks.world} ranks, but the layout {layout.line()} has {layout.processes}",
            f"start {layout.processes} processes, or change the layout",
        )
