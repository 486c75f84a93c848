"""Where the ranks of a group find each other: their store.

Ranks of our own launcher on one machine meet in its file. All others meet as launch/meet says.
"""

from __future__ import annotations

import os
from contextlib import suppress

from torch._C._distributed_c10d import FileStore, Store  # torch.distributed.*, to the type stubs

from phalanx.errors import RunError
from phalanx.launch.environment import STORE
from phalanx.launch.meet.meeting import Meeting, failed
from phalanx.launch.meet.roll_call import enter, missing
from phalanx.launch.ranks import Ranks


def open_store(ranks: Ranks, backend: str, timeout_s: float) -> Store:
    """Returns the store through which the ranks form their process group. Where rank 0 holds the store, all ranks have
    answered the roll call when this returns.

    Raises RunError: there is no way to meet, ranks are missing after `timeout_s` seconds, two processes have one rank,
    or a rank expects another world size or backend than rank 0. The message names the culprit.
    """
    if STORE in os.environ:
        store = FileStore(os.environ[STORE], ranks.world)
        if problem := enter(store, ranks):
            raise RunError(problem.message)
        return store
    meeting = Meeting(ranks)
    meeting.join(timeout_s, {"backend": backend})
    return meeting.store


def not_formed(ranks: Ranks, store: Store, timeout_s: float, error: RuntimeError) -> str:
    """Returns the message about a group that could not be formed after `open_store`: who is missing, if anyone."""
    message = failed(ranks, timeout_s, error)
    with suppress(RuntimeError):
        if absent := missing(store, ranks.world):
            return f"{message}\nNot there: {absent}. See the end of its log."
    return f"{message}\nAll ranks joined; see the first error in their logs."
