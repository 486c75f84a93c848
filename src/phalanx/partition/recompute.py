"""Recomputation per layer: the one mode of a layout, or the runs of layers in its recompute_cut."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, cast, get_args

from phalanx.config.layout import Layout, Recompute
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

Mode = Recompute
MODES: tuple[Mode, ...] = get_args(Mode)


class RecomputeRun(NamedTuple):
    """Consecutive layers with the same recomputation."""

    layers: int
    mode: Mode

    def __str__(self) -> str:
        return f"{self.layers}*{self.mode}"


def parse(text: str) -> tuple[RecomputeRun, ...]:
    """Parses `layout.recompute_cut` such as "8*full+4*selective+20*none". Raises JobError for any other form."""
    runs = []
    for part in text.replace(" ", "").split("+"):
        written = re.fullmatch(r"([0-9]{1,9})\*([a-z]+)", part)
        if not written:
            raise JobError(
                f"{text!r} is not a list of runs of layers; write counts and modes joined by plus signs, such as "
                "8*full+4*selective+20*none"
            )
        layers, mode = int(written[1]), written[2]
        if mode not in MODES:
            raise JobError(
                f"{part}: {mode!r} is not a recomputation mode{did_you_mean(mode, MODES)} (known: {', '.join(MODES)})"
            )
        if not layers:
            raise JobError(f"{part} has no layers: remove it")
        runs.append(RecomputeRun(layers, cast(Mode, mode)))
    return tuple(runs)


@lru_cache(1024)
def modes(text: str, n_layers: int) -> tuple[Mode, ...]:
    """Returns the mode of every layer, from a cut or from one mode for all (`written`). Raises JobError with the
    nearest legal cut if the cut has another number of layers."""
    if text in MODES:
        return (text,) * n_layers
    runs = parse(text)
    total = sum(run.layers for run in runs)
    if total != n_layers:
        raise JobError(f"{text} = {total} layers, the model has {n_layers}; nearest legal: {_fitted(runs, n_layers)}")
    return tuple(run.mode for run in runs for _ in range(run.layers))


def written(layout: Layout) -> str:
    """Returns the recomputation as the layout states it: the cut if it is set, else the mode."""
    return layout.recompute_cut or layout.recompute


def recompute_of(layout: Layout, layer: int, n_layers: int) -> Mode:
    """Returns the mode of one layer. Raises JobError if the cut does not match the number of layers."""
    return modes(written(layout), n_layers)[layer]


def uniform_recompute(layout: Layout, mode: Mode) -> Layout:
    """Returns the layout with one recomputation mode in all layers."""
    return replace(layout, recompute=mode, recompute_cut="") if layout.recompute_cut else layout


def _fitted(runs: tuple[RecomputeRun, ...], n_layers: int) -> str:
    """Returns the runs as text, the last ones lengthened, shortened or removed so that they have `n_layers` layers."""
    left, found = n_layers, list[RecomputeRun]()
    for run in runs:
        if left:
            found.append(RecomputeRun(min(run.layers, left), run.mode))
            left -= found[-1].layers
    found[-1] = RecomputeRun(found[-1].layers + left, found[-1].mode)
    return "+".join(map(str, found))
