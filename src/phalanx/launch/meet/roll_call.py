"""The roll call: all ranks are there, once each, expect the same, and have no problem; otherwise rank 0 says why.

A process group forms only among ranks that are all there. Otherwise every one of them waits for the whole timeout, and
torch names nobody. And N ranks that find the same mistake in a job would print it N times.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.bounded import parse_json
from phalanx.errors import RunError
from phalanx.launch.meet.keys import agent_listens, key
from phalanx.launch.meet.store import FoundStore, poll
from phalanx.launch.meet.told import GroupError, ToldError
from phalanx.launch.ranks import Ranks
from phalanx.units import listed

GRACE_S = 5.0
"""Seconds that others wait longer than rank 0, which names who is missing; and that its store waits to be read."""
REFUSAL_S = 30.0
"""Seconds for which a rank with a problem waits for the others to tell them."""
_MORE_PROBLEMS_S = 2.0  # from the first problem until rank 0 gives its verdict, if not all ranks are there
_SHOWN = 16  # ranks in a message
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Problem:
    """The reason for which a rank cannot take part."""

    message: str
    code: int = RunError.exit_code
    """The rank's exit code."""
    own: bool = True
    """True if the message does not say which rank has it."""
    rank: int = -1
    """The rank that has it."""
    host: str = ""


@dataclass(frozen=True)
class Verdict:
    """What rank 0 tells all ranks."""

    message: str
    """Empty if the group is complete."""
    code: int
    nodes: tuple[int, ...]
    """The node of every rank, numbered as they come; empty if all ranks know their place on their node."""
    address: str
    """An address of a rank on another node than rank 0, as rank 0's node can reach it; empty if there is none."""


def enter(store: Store, ranks: Ranks) -> Problem | None:
    """Enters this process under its rank. Returns a problem if another process has the same rank."""
    number = store.add(key("entries", ranks.rank), 1)
    me = f"process {os.getpid()} on host {platform.node()}"
    store.set(key("entry", ranks.rank, number), me)
    if number == 1 or agent_listens():
        return None
    first = store.get(key("entry", ranks.rank, 1)).decode(errors="replace")
    return Problem(
        f"Two processes have rank {ranks.rank} of {ranks.world}: {first}, and {me}. Give every process its own "
        "RANK; where one was restarted, restart all of them.",
        own=False,
    )


def missing(store: Store, world: int) -> str:
    """Returns the ranks that have not entered, in words; empty if all have."""
    return _ranks([rank for rank in range(world) if not store.check([key("entry", rank, 1)])])


