"""The process of one tracker: follows metrics.jsonl until the run ends. `python -m phalanx.trackers.follower`.

It is a process, not a thread: whatever the tracker's library does (import for seconds, hold the interpreter, wait for a
network, crash) costs training no step. It reads what is in the file already, so that no queue of rows can fill.

Standard input has two lines of JSON: the run, and, when it ends, {"status": …}. If it closes before, the run was
killed. Standard output gets one line: what was sent, or why the tracker was dropped. Everything else that is printed
goes to standard error, a log in the run directory, without secrets.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from phalanx.bounded import read_json
from phalanx.check.load import from_dict
from phalanx.config.trackers import TRACKERS
from phalanx.data.files import locked, write_atomic
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import PhalanxError
from phalanx.pictures import layout as layout_picture
from phalanx.trackers.tracker import ReadPosition, TrackedRun, Tracker, place_of, read_rows, send

# Keeps secrets out of what trackers print: keys in the environment, and passwords in URLs.
_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 6  # characters of a value that is masked: shorter ones are words such as "on"
_USER = re.compile(r"://[^/@\s]*@")


class Redactor:
    """Masks the values of variables whose names say that they are secret, and the user before a URL's host."""

    def __init__(self, environment: Mapping[str, str]):
        found = {value for name, value in environment.items() if _NAME.search(name) and len(value) >= _SHORTEST}
        self._secrets = sorted(found, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Returns the text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return _USER.sub("://…@", text)


class RedactedStream:
    """A text stream that masks secrets in each piece written to it."""

    def __init__(self, stream: TextIO, redact: Redactor):
        self._stream, self._redact = stream, redact
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        self._stream.write(self._redact(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()


POLL_S = 1.0
"""Seconds between two looks at the file."""
PICTURES = ("*.svg", "*.html", "traces/*.svg")
"""The run's own pictures and pages."""
NICENESS = 5
"""Added to the trainer's, so that a tracker takes only what training leaves of the cores."""


class RunEnd:
    """How the run ended, as soon as it did."""

    def __init__(self) -> None:
        self.status = "killed"
        self.known = threading.Event()

    def listen(self, patience_s: float) -> None:
        """Waits for the line that says how the run ended, or for the end of the trainer. From then on this process has
        `patience_s` seconds, until the kernel ends it: a tracker that hangs must not outlive its run."""
        with suppress(ValueError):
            self.status = json.loads(sys.stdin.readline())["status"]
        signal.setitimer(signal.ITIMER_REAL, patience_s)
        self.known.set()


def main() -> None:
    """Follows the run that standard input names."""
    redact = Redactor(os.environ)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer, whoever prints it
    sys.stdout = sys.stderr = RedactedStream(sys.stderr, redact)
    os.nice(NICENESS)
    message = json.loads(sys.stdin.readline())
    end = RunEnd()
    threading.Thread(target=end.listen, args=(message["patience_s"],), daemon=True).start()
    try:
        step = _follow(message, end)
        answer = {"step": step}
    except Exception as error:
        import traceback

        traceback.print_exc()
        what = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
        answer = {"failed": redact(what)}
    with suppress(BrokenPipeError):  # the trainer was killed
        echo(json.dumps(answer), file=answers, flush=True)
    sys.stderr.flush()
    os._exit("failed" in answer)  # without what libraries do at exit, which may wait


def _follow(message: dict[str, Any], end: RunEnd) -> int | None:
    """Opens the tracker and sends rows until the run has ended. Returns the last step sent."""
    directory, name = Path(message["directory"]), message["tracker"]
    kept = place_of(directory, name)
    folder = kept.parent
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", lambda pid: echo(f"waiting for process {pid}, of the attempt before", flush=True)):
        place = ReadPosition.read(kept)
        facts = _or_nothing(lambda: read_json(directory / "env.json"))
        run = TrackedRun(
            message["name"], directory, folder, message["job"], message["layout"], facts or {}, place.step, place.notes
        )
        tracker: Tracker = TRACKERS.code(name, "open")(run)
        place.write(kept)  # its notes: even an attempt without a row must be found again
        for file in ("config.yaml", "env.json"):
            if (directory / file).is_file():
                tracker.file(directory / file)
        _send_all(tracker, message, kept, place, end)
        for picture in sorted(each for pattern in PICTURES for each in directory.glob(pattern)):
            tracker.file(picture)
        tracker.close(end.status)
    return place.step


def _send_all(tracker: Tracker, message: dict[str, Any], kept: Path, place: ReadPosition, end: RunEnd) -> None:
    """Sends rows as they come, and returns when the run has ended and all are sent."""
    directory, is_drawn = Path(message["directory"]), False
    while True:
        ended = end.known.is_set()  # before the file is read: then everything is in it
        if rows := read_rows(directory / "metrics.jsonl", place):
            if not is_drawn and (picture := _or_nothing(lambda: _layout(message, directory / "trackers"))):
                tracker.file(picture)
            is_drawn = True
            send(tracker, rows, place)
            tracker.flush()
            place.write(kept)
        elif ended:
            return
        else:
            end.known.wait(POLL_S)


def _layout(message: dict[str, Any], folder: Path) -> Path:
    """Draws the layout: what each rank holds, as predicted. The data is prepared when the first row is written."""
    job = from_dict(message["job"], "the run")
    path = folder / "layout.svg"
    write_atomic(path, layout_picture.svg(job, vocabulary_size(job)).encode())
    return path


def _or_nothing(make: Callable[[], Any]) -> Any:
    """Returns what `make` returns; None if the run lacks what it needs."""
    with suppress(OSError, ValueError, PhalanxError):
        return make()
    return None


if __name__ == "__main__":
    main()
