"""One node of a job that `phalanx launch` started: `python -m phalanx.cli.node [--flag=…] WORDS…` runs `phalanx train
WORDS…`, which starts the ranks of this node.

srun, mpiexec and Kubernetes give each process that they start the variables of a rank. This one is none: its own ranks
must not inherit them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper

from phalanx.bounded import parse_json
from phalanx.cli.main import main as phalanx_main
from phalanx.cli.main import told

PARENT_POLL_S = 0.5
_NAME_POLL_S = 2.0
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS"),
    *("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"),
)
_RANK_PREFIXES = ("PALS_", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "MV2_COMM_", "JSM_NAMESPACE_", "SLURM_STEP_", "PET_")
_SIGNALS = {number.name: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}


def main(argv: Sequence[str]) -> int:
    """Runs this node's part of the job, and returns the exit code of `phalanx train`."""
    words = list(argv)
    flags = dict(_flags(words))
    for name in rank_variables(os.environ):
        del os.environ[name]
    if "controlled" in flags:
        _be_controlled(with_variables=flags["controlled"] == "variables")
    _watch_parent()
    if stop_after_s := int(flags.get("stop-after", 0)):
        _start(_stop_after, stop_after_s)
    if await_s := int(flags.get("await-host", 0)):
        _await_host(words, await_s)
    if "program" in flags:
        from phalanx.cli.program import run_node

        return told(lambda: run_node(parse_json(flags["program"]), words))
    sys.argv = ["phalanx", "train", *words]  # command.txt records it
    code = phalanx_main(sys.argv[1:])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # also while Python ends: Slurm may send it to a run that is done
    return code


def rank_variables(env: Mapping[str, str]) -> list[str]:
    """Returns the names in `env` by which a launcher tells a process its rank."""
    return [name for name in env if name in _RANK_VARIABLES or name.startswith(_RANK_PREFIXES)]


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    while words and words[0].partition("=")[0] in ("--stop-after", "--await-host", "--controlled", "--program"):
        name, _, value = words.pop(0)[2:].partition("=")
        yield name, value


def _be_controlled(*, with_variables: bool) -> None:
    """Obeys the launcher at the other end of standard input: the name of a signal in each line, and the end of the
    input as SIGTERM. ssh and programs like it carry no signals. With variables, the first line is a JSON object of
    them: secrets, which a command line would show to everybody."""
    control = os.fdopen(os.dup(0), encoding="utf-8", errors="replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # ranks must not hold the launcher's end open
    if with_variables:
        given = parse_json(control.readline())
        os.environ.update({str(name): str(value) for name, value in given.items()})
    _start(_obey, control)


def _obey(control: TextIOWrapper) -> None:
    for line in control:
        if number := _SIGNALS.get(line.strip()):
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)


def _watch_parent() -> None:
    """Stops the node, with a checkpoint, when the process that started it has ended: slurmstepd, MPI's daemon, sshd."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    _start(watch)


def _stop_after(seconds: int) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGUSR1)


def _await_host(words: Sequence[str], seconds: int) -> None:
    """Waits until the endpoint's host has an address: a pod's name has none before the pod starts. After `seconds` the
    run itself says what is wrong."""
    endpoint = next((word for word in words if word.startswith("run.rdzv_endpoint=")), "")
    host = endpoint.partition("=")[2].rpartition(":")[0]
    end = time.monotonic() + seconds
    while host and time.monotonic() < end:
        try:
            socket.getaddrinfo(host, 0)
        except OSError:
            time.sleep(_NAME_POLL_S)
        else:
            return


def _start(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="phalanx-node", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
