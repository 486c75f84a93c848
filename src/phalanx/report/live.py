"""The live view of a run at one moment, read from the files of its directory: `phalanx train` shows it on a
terminal, `phalanx watch` anywhere."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from phalanx.config.job import Job
from phalanx.echo import visible
from phalanx.report.ranks import NodeStates, RankState, read_nodes
from phalanx.report.run import Metrics, RunRecord, is_alive, middle, number, numbers, read_job, require_run
from phalanx.units import gib
from phalanx.units import seconds as as_time

RECENT = 20
"""Newest steps whose median is shown."""
CURVE = 400
"""Newest losses of the curve."""
_WARNINGS = 3


@dataclass(frozen=True)
class LiveView:
    """One moment of a run. Figures are None where there are none."""

    name: str
    layout: str
    state: str
    step: int
    steps: int | None
    left_s: float | None
    """Seconds to the last step, at the pace of the newest ones with their validations and checkpoints."""
    loss: float | None = None
    losses: tuple[float, ...] = ()
    val_loss: float | None = None
    val_step: int = 0
    grad_norm: float | None = None
    lr: float | None = None
    tps: float | None = None
    tps_total: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    step_time_s: float | None = None
    silent_s: float | None = None
    """Seconds since the newest step was done."""
    ranks: tuple[RankState, ...] = ()
    checkpoint: int | None = None
    """The step of the newest checkpoint."""
    checkpoint_age_s: float | None = None
    checkpoint_s: float | None = None
    """Seconds that it took."""
    warnings: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """Returns the view as plain values, for JSON."""
        return asdict(self)


class RunFollower:
    """Reads on in the files of a run. Raises DataError if a folder is no run's directory."""

    def __init__(self, path: Path, job: Job | None = None):
        require_run(path)
        self.record = RunRecord(path, Metrics())
        self._job = job
        if job is None:
            read_job(self.record)
            self._job = self.record.loaded.job if self.record.loaded else None
        self.nodes = NodeStates()

    def view(self) -> LiveView:
        """Returns the run as its files show it now."""
        record, path = self.record, self.record.path
        with suppress(OSError):
            record.metrics.read(path / "metrics.jsonl")
        record.alive = is_alive(path)
        self.nodes = read_nodes(path / "logs")
        metrics, now = record.metrics, time.time()
        job = self._job
        validation, saved = metrics.last("validation") or {}, metrics.last("checkpoint") or {}
        start = metrics.last("start") or {}
        total = job.train.steps if job else None
        state = record.state
        running = state == "running"
        recent = {name: middle(metrics.values(name, RECENT)) for name in ("tps", "tps_total", "tflops", "mfu")}
        newest = {name: next(iter(metrics.values(name, 1)), None) for name in ("loss", "grad_norm", "lr")}
        return LiveView(
            name=record.name,
            layout=str(start.get("layout", "")) or (job.layout.line() if job else ""),
            state=state,
            step=metrics.last_step,
            steps=total,
            left_s=self._left(total) if running else None,
            losses=tuple(metrics.values("loss", CURVE)),
            val_loss=number(validation.get("val_loss")),
            val_step=validation.get("step", 0),
            step_time_s=middle(metrics.values("step_time_s", RECENT)),
            silent_s=max(0.0, now - metrics.times[-1]) if metrics.times and running else None,
            ranks=self._ranks(running),
            checkpoint=saved.get("step") if saved else _latest(path),
            checkpoint_age_s=max(0.0, now - saved["time"]) if saved else None,
            checkpoint_s=number(saved.get("seconds")),
            warnings=tuple(self._warnings())[-_WARNINGS:],
            **recent,
            **newest,
        )

    def _left(self, total: int | None) -> float | None:
        metrics = self.record.metrics
        start = metrics.last("start") or {}
        first = bisect_right(metrics.steps, start.get("step", 0))
        times = metrics.times[max(first, len(metrics.times) - 200) :]
        if total is None or len(times) < 2:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        return max(0.0, (total - metrics.last_step) * pace - (time.time() - times[-1]))

    def _ranks(self, running: bool) -> tuple[RankState, ...]:
        """Returns the ranks of the nodes' files; of a run of one process, which has none, what metrics.jsonl says."""
        metrics = self.record.metrics
        if self.nodes.ranks or not metrics.steps:
            return self.nodes.ranks
        memory = next(iter(metrics.values("memory", 1)), 0.0)
        silent = max(0.0, time.time() - metrics.times[-1]) if running else 0.0
        return (RankState(0, "training" if running else "ended", metrics.last_step, silent, int(memory)),)

    def _warnings(self) -> Iterator[str]:
        found = list(self.nodes.messages)
        for row in self.record.metrics.events:
            if row["event"] == "guard":
                found.append((row["time"], f"step {row['step']}: guard: {row.get('text')}"))
            elif row["event"] == "restart":
                found.append((row["time"], f"restarted at step {row['step']}: {row.get('reason')}"))
            elif row["event"] == "replicas" and row.get("lost"):
                found.append((row["time"], f"replica {numbers(row['lost'])} was lost in step {row['step'] + 1}"))
            elif row["event"] == "end" and row.get("status") == "failed":
                found.append((row["time"], f"step {row['step']}: failed: {row.get('reason')}"))
        yield from (text for _, text in sorted(found))
        for rank in self.nodes.ranks:
            if self.record.alive and rank.is_silent:
                yield f"rank {rank.rank} ({rank.host}) has been silent for {rank.silent_s:.0f} s in {rank.phase}"


