"""What nodes and the host tell each other: lines of JSON. Every value is checked, and nothing that arrives executes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from phalanx.bounded import parse_json

MOST_BYTES = 1 << 16
"""Bytes of a line."""
WORDS = ("run.nnodes", "layout", "layout.bucket_mb", "train.global_batch", "cluster.nodes", "cluster.devices_per_node")
"""Fields of the job that depend on the number of nodes: a host may set these and no others."""


@dataclass(frozen=True)
class NodeFailure:
    """The end of a round on a node whose ranks failed by themselves."""

    code: int
    """Exit code of the launch, if nothing follows."""
    message: str
    final: bool
    """True if the ranks are not started again."""


@dataclass(frozen=True)
class NodeState:
    """What a node tells the host several times per second."""

    host: str
    """Its host name."""
    processes: int
    """Ranks that it starts."""
    round: int = 0
    """The newest round of this host that it has taken part in; 0 before the first."""
    waits: bool = True
    """True while it has no ranks and waits for a round."""
    done: bool = False
    """True once its ranks have ended well: it does not take part in another round."""
    failure: NodeFailure | None = None
    """Why its ranks failed in that round, if they did by themselves."""
    key: str = ""
    """The key of the run (key.py), which is asked for when it joins."""


@dataclass(frozen=True)
class Round:
    """One attempt of all nodes together."""

    number: int
    """From 1."""
    members: tuple[int, ...]
    """The slots of the nodes that take part, in the order of their ranks; the host is first."""
    reason: str
    """Why it began; empty for the first one."""
    address: str
    """Where rank 0 listens."""
    port: int
    generation: str
    """Generation of the run directory (launch/generation.py)."""
    attempt: str
    """Name of the attempt's log directory."""
    words: tuple[str, ...]
    """Words of the command line that adapt the job to the number of nodes, of the fields WORDS."""


@dataclass(frozen=True)
class Ending:
    """The end of a round, as the host has decided."""

    reason: str
    saves: bool = False
    """True if the ranks can stop with a checkpoint; otherwise they are killed."""
    code: int | None = None
    """Exit code of every node if no other round follows."""


@dataclass(frozen=True)
class Notice:
    """The host's answer to a node's state."""

    slot: int
    """The node's number at this host, from 0: the host itself."""
    round: Round | None = None
    ending: Ending | None = None
    """Set once the round is to end."""
    refusal: str = ""
    """Why the node cannot take part."""


def encode(message: NodeState | Notice) -> bytes:
    """Returns a message as one line."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_state(line: bytes) -> NodeState:
    """Returns a node's state. Raises ValueError if it is none."""
    found = _fields(NodeState, parse_json(line))
    failure = found.pop("failure")
    state = NodeState(**_typed(NodeState, found), failure=_optional(NodeFailure, failure))
    if state.processes < 1:
        raise ValueError("a node starts at least one rank")
    return state


def decode_notice(line: bytes) -> Notice:
    """Returns the host's answer. Raises ValueError if it is none."""
    found = _fields(Notice, parse_json(line))
    round_, ending = found.pop("round"), found.pop("ending")
    if round_ is not None:
        values = _fields(Round, round_)
        members, words = _list(values.pop("members"), int), _list(values.pop("words"), str)
        if any(word.partition("=")[0] not in WORDS for word in words):
            raise ValueError("words that do not adapt a job to the number of nodes")
        round_ = Round(**_typed(Round, values), members=members, words=words)
        if not re.fullmatch("attempt_[0-9]+", round_.attempt):
            raise ValueError("an attempt whose logs would lie elsewhere")
    if ending is not None:
        values = _fields(Ending, ending)
        code = values.pop("code")
        if code is not None and type(code) is not int:
            raise ValueError("an exit code is a number")
        ending = Ending(**_typed(Ending, values), code=code)
    return Notice(**_typed(Notice, found), round=round_, ending=ending)


def _fields(kind: type, value: Any) -> dict[str, Any]:
    """Returns the values of a dataclass's fields. Raises ValueError if they are not exactly these."""
    if not isinstance(value, dict) or value.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"not a {kind.__name__}")
    return dict(value)


def _typed(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Returns plain values of a dataclass's fields. Raises ValueError if one has another type than its field."""
    types = {field.name: str(field.type) for field in fields(kind)}
    for name, value in values.items():
        if type(value).__name__ != types[name]:
            raise ValueError(f"{kind.__name__}.{name} is {type(value).__name__}, not {types[name]}")
    return values


def _optional(kind: type, value: Any) -> Any:
    return None if value is None else kind(**_typed(kind, _fields(kind, value)))


def _list(value: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise ValueError(f"not a list of {kind.__name__}")
    return tuple(value)
