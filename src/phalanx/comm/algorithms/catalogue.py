"""The collective algorithms by name: what `phalanx collectives` lists and shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phalanx.comm.algorithms import direct, halving, hierarchical, ring, tree
from phalanx.comm.algorithms.program import CollectiveProgram
from phalanx.errors import JobError
from phalanx.nearest import nearest

THAKUR = "Thakur, Rabenseifner & Gropp 2005"
MOST_RANKS = 512
"""The limit on ranks: a program lists every message, and a ring has one per rank and step, quadratic in the ranks."""


@dataclass(frozen=True)
class AlgorithmEntry:
    """One algorithm of a collective."""

    build: Callable[..., CollectiveProgram]
    """Builds the program from ranks, elements, and the setting that `takes` names."""
    steps: str
    """The number of steps as a closed form in the P ranks."""
    source: str
    takes: Literal["", "root", "group"] = ""
    """The additional setting: the root's rank, or the number of ranks in a group with fast links."""


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "naive-all-reduce": AlgorithmEntry(direct.naive_all_reduce, "2(P-1)", "everything through rank 0"),
    "ring-all-reduce": AlgorithmEntry(ring.all_reduce, "2(P-1)", "Patarasuk & Yuan 2009"),
    "tree-all-reduce": AlgorithmEntry(tree.all_reduce, "2 ceil(log2 P)", THAKUR),
    "halving-doubling-all-reduce": AlgorithmEntry(
        halving.all_reduce, "2 log2 P, P a power of 2", f"Rabenseifner; {THAKUR}"
    ),
    "hierarchical-all-reduce": AlgorithmEntry(
        hierarchical.all_reduce, "2(g-1) + 2(P/g-1), groups of g", "Mikami et al. 2018", takes="group"
    ),
    "ring-reduce-scatter": AlgorithmEntry(ring.reduce_scatter, "P-1", "Patarasuk & Yuan 2009"),
    "ring-all-gather": AlgorithmEntry(ring.all_gather, "P-1", "Patarasuk & Yuan 2009"),
    "tree-broadcast": AlgorithmEntry(tree.broadcast, "ceil(log2 P)", THAKUR, takes="root"),
    "tree-reduce": AlgorithmEntry(tree.reduce, "ceil(log2 P)", THAKUR, takes="root"),
    "scatter": AlgorithmEntry(direct.scatter, "P-1", "straight from the root", takes="root"),
    "gather": AlgorithmEntry(direct.gather, "P-1", "straight to the root", takes="root"),
    "all-to-all": AlgorithmEntry(direct.all_to_all, "P-1", "pairwise exchange"),
}


def full_name(name: str) -> str:
    """Returns the catalogue's spelling of an algorithm's name. Raises JobError with the nearest one if it has none."""
    spelled = name.lower().replace("_", "-").replace(" ", "-")
    if spelled not in ALGORITHMS:
        meant = nearest(spelled, ALGORITHMS) or next((known for known in ALGORITHMS if spelled in known), None)
        hint = f"; did you mean {meant}?" if meant else ""
        raise JobError(f"no collective algorithm {name!r}{hint} (known: {', '.join(ALGORITHMS)})")
    return spelled


def build(name: str, ranks: int, elements: int, **settings: int) -> CollectiveProgram:
    """Returns the program of the algorithm `name` among `ranks` ranks for a tensor of `elements` elements.

    `settings` may have the `root` or `group` that the algorithm takes; by default the root is rank 0, and a group is
    the largest proper divisor of the ranks. Raises JobError with the nearest name, or where a setting does not fit.
    """
    spelled = full_name(name)
    if ranks > MOST_RANKS:
        raise JobError(f"ranks {ranks}: at most {MOST_RANKS}, because a program lists every message")
    entry = ALGORITHMS[spelled]
    if wrong := [setting for setting in settings if setting != entry.takes]:
        raise JobError([f"{spelled} has no {setting}; leave --{setting} out" for setting in wrong])
    if entry.takes == "group":
        settings.setdefault("group", next(size for size in range(max(1, ranks // 2), 0, -1) if ranks % size == 0))
    try:
        return entry.build(ranks, elements, **settings)
    except ValueError as error:
        raise JobError(f"{spelled}: {error}") from None
