"""Classes 3, 7 and 8: two nodes (network namespaces with one rank each), and what befalls them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from benchmarks.chaos import processes
from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.moments import Action, at_step
from benchmarks.chaos.live import Live, send
from benchmarks.chaos.nodes import Nodes
from benchmarks.chaos.story import Story

_NAMES = r"(?i)chaos-b|10\.78\.0\.2|rank 1\b"
_NEEDS = ("namespaces",)
_EXACT = {"train.precision": "fp64", "layout.dp_replicate": 2}
_FEWER_BOUND = 1e-6  # fp64: one rank sums the micro-batches of two in another order


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


def _cut(live: Live, nodes: Nodes) -> None:
    live.victims.add(1)
    nodes.cut()


def _lose(live: Live, nodes: Nodes) -> None:
    live.victims.add(1)
    nodes.lose(1)


def _flap(live: Live, nodes: Nodes) -> None:
    nodes.cut()
    time.sleep(2)
    nodes.join()


def _no_false_success(arena: Arena, story: Story) -> Sequence[str]:
    """The node that is cut off from the host does not claim that the run is done."""
    return [] if story.first.codes[1] else ["the node that was cut off ended with 0"]


def _rejoin(arena: Arena) -> None:
    assert arena.nodes is not None
    arena.nodes.join()


FAULTS = (
    Fault(
        3, "host", "everything on the node of rank 0 and of the rendezvous is killed",
        "the other node says which host is lost and stops; the same commands resume",
        launch="nodes", during=at_step(_lose_node(0)), names=r"(?i)chaos-a|10\.78\.0\.1|rank 0\b",
        job=_EXACT, bound=_FEWER_BOUND, needs=_NEEDS, peer=True,
    ),
    Fault(
        3, "other-node", "everything on the node of rank 1 is killed",
        "the node left says which host is lost, and goes on alone",
        launch="nodes", during=at_step(_lose_node(1)), names=_NAMES,
        job=_EXACT, bound=_FEWER_BOUND, needs=_NEEDS, peer=True,
    ),
    Fault(
        7, "cut", "the link between two nodes goes down and stays down",
        "both nodes name the other; the first goes on alone, the second stops and writes nothing",
        launch="nodes", prepare=_of(_cut), names=_NAMES, repair=_rejoin, check=_no_false_success,
        job=_EXACT, bound=_FEWER_BOUND, needs=_NEEDS, peer=True,
    ),
    Fault(
        7, "one-way", "packets to the second node are lost silently",
        "as the cut: found by the silence, not after 30 minutes",
        launch="nodes", prepare=_of(_lose), names=_NAMES, repair=_rejoin, check=_no_false_success,
        job=_EXACT, bound=_FEWER_BOUND, needs=_NEEDS,
    ),
    Fault(
        7, "slow", "the link is limited to 60 Mbit/s", "the run goes on to the same weights",
        launch="nodes", prepare=_of(lambda live, nodes: nodes.rate("60mbit")), needs=_NEEDS, limit_s=180,
    ),
    Fault(
        8, "2-s", "the link is down for 2 s", "the run rides it out or restarts once",
        launch="nodes", prepare=_of(_flap), needs=_NEEDS, peer=True,
    ),
)  # fmt: skip
