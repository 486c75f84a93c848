"""The pipeline of a table's row: its schedule by the names of the papers, and the layers of each stage."""

from __future__ import annotations

import re
from dataclasses import replace

from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.schedule import catalogue
from phalanx.validation.row_cells import Cells

MLPERF_CHUNKS = {96: 6, 126: 8}
"""Stages per rank of MLPerf's large models, GPT-3 and Llama 3.1 405B, by their number of layers."""


def scheduled(cells: Cells, model: ModelConfig, framework: str, layout: Layout) -> Layout:
    """Returns the schedule and, if the framework distributes layers evenly, the cut."""
    if layout.pp == 1:
        return layout
    chunks = _chunks(cells, model, layout)
    name = _name(cells, chunks)
    if not name:
        return layout
    entry = catalogue.SCHEDULES[name]
    least, most = entry.chunks
    if entry.interleaves and chunks < least:
        chunks = min(4 if "2407.21783" in cells.description else 2, model.n_layers // layout.pp)
        cells.assume(f"vpp blank: {chunks}")
    chunks = min(max(chunks, least), most)
    totals = _totals(model.n_layers, layout.pp, framework)
    if entry.interleaves:
        if chunks > min(totals):
            cells.assume(f"vpp {chunks} with stages without layers: {min(totals)}")
        chunks = min(chunks, *totals)
        name = name if chunks > 1 else entry.interleaves
    if entry.placement != "round robin":
        return replace(layout, schedule=name, pp_chunks=chunks if most > 1 else 0)
    cut = "+".join(map(str, _cut(totals, chunks)))
    return replace(layout, schedule=name, pp_chunks=chunks if chunks > 1 else 0, pp_cut=cut)


def _name(cells: Cells, chunks: int) -> str:
    """Returns the schedule's name; empty with a recorded problem if it is unknown."""
    text = re.sub(r"\(.*\)", "", cells.text("schedule").lower()).strip()
    text = text or Layout.schedule
    plain = re.sub("[^a-z0-9_]", "", text)
    found = text if text in catalogue.SCHEDULES else catalogue.likely(plain)
    if found is None:  # as in "modified interleaved 1F1B"
        within = [name for name in catalogue.SCHEDULES if name.replace("_", "") in plain]
        found = max(within, key=len, default=None)
    if found is None:
        cells.problem(f"schedule: {text!r} is unknown; known: {', '.join(catalogue.SCHEDULES)}")
        return ""
    forms = (name for name, entry in catalogue.SCHEDULES.items() if entry.interleaves == found)
    return next(forms, found) if chunks > 1 else found


def _chunks(cells: Cells, model: ModelConfig, layout: Layout) -> int:
    text = cells.text("vpp").lower()
    if text.startswith("max"):
        return max(1, -(-model.n_layers // layout.pp))
    if not text and re.search("(vpp|layouts?) not given", cells.description) and (fits := _fitting(model, layout)):
        cells.assume(f"vpp blank: {fits}, for a bubble of at most 5 %")
        return fits
    if not text and "mlperf" in cells.description and (chunks := MLPERF_CHUNKS.get(model.n_layers, 0)):
        cells.assume(f"vpp blank: {chunks}")
        return chunks
    return cells.whole("vpp", 1)


def _fitting(model: ModelConfig, layout: Layout) -> int:
    """Returns the fewest chunks of whole layers with which the bubble is at most 5 %; 0 if there are none."""
    each = model.n_layers // layout.pp
    legal = [n for n in range(1, each + 1) if model.n_layers % layout.pp == 0 and each % n == 0]
    return next((n for n in legal if (layout.pp - 1) <= 0.05 * layout.accumulation * n), max(legal, default=0))


def _totals(layers: int, pp: int, framework: str) -> list[int]:
    """Returns the layers of each rank: equal parts; one less on the first and the last rank if the embedding and the
    head count as a layer each; else DeepSpeed's, whose last rank gets the rest."""
    if layers % pp == 0:
        return [layers // pp] * pp
    if (layers + 2) % pp == 0 and layers + 2 > pp:
        each = (layers + 2) // pp
        return [each - 1, *[each] * (pp - 2), each - 1]
    each = -(-layers // pp)
    left = layers - each * (pp - 1)
    if framework == "megatron-deepspeed" and left > 0:
        return [*[each] * (pp - 1), left]
    return [(layers + pp - 1 - rank) // pp for rank in range(pp)]


def _cut(totals: list[int], chunks: int) -> list[int]:
    """Returns the layers of every stage, chunk after chunk. A remainder goes to a rank's later chunks, which have fewer
    micro-batches in flight; the last rank's last chunk, beside the head, has the fewest."""
    sizes = list[int]()
    for chunk in range(chunks):
        for rank, total in enumerate(totals):
            place = chunk if rank == len(totals) - 1 else chunks - 1 - chunk
            sizes.append(total // chunks + (place < total % chunks))
    return sizes