class RollCall:
    """One rank's part in the roll call, in a store that rank 0 holds.

    Args:
        ranks: this rank's place.
        found: the store.
        timeout_s: seconds for which rank 0 waits for the others.
        address: this rank's own address, as rank 0's node can reach it; empty if it is unknown.
        advice: what to check if ranks are missing.
    """

    def __init__(self, ranks: Ranks, found: FoundStore, timeout_s: float, address: str, advice: str):
        self.ranks, self.timeout_s, self.address, self.advice = ranks, timeout_s, address, advice
        self.store, self.holds_store = found.store, found.holds

    def answer(self, expected: Mapping[str, object], problem: Problem | None = None) -> Verdict:
        """Returns the verdict once all ranks are there.

        Args:
            expected: what must be the same on all ranks (JSON-able).
            problem: the reason for which this rank cannot take part.

        Raises on every rank that is there, if one is missing, has a problem, or expects something else: GroupError on
        rank 0, ToldError on the others. RuntimeError if the store is gone.
        """
        store = self.store
        store.add(key("callers"), 1)
        difference = self._difference(expected)
        problem = enter(store, self.ranks) or problem or difference
        if problem:
            me = replace(problem, rank=self.ranks.rank, host=platform.node())
            store.set(key("problem", store.add(key("numbers"), 1)), json.dumps(asdict(me)))
            store.add(key("problems"), 1)
        is_second = problem is not None and not problem.own and problem.message.startswith("Two processes")
        if not is_second:
            store.set(key("node", self.ranks.rank), json.dumps([_node(self.ranks), self.address]))
            if self.ranks.local_rank is None or self.ranks.local_world is None:
                store.add(key("unplaced"), 1)
            store.add(key("arrived"), 1)
        if self.ranks.rank == 0 and not is_second:
            store.set(key("verdict"), json.dumps(asdict(self._judge())))
        patience_s = REFUSAL_S if problem else self.timeout_s
        store.wait([key("verdict")], timedelta(seconds=patience_s + GRACE_S))
        found = parse_json(store.get(key("verdict")))
        verdict = Verdict(found["message"], found["code"], tuple(found["nodes"]), found["address"])
        if not verdict.message:
            return verdict
        with suppress(RuntimeError):  # another process with rank 0 held the store that all connected to
            store.add(key("heard"), 1)
        if self.holds_store:
            atexit.register(self._wait_for_readers)
        raise (ToldError if self.ranks.rank or is_second else GroupError)(verdict.message, verdict.code)

    def _difference(self, expected: Mapping[str, object]) -> Problem | None:
        """Returns what rank 0 expects otherwise."""
        if self.ranks.rank == 0:
            self.store.set(key("expected"), json.dumps(expected))
            return None
        first = parse_json(self.store.get(key("expected")))
        for name, value in expected.items():
            if first.get(name, value) != value:
                return Problem(
                    f"rank {self.ranks.rank} on host {platform.node()} has {name} {value}, but rank 0 {first[name]}: "
                    "start all ranks with the same settings",
                    own=False,
                )
        return None

    def _judge(self) -> Verdict:
        """Waits for all ranks, or for a while after the first problem. Returns rank 0's verdict."""
        store, world = self.store, self.ranks.world
        end = time.monotonic() + self.timeout_s

        def complete() -> bool:
            nonlocal end
            if store.add(key("problems"), 0):
                end = min(end, time.monotonic() + _MORE_PROBLEMS_S)
            return store.add(key("arrived"), 0) >= world or time.monotonic() > end

        poll(complete, self.timeout_s + GRACE_S)
        if problems := self._problems():
            return Verdict(message_of(problems, world), max(each.code for each in problems), (), "")
        if absent := missing(store, world):
            seconds = f"After {self.timeout_s:g} s"
            return Verdict(f"{seconds}, {absent} of {world} did not come.\n{self.advice}", RunError.exit_code, (), "")
        nodes = [parse_json(text) for text in store.multi_get([key("node", rank) for rank in range(world)])]
        address = next((address for node, address in nodes if address and node != nodes[0][0]), "")
        if not store.add(key("unplaced"), 0):
            return Verdict("", 0, (), address)
        numbers = {node: number for number, node in enumerate(dict.fromkeys(node for node, _ in nodes))}
        return Verdict("", 0, tuple(numbers[node] for node, _ in nodes), address)

    def _problems(self) -> list[Problem]:
        numbers = range(1, self.store.add(key("numbers"), 0) + 1)
        there = [key("problem", number) for number in numbers if self.store.check([key("problem", number)])]
        return [Problem(**parse_json(self.store.get(name))) for name in there]

    def _wait_for_readers(self) -> None:
        """Keeps the store, once the message has been printed, until all ranks have read the verdict: also those that
        come later, unless ranks were missing anyway."""
        has_problems = self.store.add(key("problems"), 0) > 0
        readers = self.ranks.world if has_problems else self.store.add(key("callers"), 0)
        poll(lambda: self.store.add(key("heard"), 0) >= readers, REFUSAL_S if has_problems else GRACE_S)


def message_of(problems: Sequence[Problem], world: int) -> str:
    """Returns the message about the problems of some ranks, each once: what all ranks have needs no rank; else it says
    which ranks have it, and their hosts."""
    ranks_by_message: dict[str, list[Problem]] = {}
    for each in sorted(problems, key=lambda each: each.rank):
        ranks_by_message.setdefault(each.message, []).append(each)
    lines = []
    for message, found in list(ranks_by_message.items())[:_SHOWN_PROBLEMS]:
        if not found[0].own or len(found) == world:
            lines.append(message)
            continue
        hosts = list(dict.fromkeys(each.host for each in found))
        where = f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts ({', '.join(hosts[:4])})"
        lines.append(f"{_ranks([each.rank for each in found])} of {world} on {where}: {message}")
    if (rest := len(ranks_by_message) - _SHOWN_PROBLEMS) > 0:
        lines.append(f"and {rest} more problems")
    return "\n".join(lines)


def placed(ranks: Ranks, verdict: Verdict) -> Ranks:
    """Returns a rank's place with what its launcher has not said: its place among the ranks of its node."""
    if not verdict.nodes:
        return ranks
    node = verdict.nodes[ranks.rank]
    local_rank = verdict.nodes[: ranks.rank].count(node) if ranks.local_rank is None else ranks.local_rank
    local_world = ranks.local_world or Counter(verdict.nodes)[node]
    return replace(ranks, local_rank=local_rank, local_world=local_world, node_rank=node)


def _node(ranks: Ranks) -> str:
    """Returns what the ranks of one node have in common. Virtual nodes of Slurm share the name of their machine."""
    name = os.environ.get("SLURMD_NODENAME", "") if ranks.source == "slurm" else ""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{platform.node()} {boot_id} {name}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _SHOWN)}" if ranks else ""
