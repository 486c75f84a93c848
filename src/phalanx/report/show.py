"""Shows the live view on a terminal, renewed in place; other lines scroll above it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from phalanx.report.live import LiveView
from phalanx.report.screen import lines

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
