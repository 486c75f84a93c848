"""Pictures of a prediction: time of a step by part, memory of each pipeline rank by part, and the roofline of a block
(`phalanx predict JOB --svg FILE`). There is no background, and colours have middle lightness, for light and dark
pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from phalanx.cost.breakdown import subject
from phalanx.cost.prediction import Prediction
from phalanx.cost.spec import StepSpec
from phalanx.pictures import prediction_memory
from phalanx.pictures import roofline as roofline_picture
from phalanx.pictures.elements import COLOURS, NEUTRAL, box, document, fill_of, heading, text
from phalanx.pictures.roofline import seconds

_WIDTH, _MARGIN, _LINE = 1080, 24, 17  # pixels
_TIME, _TIME_WIDTH = 164, 236  # pixels: left edge of the bars of time, and width up to the interval's end

_TIME_COLOURS = {"memory-bound": COLOURS[2], "recompute": COLOURS[4], "host": COLOURS[7], "optimizer": COLOURS[3]}
_EXPOSED = COLOURS[1]
_SHOWN = 5e-4  # smallest share of the step that is drawn: a smaller one would be 0.0 %


def svg(spec: StepSpec, prediction: Prediction) -> str:
    """Draws time by part, memory by part and pipeline rank, and the roofline of a block, as an SVG document."""
    title = subject(spec, spec.layout.world)
    caption = list(_caption(spec, prediction))
    top = 40 + _LINE * len(caption) + 34
    time, lower = _time(prediction, top)
    memory, bottom = prediction_memory.panel(prediction, top)
    bottom = max(lower, bottom)
    block, height = roofline_picture.draw(spec, bottom + 36)
    parts = [
        heading(_MARGIN, 26, title),
        *(text(_MARGIN, 48 + _LINE * number, line) for number, line in enumerate(caption)),
        *_group("time", time),
        *_group("memory", memory),
        *_group("roofline", block),
    ]
    return document(title, _WIDTH, height, parts)


def _caption(spec: StepSpec, prediction: Prediction) -> Iterator[str]:
    yield from textwrap.wrap(spec.layout.line().replace(",", ", "), 140, break_on_hyphens=False)
    yield (
        f"{spec.batch.equation()}; tps {prediction.tokens_per_s_per_device:,.0f}, tps_total "
        f"{prediction.tokens_per_s:,.0f}, {prediction.tflops_per_device:,.1f} TFLOP/s per device"
    )
    yield f"MFU {prediction.mfu:.1%}, HFU {prediction.hfu:.1%}, bubble {prediction.bubble:.1%} of the rest of the step"


def _time(prediction: Prediction, top: float) -> tuple[list[str], float]:
    """Returns one row per part, each starting where the last one ends, the whole with its interval; the lower end."""
    step, (low, high) = prediction.step_time_s, prediction.spread
    scale = _TIME_WIDTH / (step * max(1.0, high))
    drawn = [text(_MARGIN, top - 6, f"Time of a step: {seconds(step)}", "font-weight='600'")]
    y, x = top + 14.0, float(_TIME)
    for name, spent in prediction.parts.items():
        if spent >= _SHOWN * step:
            shown, width = f"{seconds(spent)}, {spent / step:.1%}", spent * scale
            drawn.append(text(_TIME - 8, y + 12, name, "text-anchor='end'"))
            drawn.append(box(x, y, max(1.0, width), 14, time_fill(name), f"{name}: {shown}"))
            drawn.append(text(x + width + 8, y + 12, shown, "font-size='11'"))
            y += 21
        x += spent * scale
    ends = [_TIME + factor * step * scale for factor in (low, high)]
    drawn.append(text(_TIME - 8, y + 12, "step", "text-anchor='end' font-weight='600'"))
    drawn.append(box(_TIME, y, step * scale, 14, f"fill='{NEUTRAL}' fill-opacity='.4'", f"step: {seconds(step)}"))
    whisker = f"M{ends[0]:.1f},{y + 3:.1f} v8 m0,-4 H{ends[1]:.1f} m0,-4 v8"
    drawn.append(f"<path class='interval' d='{whisker}' fill='none' stroke='{NEUTRAL}' stroke-width='1.5'/>")
    drawn.append(text(ends[1] + 8, y + 12, f"{seconds(low * step)} to {seconds(high * step)}", "font-size='11'"))
    y += 38
    words = (
        "Exposed: communication that nothing hides. The line, and the range of memory: between them lie eight of ten "
    )
    for line in textwrap.wrap(words + "published steps, measured relative to predicted.", 74):
        drawn.append(text(_MARGIN, y, line, "font-size='11'"))
        y += 15
    return drawn, y


def time_fill(name: str) -> str:
    """Returns the colour of a part of a step's time, as attributes."""
    if name == "bubble":
        return fill_of(NEUTRAL, pale=True)
    return fill_of(_EXPOSED if name.endswith("exposed") else _TIME_COLOURS.get(name, COLOURS[0]))


def _group(name: str, parts: Iterable[str]) -> Iterator[str]:
    yield f"<g class='{name}'>"
    yield from parts
    yield "</g>"
