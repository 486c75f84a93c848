"""Sources of the checks (files under /proc, /sys and /dev, the environment, programs with deadlines), and findings.

Each check runs in a thread of its own, up to a deadline, so that none can hang the report.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import IO, Any, Concatenate, Literal, ParamSpec, TypeVar

from phalanx.config.job import Job
from phalanx.config.values import read_as
from phalanx.errors import JobError
from phalanx.launch.ranks import Ranks, detect
from phalanx.train.run_directory import RunDirectory

Status = Literal["OK", "WARN", "ERROR"]
"""OK; WARN: a run may be slow, or fail later; ERROR: a run fails."""
STATUSES: tuple[Status, ...] = ("OK", "WARN", "ERROR")
"""From the best to the worst."""
GROUPS = ("launch", "software", "accelerator", "limits", "storage", "network", "environment", "job", "nodes")
"""The groups of checks, in the order of the report."""
SECONDS = 10.0
"""Seconds that a check may take by default."""
T = TypeVar("T")


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    group: str
    check: str
    status: Status
    text: str
    """What was found, with its figures."""
    remedy: str = ""
    """What to do about it; empty if the status is OK."""
    hosts: tuple[str, ...] = ()
    """The hosts on which it was found."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the finding for `--json`."""
        return {**asdict(self), "hosts": list(self.hosts)}

    @classmethod
    def from_dict(cls, found: Any) -> CheckResult:
        """Returns the finding of another host's report. Raises ValueError if it is none."""
        line = read_as(cls, found)
        if line.group not in GROUPS:
            raise ValueError(f"group {line.group!r}")
        return replace(line, check=line.check[:4000], text=line.text[:4000], remedy=line.remedy[:4000])


def ok(text: str) -> CheckResult:
    """Returns a line of a check that found nothing wrong; `run` adds the names of its group and check."""
    return CheckResult("", "", "OK", text)


def warn(text: str, remedy: str) -> CheckResult:
    """Returns a line about something that may slow a run down, or end it later."""
    return CheckResult("", "", "WARN", text, remedy)


def error(text: str, remedy: str) -> CheckResult:
    """Returns a line about something that makes a run fail."""
    return CheckResult("", "", "ERROR", text, remedy)


HANGS = "look for a file system or a name server that does not answer"


@dataclass(frozen=True)
class DoctorCheck:
    """One check: a function that yields lines, made by `ok`, `warn` and `error`."""

    group: str
    name: str
    find: Callable[[CheckedMachine], Iterable[CheckResult]]
    if_it_hangs: str = HANGS
    """The remedy if it does not return in time."""
    patience: float = 1.0
    """Factor on the seconds that a check may take."""
    subject: Callable[[CheckedMachine], str] = lambda machine: ""
    """What hangs if the check does, found out without touching it."""


CHECKS: list[DoctorCheck] = []
"""Every check, in the order of the report within its group."""
Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")
Find = Callable[Concatenate["CheckedMachine", Arguments], Found]
Problems = Generator[CheckResult, None, str | None]
"""Lines about problems, and what is said if there are none."""


def check(
    group: str, name: str, if_it_hangs: str = HANGS, patience: float = 1.0, subject: Callable[..., str] | None = None
) -> Callable[[Find[Arguments, Problems]], Find[Arguments, Iterator[CheckResult]]]:
    """Enters a function, whose first argument is the machine and whose others have defaults, into CHECKS. If it yields
    nothing and returns a text, that is the text of its line."""

    def enter(find: Find[Arguments, Problems]) -> Find[Arguments, Iterator[CheckResult]]:
        @wraps(find)
        def lines(machine: CheckedMachine, *args: Arguments.args, **more: Arguments.kwargs) -> Iterator[CheckResult]:
            found, is_fine = find(machine, *args, **more), True
            while True:
                try:
                    line = next(found)
                except StopIteration as end:
                    if is_fine and end.value is not None:
                        yield ok(end.value)
                    return
                is_fine = False
                yield line

        CHECKS.append(DoctorCheck(group, name, lines, if_it_hangs, patience, subject or DoctorCheck.subject))  # pyrefly: ignore[bad-argument-type]
        return lines

    return enter