def _latest(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((path / "latest").read_text(encoding="ascii")[:64].strip().rpartition("step-")[2])
    return None


# The live view as lines of a terminal. Figures are never cut: what does not fit is a bar, a name or a sentence.
NARROWEST = 40
"""Columns below which nothing is made narrower."""
_SPARKS, _ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_IN_ASCII = str.maketrans("…–", "~-")
_SOFT, _STRONG, _WARNING, _BAD = "dim", "bold", "yellow", "red"
_STATES = {"failed": _BAD, "interrupted": _BAD, "stopped": _WARNING, "finished": "green"}
_LABEL = 12  # columns
_MOST_RANKS = 16
_FULL = 0.92
"""Share of the memory from which a bar is a warning."""


def lines(view: LiveView, width: int, *, height: int = 40, unicode: bool = True) -> list[Text]:
    """Returns the screen for a terminal of `width` × `height`."""
    width = max(NARROWEST, width)
    rows = max(2, min(_MOST_RANKS, height - 13))
    bars = Bars(unicode)
    above = [*_head(view, width), *_progress(view, width, bars), *_figures(view, width, bars)]
    found = [*above, *_ranks(view, width, rows, bars), *_end(view, width)]
    if not unicode:
        for line in found:
            line.plain = line.plain.translate(_IN_ASCII)
    return found


class Bars:
    """Bars and curves of characters, for terminals with and without Unicode."""

    def __init__(self, unicode: bool):
        self.full, self.rest = ("━", "─") if unicode else ("#", "-")
        self.sparks = _SPARKS if unicode else _ASCII_SPARKS
        self.gap = " · " if unicode else " | "

    def bar(self, share: float, width: int, style: str = "cyan") -> Text:
        """Returns a bar of which `share` is full."""
        done = round(min(1.0, max(0.0, share)) * width)
        return Text.assemble((self.full * done, style), (self.rest * (width - done), _SOFT))

    def spark(self, values: Sequence[float], width: int) -> str:
        """Returns a curve of at most `width` characters."""
        if not values:
            return ""
        each = max(1, -(-len(values) // width))
        means = [sum(values[at : at + each]) / len(values[at : at + each]) for at in range(0, len(values), each)]
        low, high = min(means), max(means)
        span = high - low or 1.0
        return "".join(self.sparks[int((mean - low) / span * (len(self.sparks) - 1))] for mean in means)


def _head(view: LiveView, width: int) -> Iterator[Text]:
    state = view.state
    room = width - len(state) - 1
    name = fitted(f"{view.name}  {view.layout}", room)
    line = Text.assemble((name[: len(view.name)], _STRONG), (name[len(view.name) :], _SOFT))
    line.append(" " * (room - len(name) + 1))
    line.append(state, _STATES.get(state, "cyan"))
    yield line


def _progress(view: LiveView, width: int, bars: Bars) -> Iterator[Text]:
    if not view.steps:
        yield Text(f"step {view.step:,}")
        return
    share = view.step / view.steps
    words = f" step {view.step:,} of {view.steps:,}  {share:.0%}"
    if view.left_s is not None:
        words += f"  {as_time(view.left_s)} left"
    bar = bars.bar(share, max(4, width - len(words)))
    yield bar.append(words)
    yield Text("")


def _figures(view: LiveView, width: int, bars: Bars) -> Iterator[Text]:
    loss = Text.assemble((f"{'loss':<{_LABEL}}", _SOFT), (_shown(view.loss, "{:.4f}"), _STRONG))
    tail = Text()
    if view.val_loss is not None:
        tail = Text.assemble(("val_loss ", _SOFT), f"{view.val_loss:.4f}", (f" (step {view.val_step:,})", _SOFT))
    room = width - loss.cell_len - tail.cell_len - 4
    curve = bars.spark(view.losses, room) if room >= 8 else ""
    loss.append(f"  {curve}", "cyan")
    yield loss.append("  ").append_text(tail) if room >= 0 else loss
    if room < 0:
        yield tail
    yield from _pairs(width, ("grad_norm", _shown(view.grad_norm, "{:.2f}")), ("lr", _shown(view.lr, "{:.1e}")))
    yield from _pairs(width, ("tps", _shown(view.tps, "{:,.0f}")), ("tps_total", _shown(view.tps_total, "{:,.0f}")))
    step = "–" if view.step_time_s is None else as_time(view.step_time_s)
    tflops = _shown(view.tflops, "{:.3g}")
    yield from _pairs(width, ("mfu", _shown(view.mfu, "{:.1%}")), ("tflops", tflops), ("step", step))


def _pairs(width: int, *pairs: tuple[str, str]) -> Iterator[Text]:
    """Yields names with values in columns; what does not fit comes on the next line."""
    line = Text()
    for name, value in pairs:
        cell = Text.assemble((f"{name:<{_LABEL}}", _SOFT), f"{value:<12}")
        if line.cell_len and line.cell_len + _LABEL + len(value) > width:
            yield line
            line = Text()
        line.append_text(cell)
    line.rstrip()
    yield line


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _ranks(view: LiveView, width: int, rows: int, bars: Bars) -> Iterator[Text]:
    """Yields the ranks: all, or those that are silent or fullest, and the others in a line."""
    if not view.ranks:
        return
    yield Text("")
    shown = _chosen(view.ranks, rows)
    places = max(4, len(str(shown[-1].rank)))
    phase_width = max(5, *(len(fitted(rank.phase, 18)) for rank in shown))
    yield Text(f"{'rank':>{places}}  {'phase':<{phase_width}}  {'step':>8}  memory", _SOFT)
    for rank in shown:
        yield _rank(rank, width, places, phase_width, bars)
    rest = Counter(rank.phase for rank in view.ranks) - Counter(rank.phase for rank in shown)
    if rest:
        words = ", ".join(f"{count:,} {fitted(phase, 18)}" for phase, count in rest.most_common())
        yield Text(fitted(f"{'':>{places}}  and {sum(rest.values()):,} more: {words}", width), _SOFT)


def _chosen(ranks: Sequence[RankState], rows: int) -> list[RankState]:
    if len(ranks) <= rows:
        return list(ranks)
    loud = sorted(ranks, key=lambda rank: (-(rank.is_silent * rank.silent_s) // 5, -rank.memory, rank.rank))
    return sorted(loud[: rows - 1], key=lambda rank: rank.rank)


def _rank(rank: RankState, width: int, places: int, phase_width: int, bars: Bars) -> Text:
    line = Text(f"{rank.rank:>{places}}  ")
    line.append(f"{fitted(rank.phase, phase_width):<{phase_width}}", _WARNING if rank.is_silent else "")
    line.append(f"  {rank.step:>8,}  ")
    words = gib(rank.memory) if rank.memory else "–"
    tail = f"  silent {rank.silent_s:.0f}s" if rank.is_silent else ""
    limit = f" of {gib(rank.memory_limit)}" if rank.memory and rank.memory_limit else ""
    words += limit * (line.cell_len + len(words + limit + tail) <= width) + tail
    room = min(30, width - line.cell_len - len(words) - 1)
    if rank.memory and rank.memory_limit and room >= 5:
        share = rank.memory / rank.memory_limit
        line.append_text(bars.bar(share, room, _WARNING if share > _FULL else "green")).append(" ")
    return line.append(words)


def _end(view: LiveView, width: int) -> Iterator[Text]:
    yield Text("")
    if view.checkpoint is None:
        words = "none yet"
    else:
        words = f"step {view.checkpoint:,}"
        if view.checkpoint_age_s is not None:
            words += f", {as_time(view.checkpoint_age_s)} ago"
        if view.checkpoint_s is not None:
            words += f" (took {as_time(view.checkpoint_s)})"
    yield Text.assemble((f"{'checkpoint':<{_LABEL}}", _SOFT), words)
    for warning in view.warnings:
        yield Text(fitted(f"{'warning':<{_LABEL}}{warning}", width), _WARNING)


def fitted(words: str, width: int) -> str:
    """Returns words in one line of at most `width` columns, with control characters visible."""
    words = visible(words.replace("\n", " ").replace("\t", " "))
    return words if len(words) <= width else f"{words[: max(0, width - 1)]}…"


_LAST_FRAME_S = 2.0  # a disk that does not answer must not hold up the end of a run


class Screen:
    """A terminal that can show the view."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)

    @property
    def is_possible(self) -> bool:
        """True on a terminal that can move its cursor."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def print(self, view: LiveView) -> None:
        """Prints the view once."""
        for line in lines(view, self.console.width, unicode=is_unicode(self.console)):
            self.console.print(line, no_wrap=True, overflow="ignore", crop=False)

    @contextmanager
    def live(
        self, view: Callable[[], LiveView], every_s: float = 0.5, *, transient: bool = False
    ) -> Iterator[Callable[[], LiveView]]:
        """Shows what `view` returns, again and again, until the `with` block ends; what is `transient` disappears then.
        Provides a function that returns what is shown. A thread reads and draws; printing on `console` goes on."""
        frame, ended = _Frame(view()), threading.Event()

        def renew() -> None:
            while not ended.wait(every_s):
                try:
                    frame.shown = view()
                    live.refresh()
                except Exception as error:  # what only shows a run must never end it
                    self.console.print(f"the live view ends: {type(error).__name__}: {error}", markup=False)
                    return

        with Live(frame, console=self.console, auto_refresh=False, transient=transient) as live:
            thread = threading.Thread(target=renew, name="phalanx-live", daemon=True)
            thread.start()
            try:
                yield lambda: frame.shown
            finally:
                ended.set()
                thread.join(_LAST_FRAME_S)


class _Frame:
    """Draws the view that was read last. Drawing reads no file, since it may hold the console's lock."""

    def __init__(self, shown: LiveView):
        self.shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = lines(self.shown, options.max_width, height=console.height, unicode=is_unicode(console))
        for line in found[: console.height - 1]:
            line.no_wrap, line.overflow = True, "crop"
            yield line


def is_unicode(console: Console) -> bool:
    """Returns whether the terminal shows more than ASCII."""
    return console.encoding.lower().startswith("utf")
