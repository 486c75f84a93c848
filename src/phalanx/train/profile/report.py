"""The document of a profile (traces/profile.json), and its text. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from phalanx.bounded import field, read_json
from phalanx.cost.breakdown import ComparedPart
from phalanx.errors import DataError, NotFoundError
from phalanx.train.profile.shares import Shares
from phalanx.units import counted, gib, listed

NAME = "profile.json"
MOST_RANKS = 16
"""Most ranks in the table of a terminal; the document has all."""
_SHOWN = 5e-4
"""Smallest share of a step that the table shows."""


def shares_document(shares: Shares) -> dict[str, Any]:
    """Returns the shares as plain values, their sum and its parts in order."""
    return {**asdict(shares), "parts": dict(shares.parts())}


def compared_document(parts: Sequence[ComparedPart], unit: Literal["s", "bytes"]) -> list[dict[str, Any]]:
    """Returns predicted and measured parts as plain values: "predicted_s" and so on."""
    return [
        {"name": part.name, f"predicted_{unit}": part.predicted, f"measured_{unit}": part.measured, "ratio": part.ratio}
        for part in parts
    ]


def read(run: Path) -> dict[str, Any]:
    """Returns the document of a run's profile. Raises DataError if there is none, or if it is not one."""
    path = run / "traces" / NAME if run.is_dir() else run
    try:
        document = read_json(path)
        for name, kind in (("steps", list), ("ranks", list), ("median_rank", int), ("files", list), ("notes", list)):
            field(document, name, kind)
        list(lines(document))
    except FileNotFoundError:
        hint = "profile steps of it with train.profile.steps=[10, 12]"
        raise NotFoundError(f"no profile in {run}: there is no {path}; {hint}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is no profile of this version: {error}") from None
    return document


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the profile as lines of text: the table by rank, predicted beside measured, memory, and the files."""
    first, last = document["steps"]
    ranks = document["ranks"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"profile of {steps}, {counted(len(ranks), 'rank')} on {document['device']}: milliseconds per step"
    yield from _table(document)
    yield from _overlapped(document)
    yield from _compared(document)
    yield from _memory(document.get("memory", []))
    if files := document["files"]:
        yield ""
        yield f"written to {document['traces']}: {listed(files, 12)}"
    yield from (f"note: {note}" for note in document["notes"])


def _table(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields one column per rank, and that of the median rank first."""
    ranks, middle = document["ranks"], _middle(document)
    shown = [middle, *ranks[:MOST_RANKS]]
    titles = [f"median ({middle['rank']})", *(f"rank {row['rank']}" for row in ranks[:MOST_RANKS])]
    columns = [dict(_detailed(row["shares"])) for row in shown]
    least = _SHOWN * middle["shares"]["step"]
    names = list(dict.fromkeys(name for column in columns for name, value in column.items() if value >= least))
    order = {name: place for place, name in enumerate(_ORDER)}
    names.sort(key=lambda name: order.get(name.split(" ")[-1] if " " in name else name, len(_ORDER) // 2))
    wide = max(24, *(len(name) + 2 for name in names))
    step = middle["shares"]["step"]
    yield f"  {'':<{wide}}{''.join(f'{title:>12}' for title in titles)}   share"
    for name in names:
        row = "".join(f"{_ms(column.get(name, 0.0)):>12}" for column in columns)
        yield f"  {name:<{wide}}{row}  {columns[0].get(name, 0.0) / step:>5.1%}"
    rest = "".join(f"{_ms(row['shares']['step']):>12}" for row in shown)
    yield f"  {'step':<{wide}}{rest}"
    if len(ranks) > MOST_RANKS:
        yield f"  and {len(ranks) - MOST_RANKS} more ranks in {NAME}"


def _middle(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the median rank's entry. Raises ValueError if there is none."""
    for row in document["ranks"]:
        if row["rank"] == document["median_rank"]:
            return row
    raise ValueError(f"it has no rank {document['median_rank']}")


_ORDER = ("forward", "backward", "recompute", "exposed", "waiting", "optimizer", "data", "other")


def _detailed(shares: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the parts of a step, communication by axis and collective."""
    for name in ("forward", "backward", "recompute"):
        yield name, shares[name]
    for axis, by in sorted(shares["exposed"].items()):
        for collective, seconds in sorted(by.items()):
            yield f"{axis} {collective.replace('_', '-')} exposed", seconds
    for axis, seconds in sorted(shares["waiting"].items()):
        yield f"{axis} {'bubble, ' if axis == 'pp' else ''}waiting", seconds
    for name in ("optimizer", "data", "other"):
        yield name, shares[name]


def _overlapped(document: Mapping[str, Any]) -> Iterator[str]:
    middle = _middle(document)
    hidden = [
        f"{axis} {collective.replace('_', '-')} {_ms(seconds)}"
        for axis, by in sorted(middle["shares"]["overlapped"].items())
        for collective, seconds in sorted(by.items())
    ]
    if hidden:
        bound = "at most, " if document["device"] == "cpu" else ""
        yield f"  in flight beside other work ({bound}not part of the step): {', '.join(hidden)}"


def _compared(document: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    beside = document.get("compared")
    if not beside:
        yield f"not compared with a prediction: {document.get('not_compared', 'unknown')}"
        return
    yield f"predicted beside measured: rank {beside['rank']}, cluster {beside['cluster']}; milliseconds per step"
    yield from _beside(beside["parts"], "s", _ms)


def _beside(parts: Sequence[Mapping[str, Any]], unit: str, shown: Callable[[Any], str]) -> Iterator[str]:
    """Yields predicted and measured parts, the last of which is the whole, without those too small to matter."""
    yield f"  {'':<26}{'predicted':>12}{'measured':>12}{'ratio':>8}"
    for part in parts:
        predicted, measured = part[f"predicted_{unit}"], part[f"measured_{unit}"]
        if max(predicted, measured) < _SHOWN * parts[-1][f"measured_{unit}"]:
            continue
        ratio = "" if part["ratio"] is None else f"{part['ratio']:.2f}"
        yield f"  {part['name']:<26}{shown(predicted):>12}{shown(measured):>12}{ratio:>8}".rstrip()


def _memory(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the largest tensors of the rank that has most."""
    if not ranks:
        return
    fullest = max(ranks, key=lambda rank: rank["peak_bytes"])
    parts = ", ".join(f"{part} {gib(size)}" for part, size in fullest["parts"].items() if gib(size) != "0B")
    others = f" ({counted(len(ranks) - 1, 'more rank')} in {NAME})" if len(ranks) > 1 else ""
    yield ""
    yield f"tensors at the peak of rank {fullest['rank']}{others}: {gib(fullest['peak_bytes'])}: {parts}"
    for tensor in fullest["tensors"][:12]:
        count = f" × {tensor['count']}" if tensor["count"] > 1 else ""
        yield f"  {gib(tensor['bytes']):>10}  {tensor['part']:<14} {tensor['name']}{count}"
    if rows := fullest.get("compared"):
        yield ""
        yield f"predicted beside measured: rank {fullest['rank']}, tensors at the peak"
        yield from _beside(rows, "bytes", gib)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 10 else f"{seconds * 1e3:,.0f}"