def run(checks: Sequence[DoctorCheck], machine: CheckedMachine) -> list[CheckResult]:
    """Runs all checks at the same time, and returns their lines in the order of the checks.

    A check that has not returned after the machine's seconds, times its patience, is an ERROR and is left behind; one
    that raises is an ERROR, too."""
    found: list[list[CheckResult]] = [[] for _ in checks]
    began = time.monotonic()

    def work(number: int, check: DoctorCheck) -> None:
        try:
            lines = list(check.find(machine))
        except Exception as problem:  # one broken check must not hide the findings of the others
            lines = [error(f"the check failed: {type(problem).__name__}: {problem}", "report this as a bug")]
        found[number] = lines

    threads = [
        threading.Thread(target=work, args=pair, name=f"phalanx-doctor-{pair[1].name}", daemon=True)
        for pair in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    report: list[CheckResult] = []
    for check, thread, lines in zip(checks, threads, range(len(checks)), strict=True):
        limit = machine.seconds * check.patience
        thread.join(max(0.0, began + limit - time.monotonic()))
        what = check.subject(machine)
        hangs = error(f"no answer after {limit:g} s{f': {what}' if what else ''}", check.if_it_hangs)
        named = [hangs] if thread.is_alive() else found[lines]
        report += [replace(line, group=check.group, check=check.name) for line in named]
    return report


def within(seconds: float, work: Callable[[], T], otherwise: T) -> T:
    """Returns the result of `work`, or `otherwise` if it takes longer: it is then left behind. An exception counts
    as taking longer."""
    found = [otherwise]

    def call() -> None:
        with suppress(Exception):
            found[0] = work()

    thread = threading.Thread(target=call, name="phalanx-doctor-within", daemon=True)
    thread.start()
    thread.join(seconds)
    return otherwise if thread.is_alive() else found[0]


def worst(findings: Iterable[CheckResult]) -> Status:
    """Returns the worst status, OK for no findings."""
    return STATUSES[max((STATUSES.index(finding.status) for finding in findings), default=0)]


_MOST_BYTES = 2**20


@dataclass(frozen=True)
class EndedProgram:
    """The end of a program."""

    code: int | None
    """Its exit code; None if it was killed because it took too long."""
    out: str
    err: str


@dataclass(frozen=True)
class CheckedMachine:
    """This machine as the checks see it."""

    job: Job = field(default_factory=Job)
    """The job that is to run here, or the defaults of one."""
    has_job: bool = False
    """Whether the user named a job."""
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    """Where /proc, /sys and /dev are; another folder in tests."""
    seconds: float = SECONDS
    """Seconds that a program started by a check may take."""
    resolve: Callable[..., list[Any]] = socket.getaddrinfo
    """Looks up a host name, as socket.getaddrinfo."""
    python: str = sys.executable

    @property
    def run_directory(self) -> RunDirectory:
        return RunDirectory.of(self.job)

    @property
    def folder(self) -> Path:
        """The job's run directory, or without a job the folder of all run directories."""
        return self.run_directory.path if self.has_job else Path(self.job.run.dir)

    @cached_property
    def ranks(self) -> Ranks | None:
        """This process among others; None without a launcher, or if its variables contradict each other."""
        try:
            return detect(self.env)
        except JobError:
            return None

    @property
    def local_ranks(self) -> int:
        """Ranks of the run on this node, as far as launcher and job tell; at least 1."""
        if self.ranks is not None:
            return self.ranks.local_world or 1
        if not self.has_job:
            return 1
        nodes = self.job.run.most_nodes if self.job.run.nnodes else self.job.cluster.nodes
        return max(1, self.job.layout.processes // nodes)

    @property
    def several_nodes(self) -> bool:
        """Whether the run uses, or may use, more than this machine."""
        if self.ranks is not None and not self.ranks.one_node:
            return self.ranks.world > 1
        return self.has_job and (self.job.run.most_nodes > 1 or self.job.cluster.nodes > 1)

    @property
    def is_compared(self) -> bool:
        """Whether this process is compared with others, which then see for themselves what the nodes share."""
        return bool(self.has_job and self.job.run.nnodes) or (self.ranks is not None and self.ranks.world > 1)

    @property
    def may_use_gpus(self) -> bool:
        return self.job.cluster.device != "cpu"

    def read(self, path: str, otherwise: str = "") -> str:
        """Returns the text of a file of the kernel, such as "/proc/meminfo"; `otherwise` if it cannot be read."""
        try:
            with (self.root / path.lstrip("/")).open(encoding="utf-8", errors="replace") as file:
                return file.read(_MOST_BYTES)
        except OSError:
            return otherwise

    def names_in(self, path: str) -> list[str]:
        """Returns the names in a folder of the kernel; none if it cannot be read."""
        try:
            return sorted(os.listdir(self.root / path.lstrip("/")))
        except OSError:
            return []

    def call(self, command: Sequence[str], seconds: float | None = None) -> EndedProgram:
        """Runs a program without input, in this machine's environment, and kills it and its children after `seconds`.
        Raises OSError if it cannot be started."""
        # Files, not pipes: a grandchild that survives would keep a pipe open, and reading it would wait for it.
        with _file_in_memory() as out, _file_in_memory() as err:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(self.env), start_new_session=True
            )
            try:
                code: int | None = child.wait(self.seconds if seconds is None else seconds)
            except subprocess.TimeoutExpired:
                code = None
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # not waited for: a driver that hangs keeps its process
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read(_MOST_BYTES).decode(errors="replace"))
        return EndedProgram(code, *texts)

    @cached_property
    def torch(self) -> TorchProbe:
        """What torch says about itself and the GPUs, from a process of its own; it is started at the first use."""
        return TorchProbe(self)


class TorchProbe:
    """Asks torch in a child process: an import may take long, hang in a driver, or crash."""

    def __init__(self, machine: CheckedMachine):
        self._machine, self._lock = machine, threading.Lock()
        self._facts: dict[str, Any] | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the facts of `torch_probe.main`, or {"problem": text}. Waits for the child; thread-safe."""
        with self._lock:
            if self._facts is None:
                self._facts = self._ask()
        return self._facts

    def _ask(self) -> dict[str, Any]:
        seconds = 4 * self._machine.seconds
        command = [self._machine.python, "-P", "-m", "phalanx.machine.torch_probe"]
        numbers = (self._machine.job.run.threads, self._machine.local_ranks)
        try:
            ran = self._machine.call([*command, *map(str, numbers)], seconds)
        except OSError as problem:
            return {"problem": f"Python could not be started: {problem}"}
        if ran.code is None:
            return {"problem": f"importing torch takes more than {seconds:g} s"}
        try:
            found = json.loads(ran.out.splitlines()[-1])
        except (ValueError, IndexError):
            last = (ran.err.strip().splitlines() or ["no message"])[-1]
            ended = f"signal {-ran.code}" if ran.code < 0 else f"exit code {ran.code}"
            return {"problem": f"importing torch ended with {ended}: {last[:300]}"}
        return found if isinstance(found, dict) else {"problem": "torch answered with something else"}


def _file_in_memory() -> IO[bytes]:
    return os.fdopen(os.memfd_create("phalanx-doctor"), "w+b")
