"""The sources of a run on a mixture: what was drawn of each, and how it validates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.pictures.page import table
from phalanx.report.metrics import number, numbers_of
from phalanx.report.run import RunRecord


def sources_of(record: RunRecord) -> list[dict[str, Any]]:
    """Returns each source by the newest rows: its path, weight (a share of all), tokens drawn with their share, passes
    over it, and its newest validation loss; None for what no row says. Nothing for a run on one corpus."""
    start = record.metrics.last("start") or {}
    known = {
        source["path"]: source
        for source in (start["sources"] if isinstance(start.get("sources"), list) else ())
        if isinstance(source, dict) and isinstance(source.get("path"), str)
    }
    drawn = record.metrics.source_tokens
    losses = numbers_of((record.metrics.last("validation") or {}).get("source_losses"))
    total = sum(drawn.values())
    found = []
    for path in known or drawn:
        tokens, once = drawn.get(path), number(known.get(path, {}).get("tokens"))
        found.append(
            {
                "path": path,
                "weight": number(known.get(path, {}).get("weight")),
                "tokens": tokens,
                "share": tokens / total if tokens is not None and total else None,
                "epochs": tokens / once if tokens is not None and once else None,
                "val_loss": losses.get(path),
            }
        )
    return found


def source_table(sources: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the sources as a table of the page."""
    forms = {"weight": "{:.2%}", "tokens": "{:,.0f}", "share": "{:.2%}", "epochs": "{:.2f}", "val_loss": "{:.4f}"}
    heads = ("source", "weight", "tokens", "share of tokens", "epochs", "validation loss")
    rows = [
        [
            (source["path"], None),
            *(("–" if (value := source[name]) is None else form.format(value), value) for name, form in forms.items()),
        ]
        for source in sources
    ]
    yield from table(heads, rows, words=(0,))
