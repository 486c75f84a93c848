"""A peer that goes away on another machine: the backend's errors as one message, for ranks without our launcher.

Ranks of the local launcher need none: it has seen which rank ended first (verdict.py).
"""

from __future__ import annotations

import platform
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import phalanx
from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks
from phalanx.launch.verdict import LOST_PEER

TEXTS = (
    *LOST_PEER,
    *(
        "Socket closed",
        "Connection refused",
        "Connection timed out",
        "No route to host",
        "Connection was likely closed",
    ),
    *("Application timeout caused pair closure", "NCCL communicator was aborted", "wait timeout"),
)
"""Parts of the messages with which gloo, NCCL and torch's store report a lost peer."""
_ROOT = Path(phalanx.__file__).parent


class LostPeerError(RunError):
    """This rank failed only because another one has gone, or does not answer."""


@contextmanager
def lost_peer_named(ranks: Ranks) -> Iterator[None]:
    """Turns a backend's error about a lost connection, raised inside the `with` block, into a LostPeerError that says
    what this rank was waiting in."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        text = _lost_line(error)
        if text is None:
            raise
        raise LostPeerError(
            f"rank {ranks.rank} of {ranks.world} on {platform.node()} lost {_peer(ranks, text)}: another rank ended, "
            f"hangs, or its connection broke while this one waited in {_waited_in(error)}. The first rank that ended "
            f"says why, in its log or on its node. ({_in_short(text)})"
        ) from error


def is_about_lost_peer(error: RuntimeError) -> bool:
    """Returns whether a backend's error says that a peer is lost."""
    return _lost_line(error) is not None


def _lost_line(error: RuntimeError) -> str | None:
    return next((line for line in str(error).splitlines() if any(known in line for known in TEXTS)), None)


def _peer(ranks: Ranks, text: str) -> str:
    if ranks.world == 2:
        return f"rank {1 - ranks.rank}"
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", text)
    return f"a rank on {address[1]}" if address else "rank(s)"


def _waited_in(error: BaseException) -> str:
    """Returns the innermost of our functions that waited, outside of the collectives themselves."""
    stack = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [(path.relative_to(_ROOT), frame) for path, frame in stack if path.is_relative_to(_ROOT)]
    outside = [(path, frame) for path, frame in ours if path.parts[0] != "comm"] or ours
    if not outside:
        return "a collective"
    path, frame = outside[-1]
    return f"{frame.name} ({path}:{frame.lineno})"


def _in_short(text: str) -> str:
    """Returns the backend's message without the line of its source and its general advice."""
    return re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", text)[:300]
