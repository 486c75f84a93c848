"""What `phalanx plan` prints, and its document."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.cost.breakdown import document, duration
from phalanx.plan.page import as_json, text
from plan.plans import hopeless, plan


def test_every_layout_has_a_row_with_its_figures() -> None:
    shown = text(plan())
    assert shown.startswith("llama3-70b on 64 × h100-80gb (dgx-h100:8), global batch 64 × 8,192 tokens")
    rows = [line for line in shown.splitlines() if line[:1].isdigit()]
    assert len(rows) == len(plan().best)
    for row, each in zip(rows, plan().best, strict=True):
        assert duration(each.seconds) in row
        assert f"{each.mfu:.1%}" in row
        assert f"  {each.tokens_per_s / 64:,.0f}  {each.tokens_per_s:,.0f}  " in re.sub(" {2,}", "  ", row)
        assert "micro_batch" not in row


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_lines_stay_in_the_width(width: int) -> None:
    long = replace(plan().best[0].layout, schedule="interleaved_1f1b", pp_chunks=4, loss_chunk=1024, tiles=4)
    long = replace(long, accumulate="sharded", offload="optimizer", reshard=False, prefetch=2, sp_regather=True)
    first = replace(plan().best[0], spec=replace(plan().best[0].spec, layout=long))
    notes = ("a sentence that is long " * 12, *plan().notes)
    shown = text(replace(plan(), best=(first, *plan().best[1:]), notes=notes), width)
    for line in shown.splitlines():
        assert len(line) <= width or line.startswith(("best layout: ", "llama3-70b on")), line


def test_a_narrow_terminal_shows_the_same() -> None:
    narrow, wide = text(plan(), 80), text(plan())
    assert Counter(narrow.replace("─", "").split("\n")) != Counter(wide.replace("─", "").split("\n"))
    assert Counter("".join(narrow.replace("─", "").split())) == Counter("".join(wide.replace("─", "").split()))
    assert narrow.split("\n\n")[1].splitlines()[1].split()[0] == "micro-batches"


def test_parts_notes_alternatives_and_reasons_are_there() -> None:
    shown = text(plan())
    assert "matrix products" in shown
    assert "peak memory " in shown
    for sentence in (*plan().notes, *plan().rejected):
        assert sentence in shown
    assert "not legal" in shown
    assert "needs 1068.2GiB" in shown
    assert f"{plan().best[-1].seconds / plan().best[0].seconds:.2f} ×" in shown
    assert shown.splitlines()[-1] == "searched 1,208 layouts in 840ms"


def test_where_nothing_fits_it_says_by_how_much_and_what_is_largest() -> None:
    shown = text(hopeless())
    assert "no layout fits" in shown
    assert "exceeds the " in shown
    assert "the largest part is optimizer" in shown
    assert "no layout is legal" in text(replace(hopeless(), nearest=None))


def test_the_document_has_what_the_design_says() -> None:
    found = json.loads(json.dumps(as_json(plan())))
    assert set(found) == {
        *("best", "fastest", "candidates", "nearest", "alternatives", "rejected", "searched", "seconds", "notes"),
    }
    best = found["best"]
    assert parse(best.pop("line")) == Layout(**best) == plan().best[0].layout
    first = found["candidates"][0]
    assert first["prediction"] == json.loads(json.dumps(document(plan().best[0].prediction)))
    assert first["simulated_step_time_s"] == pytest.approx(plan().best[0].seconds)
    slower = [each["slower"] for each in found["alternatives"]]
    assert slower == [pytest.approx(plan().best[-1].seconds / plan().best[0].seconds), None, None, None]
    assert found["alternatives"][3]["candidate"] is None
    assert found["rejected"] == plan().rejected
    assert found["nearest"] is None


def test_the_document_of_what_does_not_fit() -> None:
    found = as_json(hopeless())
    assert found["best"] is None
    assert found["candidates"] == []
    assert found["nearest"]["prediction"]["fits"] is False
    assert not any(one["fits"] for one in found["nearest"]["advice"])
