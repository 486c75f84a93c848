"""What the backward pass computes again of each layer: the one mode of a layout, or the runs of layers in its cut."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, cast, get_args

from phalanx.config.layout import Layout, Recompute
from phalanx.errors import JobError
from phalanx.nearest import nearest

Mode = Recompute
MODES: tuple[Mode, ...] = get_args(Mode)


class RecomputeRun(NamedTuple):
    """Layers one after the other that do the same."""

    layers: int
    mode: Mode

    def __str__(self) -> str:
        return f"{self.layers}*{self.mode}"


def parse(text: str) -> tuple[RecomputeRun, ...]:
    """The runs of `layout.recompute_cut`, "8*full+4*selective+20*none". Raises JobError where it is something else."""
    runs = []
    for part in text.replace(" ", "").split("+"):
        written = re.fullmatch(r"([0-9]{1,9})\*([a-z]+)", part)
        if not written:
            raise JobError(
                f"{text!r} is no list of runs of layers; write how many do what with a plus between them, such as "
                "8*full+4*selective+20*none"
            )
        layers, mode = int(written[1]), written[2]
        if mode not in MODES:
            meant = nearest(mode, MODES)
            hint = f"; did you mean {meant}?" if meant else ""
            raise JobError(f"{part}: {mode!r} is nothing that a layer does{hint} (known: {', '.join(MODES)})")
        if not layers:
            raise JobError(f"{part} is no layer: leave it out")
        runs.append(RecomputeRun(layers, cast(Mode, mode)))
    return tuple(runs)


@lru_cache(1024)
def modes(text: str, n_layers: int) -> tuple[Mode, ...]:
    """Of every layer, by a cut or by one mode for all (`written`). Raises JobError with the nearest legal cut where it
    is not about so many layers."""
    if text in MODES:
        return (text,) * n_layers
    runs = parse(text)
    total = sum(run.layers for run in runs)
    if total != n_layers:
        raise JobError(f"{text} = {total} layers, the model has {n_layers}; nearest legal: {_fitted(runs, n_layers)}")
    return tuple(run.mode for run in runs for _ in range(run.layers))


def written(layout: Layout) -> str:
    """What a layout says of its layers: the cut where there is one."""
    return layout.recompute_cut or layout.recompute


def recompute_of(layout: Layout, layer: int, n_layers: int) -> Mode:
    """What one layer of so many does. Raises JobError where the cut does not fit them."""
    return modes(written(layout), n_layers)[layer]


def alike(layout: Layout, mode: Mode) -> Layout:
    """The layout with all layers doing the same."""
    return replace(layout, recompute=mode, recompute_cut="") if layout.recompute_cut else layout


def _fitted(runs: tuple[RecomputeRun, ...], n_layers: int) -> str:
    """The runs with the last of them longer, or with the last ones shorter or gone, so that they are so many layers."""
    left, found = n_layers, list[RecomputeRun]()
    for run in runs:
        if left:
            found.append(RecomputeRun(min(run.layers, left), run.mode))
            left -= found[-1].layers
    found[-1] = RecomputeRun(found[-1].layers + left, found[-1].mode)
    return "+".join(map(str, found))
