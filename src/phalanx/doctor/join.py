"""How the processes of a run, or one process per node, come together to be compared."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from phalanx.doctor.machine import CheckedMachine, CheckResult, error
from phalanx.echo import echo
from phalanx.errors import PhalanxError, RunError
from phalanx.launch.hosts import interface_towards, is_this_machine
from phalanx.launch.ranks import Ranks
from phalanx.units import counted

_QUIET = ("TORCH_CPP_LOG_LEVEL", "ERROR")
"""Keeps torch's C++ from writing about every peer whose name it cannot look up, and every one that it loses."""
_PATIENCE = 6
"""Factor on the seconds of a check: processes start, and import torch, at different times."""
_ADVICE = "start the same command on every node, and look at what this node says about the network"
_NO_TORCH = "torch is not installed here, so nodes cannot be compared\ninstall it, or use --hosts"
Compared = tuple[list[CheckResult], int]
"""The lines of all nodes, and the number of processes that took part."""


def by_launcher(machine: CheckedMachine, ranks: Ranks, findings: Sequence[CheckResult]) -> Compared | None:
    """Compares the processes that a launcher started. Returns all lines on rank 0, and None on the others. If they
    cannot meet, the first process of each node returns its own lines, with the reason."""
    wait = machine.seconds * _PATIENCE
    os.environ.setdefault(*_QUIET)
    with suppress(ImportError):
        from phalanx.launch.meet.meeting import Meeting

        meeting = Meeting(ranks)
        try:
            ranks = meeting.join(wait)
        except (PhalanxError, RuntimeError) as problem:
            return None if ranks.local_rank else (_apart(findings, problem), 1)
        return _meet(machine, meeting.store, ranks, wait, findings)
    return None if ranks.local_rank else (_apart(findings, _NO_TORCH), 1)


def by_endpoint(machine: CheckedMachine, findings: Sequence[CheckResult]) -> Compared | None:
    """Compares the nodes of `run.nnodes`, of which each has started this command; returns as `by_launcher` does."""
    run, wait = machine.job.run, machine.seconds * _PATIENCE
    host, port = run.endpoint
    os.environ.setdefault(*_QUIET)
    with suppress(ImportError):
        from torch._C._distributed_c10d import TCPStore

        try:
            leads = is_this_machine(host)
            echo(f"doctor: waiting up to {wait:g} s for {run.nnodes} nodes at {host}:{port}", file=sys.stderr)
            if not leads:
                _await_listener(host, port, wait)
            limit = timedelta(seconds=wait)
            store = TCPStore(host, port, None, leads, limit, wait_for_workers=False, multi_tenant=True)
            number, world = _numbered(store, leads, run.most_nodes, wait)
        except (RunError, RuntimeError) as problem:
            return _apart(findings, problem), 1
        if interface := interface_towards(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if world < run.least_nodes or world == 1:
            text = f"{counted(world, 'node')} of {run.nnodes} came to {host}:{port} within {wait:g} s"
            return _apart(findings, text), 1
        # Every node counts as one process, whatever ranks it will have.
        ranks = Ranks(number, world, 0, 1, number, "phalanx")
        return _meet(machine, store, ranks, wait, findings)
    return _apart(findings, _NO_TORCH), 1


def _meet(
    machine: CheckedMachine, store: Any, ranks: Ranks, wait: float, findings: Sequence[CheckResult]
) -> Compared | None:
    from phalanx.doctor.nodes import NodesMeeting, compare

    meeting = NodesMeeting(store, ranks.rank, ranks.world, wait / 2)  # all are there already
    try:
        found = compare(machine, meeting, ranks, findings)
    except RuntimeError as problem:  # the store is gone: its holder has ended
        return _apart(findings, problem), 1
    meeting.part()
    return None if found is None else (found, ranks.world)


def _apart(findings: Sequence[CheckResult], reason: object) -> list[CheckResult]:
    """Returns the lines of this node alone, and why it did not meet the others."""
    text, _, advice = str(reason).partition("\n")
    return [*findings, replace(error(text[:1000], advice or _ADVICE), group="nodes", check="rendezvous")]


def _numbered(store: Any, leads: bool, most: int, wait: float) -> tuple[int, int]:
    """Returns this node's number, 0 for the one that holds the store, and how many came in time."""
    if not leads:
        number = store.add("phalanx-doctor/nodes", 1)
        store.wait(["phalanx-doctor/world"], timedelta(seconds=2 * wait))
        return number, int(store.get("phalanx-doctor/world"))
    from phalanx.launch.meet.store import poll

    poll(lambda: store.add("phalanx-doctor/nodes", 0) >= most - 1, wait)
    world = min(most, 1 + store.add("phalanx-doctor/nodes", 0))
    store.set("phalanx-doctor/world", str(world))
    return 0, world


def _await_listener(host: str, port: int, wait: float) -> None:
    """Waits until something listens. Raises RunError if nothing does in time."""
    from phalanx.launch.meet.store import await_listener

    began = time.monotonic()
    if problem := await_listener(host, port, wait):
        waited = time.monotonic() - began
        raise RunError(
            f"nobody answers at {host}:{port} after {waited:.0f} s: {problem.strerror or problem}\n{_ADVICE}"
        )
