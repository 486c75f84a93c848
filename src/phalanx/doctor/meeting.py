"""Messages between the nodes before a process group is formed: short JSON texts in a store.

A group forms only if every pair of ranks reaches each other. So the nodes first meet in the store of rank 0, and say
there what they have found: then rank 0 can name the pair that does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.launch.meet.keys import key
from phalanx.launch.meet.store import poll

_PARTING_S = 5.0


class NodesMeeting:
    """One process's part. Every process has a number; number 0 leads.

    Args:
        store: the store that all share.
        rank: this process's number.
        world: the number of processes.
        seconds: how long to wait for what others say.
    """

    def __init__(self, store: Store, rank: int, world: int, seconds: float):
        self.store, self.rank, self.world, self.seconds = store, rank, world, seconds

    def tell(self, topic: str, value: Any) -> None:
        """Tells the leader something about this process."""
        self.store.set(_key(topic, self.rank), json.dumps(value))

    def hear(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Returns what each of `ranks` has told; those that say nothing in time are missing."""
        end, found = time.monotonic() + self.seconds, {}
        for rank in ranks:
            with suppress(RuntimeError, ValueError):
                self.store.wait([_key(topic, rank)], timedelta(seconds=max(0.1, end - time.monotonic())))
                found[rank] = json.loads(self.store.get(_key(topic, rank)))
        return found

    def agree(self, topic: str, value: Any = None) -> Any:
        """Returns the leader's value on every process; None if the leader does not say it in time."""
        if self.rank == 0:
            self.tell(topic, value)
            return value
        # The leader waits for the slowest process first.
        patient = NodesMeeting(self.store, self.rank, self.world, 2 * self.seconds)
        return patient.hear(topic, [0]).get(0)

    def part(self) -> None:
        """Ends the meeting: the leader, which may hold the store, leaves last."""
        with suppress(RuntimeError):
            if self.rank:
                self.store.add(_key("parted", 0), 1)
                return
            poll(lambda: self.store.add(_key("parted", 0), 0) >= self.world - 1, _PARTING_S)


def _key(topic: str, rank: int) -> str:
    return key("doctor", topic, rank)
