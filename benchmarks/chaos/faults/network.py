"""Classes 3, 7 and 8: two nodes (network namespaces with one rank each, started by torchrun), and what befalls them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from benchmarks.chaos import processes
from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.moments import Action, at_step
from benchmarks.chaos.live import Live, send
from benchmarks.chaos.nodes import Nodes

_NAMES = r"(?i)chaos-b|10\.78\.0\.2|rank 1\b"
_NEEDS = ("namespaces",)


def _of(action: Callable[[Live, Nodes], None]) -> Callable[[Arena], None]:
    """Returns a preparation that gives the fault's action the nodes, which exist only once the arena does."""

    def prepare(arena: Arena) -> None:
        nodes = arena.nodes
        assert nodes is not None
        arena.during = at_step(lambda live: action(live, nodes))

    return prepare


def _lose_node(node: int) -> Action:
    """Returns what kills everything on one node, as a power failure does."""

    def act(live: Live) -> None:
        live.victims.add(node)
        root = live.popens[node].pid
        for process in [p for p in processes.marked(live.mark) if _descends(p.pid, root)]:
            send(process.pid, signal.SIGKILL)

    return act


def _descends(pid: int, root: int) -> bool:
    while pid > 1:
        if pid == root:
            return True
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def _flap(live: Live, nodes: Nodes) -> None:
    nodes.cut()
    time.sleep(2)
    nodes.join()


def _rejoin(arena: Arena) -> None:
    assert arena.nodes is not None
    arena.nodes.join()


FAULTS = (
    Fault(
        3, "store-host", "everything on the node of rank 0 and of the rendezvous is killed",
        "the other node says that the host is lost and stops; the same commands resume",
        launch="nodes", during=at_step(_lose_node(0)), names=r"(?i)chaos-a|10\.78\.0\.1|rank 0\b",
        needs=_NEEDS,
    ),
    Fault(
        3, "other-host", "everything on the node of rank 1 is killed",
        "the node left says which host is lost, and goes on alone or stops; the same commands resume",
        launch="nodes", during=at_step(_lose_node(1)), names=_NAMES, needs=_NEEDS,
    ),
    Fault(
        7, "cut", "the link between two nodes goes down and stays down",
        "both nodes stop or go on alone, and name the host; nothing writes twice; the same commands resume",
        launch="nodes", prepare=_of(lambda live, nodes: nodes.cut()), names=_NAMES, repair=_rejoin,
        needs=_NEEDS,
    ),
    Fault(
        7, "one-way", "packets to the second node are lost silently",
        "as the cut: found by the watchdog, not after 30 minutes",
        launch="nodes", prepare=_of(lambda live, nodes: nodes.lose(1)), names=_NAMES, repair=_rejoin,
        needs=_NEEDS,
    ),
    Fault(
        7, "slow", "the link is limited to 60 Mbit/s", "the run goes on to the same weights",
        launch="nodes", prepare=_of(lambda live, nodes: nodes.rate("60mbit")), needs=_NEEDS, limit_s=180,
    ),
    Fault(
        8, "2-s", "the link is down for 2 s", "the run rides it out or restarts once",
        launch="nodes", prepare=_of(_flap), needs=_NEEDS,
    ),
)  # fmt: skip
