"""`phalanx doctor [JOB]`: what would keep a run from starting or finishing on this machine, or on all nodes."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence

from phalanx.cli.verb import Option, job_verb
from phalanx.config.job import Job
from phalanx.echo import echo
from phalanx.errors import JobError, PhalanxError
from phalanx.launch.lifeline import die_with_launcher
from phalanx.launch.ranks import Ranks, ToldError
from phalanx.launch.start import SSH
from phalanx.machine.checks import SECONDS, CheckedMachine, CheckResult
from phalanx.machine.doctor import (
    DoctorReport,
    apart,
    compare,
    facts_of,
    launcher_findings,
    local_findings,
    merged,
    show,
)

VERB = job_verb(
    "doctor",
    "Checks this machine, and with a job whether it can run here: scheduler and launcher, versions, GPUs, limits, the "
    "file system of the run directory, network, environment. Every line is OK, WARN or ERROR with a remedy. "
    "Under torchrun, srun or mpiexec, with run.nnodes, or with --hosts, all nodes are "
    "compared.",
    (
        ("doctor examples/main.yaml", "this machine, for this job"),
        ("doctor --hosts node-a node-b", "compare two hosts through ssh"),
    ),
    options={
        "hosts": Option(
            "Run the checks on these hosts through ssh and compare them: --hosts node-a node-b, or node-a,node-b.",
            (),
            str,
            many=True,
            like=r"[^=]*$",
            value="HOST",
        ),
        "remote_shell": Option(
            "with --hosts: program that takes HOST and a command for its shell.", SSH, str, beside=("hosts",)
        ),
        "timeout": Option("Seconds that a check may take; slow ones may take a few times as long.", SECONDS, float),
    },
    exits={1: "there is an ERROR"},
    auto="open",
)


@VERB.starts
def doctor(argv: Sequence[str]) -> int:
    began = time.monotonic()
    die_with_launcher()
    problems: list[str] = []
    try:
        parsed = VERB.parse(argv)
        if parsed is None:
            return 0
        job = parsed.job
    except JobError as error:
        problems, job = error.problems, Job()
    words, line = VERB.command_line(argv)
    if (
        line.problems
    ):  # words that mean nothing; of several ranks the first says so, and a wrong job is a line of the report
        error, ranks = JobError(line.problems), CheckedMachine().ranks
        raise ToldError(str(error), error.exit_code) if ranks is not None and ranks.rank else error
    options = words.options
    machine = CheckedMachine(
        job=job, has_job=not problems and bool(line.files or line.settings), seconds=options["timeout"]
    )
    if options["hosts"]:
        hosts = tuple(dict.fromkeys(host for word in options["hosts"] for host in word.split(",") if host))
        asked = [word for word in words.subjects if word != "--json"]
        asked += [f"--timeout={options['timeout']:g}"] if "timeout" in words.stated else []
        findings = merged(compare(hosts, options["remote_shell"], asked, options["timeout"]))
        report = DoctorReport(findings, hosts, "remote shell", len(hosts), time.monotonic() - began)
    else:
        report = _here(machine, problems, began)
    if report is None:
        return 0  # another rank prints, and its exit code is the launcher's
    if machine.ranks is not None and machine.ranks.rank:
        # The nodes could not meet: rank 0 prints its own report on standard output, the others explain themselves.
        show(report, sys.stderr)
    elif "json" in line.switches:
        echo(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, sys.stdout)
    return report.exit_code


def _here(machine: CheckedMachine, problems: Sequence[str], began: float) -> DoctorReport | None:
    """Returns the report of this machine, or, on the first of several processes, of all nodes; None on the others."""
    ranks, host = machine.ranks, (platform.node(),)
    if ranks is not None and ranks.local_rank:
        findings = launcher_findings(machine)
    else:
        findings = local_findings(machine, problems)
    launcher, facts = "none", {}
    if ranks is not None and ranks.world > 1:
        compared, launcher = _compared(machine, ranks, findings), ranks.source
    elif machine.has_job and machine.job.run.nnodes:
        compared, launcher = _compared(machine, None, findings), "phalanx"
    else:
        compared, facts = (findings, 1), facts_of(machine)
    if compared is None:
        return None
    findings, world = compared
    hosts = tuple(dict.fromkeys(name for finding in findings for name in finding.hosts)) or host
    return DoctorReport(merged(findings), hosts, launcher, world, time.monotonic() - began, facts)


def _compared(
    machine: CheckedMachine, ranks: Ranks | None, findings: Sequence[CheckResult]
) -> tuple[list[CheckResult], int] | None:
    """Returns the lines of all nodes and the number of processes on the first of them. If they cannot meet, the first
    process of each node returns its own lines, with the reason. None on the others."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or every lost peer prints the stack of torch's C++
    try:
        from phalanx.machine import nodes

        return nodes.by_launcher(machine, ranks, findings) if ranks else nodes.by_endpoint(machine, findings)
    except ImportError:
        reason = "torch is not installed here, so nodes cannot be compared\ninstall it, or use --hosts"
    except (PhalanxError, RuntimeError) as problem:
        reason = str(problem)
    return None if ranks and ranks.local_rank else (apart(findings, reason), 1)
