"""Tells all ranks what rank 0 says, through the process manager of MPICH, Intel MPI or Flux (PMI-1).

The process manager (hydra) is at the other end of the socket PMI_FD, and answers lines of `name=value` pairs: the wire
protocol of PMI-1 (Balaji et al., "PMI: A Scalable Parallel Process-Management Interface", 2010; MPICH, src/pmi).
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Mapping
from types import TracebackType

_KEY = "phalanx"
_LONGEST_LINE = 1 << 16


def is_there(env: Mapping[str, str]) -> bool:
    """Returns whether a process manager that speaks PMI-1 is at PMI_FD. Slurm's speaks PMI-2 there."""
    number = env.get("PMI_FD", "")
    if not number.isdigit() or "SLURM_PMI_FD" in env or ("PMI_JOBID" in env and "SLURM_STEP_ID" in env):
        return False
    try:
        return stat.S_ISSOCK(os.fstat(int(number)).st_mode)
    except (OSError, OverflowError):
        return False


def exchange(env: Mapping[str, str], text: str | None, seconds: float) -> str:
    """Returns rank 0's text (printable ASCII without spaces) on every rank; the others pass None.

    All ranks call it, once. Raises OSError if not all of them do so within so many seconds, or the process manager
    gives up.
    """
    with _Manager(int(env["PMI_FD"]), seconds) as manager:
        name = manager.ask("get_my_kvsname", answer="my_kvsname")["kvsname"]
        if text is not None:
            manager.ask(f"put kvsname={name} key={_KEY} value={text}", answer="put_result")
        manager.ask("barrier_in", answer="barrier_out")
        return manager.ask(f"get kvsname={name} key={_KEY}", answer="get_result")["value"]


class _Manager:
    """The process manager's end of the socket. A context manager: a process that leaves without `finalize` counts as
    crashed."""

    def __init__(self, descriptor: int, seconds: float):
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._end = time.monotonic() + seconds
        self._received = b""

    def __enter__(self) -> _Manager:
        self.ask("init pmi_version=1 pmi_subversion=1", answer="response_to_init")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self.ask("finalize", answer="finalize_ack")
        finally:
            self._socket.close()

    def ask(self, request: str, answer: str) -> dict[str, str]:
        """Returns the pairs of the answer to a request. Raises OSError for any other answer."""
        self._socket.settimeout(max(0.001, self._end - time.monotonic()))
        self._socket.sendall(f"cmd={request}\n".encode("ascii"))
        line = self._line()
        pairs = {name: value for name, _, value in (pair.partition("=") for pair in line.split())}
        if pairs.get("cmd") != answer or pairs.get("rc", "0") != "0":
            raise OSError(f"the process manager answered {request.split(maxsplit=1)[0]} with {line[:200]!r}")
        return pairs

    def _line(self) -> str:
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.001, self._end - time.monotonic()))
            more = self._socket.recv(4096)
            if not more or len(self._received) > _LONGEST_LINE:
                raise ConnectionError("the process manager closed the connection")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line.decode("ascii", "replace")
