"""The Python side of a profile, sampled by pyinstrument (the extra `profile`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from phalanx.errors import JobError
from phalanx.train.profile import tracing

INTERVAL_S = 0.001
"""Seconds between samples."""


def require() -> None:
    """Raises JobError without pyinstrument."""
    if importlib.util.find_spec("pyinstrument") is None:
        raise JobError(
            "train.profile.python needs pyinstrument: pip install 'phalanx[profile]', or set train.profile.python=false"
        )


class Samples:
    """Samples the stack of the thread that starts it."""

    def __init__(self) -> None:
        from pyinstrument import Profiler

        self.profiler: Any = Profiler(interval=INTERVAL_S, async_mode="disabled")

    def start(self) -> None:
        self.profiler.start()

    def stop(self) -> None:
        if self.profiler.is_running:
            self.profiler.stop()

    def write(self, traces: Path, rank: int) -> list[str]:
        """Writes the call tree as text and HTML. Returns the files' names. Raises OSError and RunError."""
        text = self.profiler.output_text(unicode=True, color=False, show_all=False)
        names = {f"python-rank_{rank}.txt": text, f"python-rank_{rank}.html": self.profiler.output_html()}
        for name, content in names.items():
            tracing.write(traces / name, content.encode())
        return list(names)
