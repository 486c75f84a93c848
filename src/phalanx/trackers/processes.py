"""The trainer's side of trackers: starts their processes, and never waits for them but at the end, within a limit."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any

from phalanx.check.load import as_dict
from phalanx.config.job import Job
from phalanx.echo import shortened
from phalanx.errors import RunError, StoppedError
from phalanx.trackers.tracker import BATCH_BYTES, ReadPosition, Row, flat, read_rows

STOPPED_S = 3.0
"""Most seconds that a run waits for its trackers after a signal: its time is short then."""
ORPHAN_S = 30.0
"""Seconds that a tracker goes on after the trainer has gone without a word, beyond those of the job."""
_LAST_LINES = 2000  # characters of a message about a tracker


class Trackers:
    """The trackers of a run, on rank 0. A context manager around the run, whose end it tells them.

    Each is a process (follower.py) that reads metrics.jsonl. A tracker that fails, now or later, is reported once, and
    the run goes on."""

    def __init__(self, job: Job, directory: Path, logs: Path | None, report: Callable[[str], None]):
        """`logs` is the folder of this rank's logs, if it has one; `report` takes the warnings."""
        self.job, self.directory, self.logs, self.report = job, directory, logs, report
        self.followers: list[Follower] = []

    def __enter__(self) -> Trackers:
        self.followers = [
            Follower(name, self.message(name), self.logs and self.logs / f"tracker_{name}.log", self.report)
            for name in self.job.run.trackers
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        stopped = isinstance(error, StoppedError)
        status = "stopped" if stopped else "failed" if error else "finished"
        self.end(status, min(STOPPED_S, self.job.run.trackers_wait_s) if stopped else self.job.run.trackers_wait_s)

    def message(self, name: str) -> dict[str, Any]:
        """Returns the first message to a tracker's process: which tracker it is, and the run."""
        job = self.job
        return {
            "tracker": name,
            "name": job.run.name,
            "directory": str(self.directory.absolute()),
            "job": as_dict(job),
            "layout": job.layout.line(),
            "patience_s": job.run.trackers_wait_s + ORPHAN_S,
        }

    def end(self, status: str, wait_s: float) -> None:
        """Tells all trackers how the run ended, waits until they have sent everything, at most `wait_s` seconds, and
        ends those that have not."""
        deadline = time.monotonic() + wait_s
        for follower in self.followers:
            follower.tell({"status": status})
        for follower in self.followers:
            follower.finish(max(0.0, deadline - time.monotonic()), wait_s)


class Follower:
    """The process of one tracker, and a thread that waits for its end."""

    def __init__(self, name: str, message: Mapping[str, Any], log: Path | None, report: Callable[[str], None]):
        self.name, self.log, self.report = name, log, report
        self.answer: dict[str, Any] = {}
        self._given_up = False
        try:
            self._process = _start(log)
        except OSError as error:
            self._process = None
            self._drop(str(error.strerror or error))
            return
        self.tell(message)
        self._thread = threading.Thread(target=self._watch, name=f"phalanx-tracker-{name}", daemon=True)
        self._thread.start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a line of JSON. It never blocks: both lines together fit into a pipe."""
        if self._process and self._process.stdin:
            with suppress(OSError, ValueError):  # it has ended, or its pipe is closed: the thread reports that
                self._process.stdin.write(f"{json.dumps(message)}\n".encode())
                self._process.stdin.flush()

    def finish(self, left_s: float, wait_s: float) -> None:
        """Waits until the process has ended, at most `left_s` of the `wait_s` seconds for all, or ends it."""
        if self._process is None:
            return
        self._thread.join(left_s)
        if not self._thread.is_alive():
            return
        self._given_up = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._drop(f"it had not finished {wait_s:g} s after the run (run.trackers_wait_s) and was ended")

    def _watch(self) -> None:
        assert self._process
        assert self._process.stdout
        answer = self._process.stdout.read()
        code = self._process.wait()
        if self._given_up:
            return
        with suppress(ValueError):
            self.answer = json.loads(answer)
        if code:
            self._drop(self.answer.get("failed") or f"its process ended with code {code}")

    def _drop(self, reason: str) -> None:
        log = f" (log: {self.log})" if self.log else ""
        self.report(
            f"tracker {self.name} is dropped: {shortened(reason, _LAST_LINES)}{log}; the run goes on, and "
            "metrics.jsonl has everything"
        )


def _start(log: Path | None) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own: Ctrl-C is for the trainer, which then tells it."""
    command: Sequence[str] = [sys.executable, "-P", "-m", "phalanx.trackers.follower"]
    with open(log or os.devnull, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = {"traffic_bytes": ("axis", "collective"), "loads": ("layer",), "bytes": ("direction",), "gpu": ("gpu",)}
"""Names of what stands nested in a row, by its field or event; elsewhere it is a source of the data."""
REQUEST_S = 10.0
"""Most seconds that a client may take."""


class MetricsEndpoint:
    """The listener of a run, a context manager; `listen` begins."""

    def __init__(self, job: Job, directory: Path):
        self.run, self.metrics = job.run, directory / "metrics.jsonl"
        self.labels = {"run": job.run.name, "layout": job.layout.line()}
        self.newest: dict[str, Row] = {}
        """The last row of each event."""
        self.place = ReadPosition()
        self.lock = threading.Lock()
        self.server: _MetricsServer | None = None

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        if self.server:
            self.server.shutdown()
            self.server.server_close()

    def listen(self) -> None:
        """Begins to answer. Raises RunError if the port cannot be had."""
        host, port = self.run.metrics_host, self.run.metrics_port
        try:
            self.server = _MetricsServer(host, port, self.text)
        except OSError as error:
            reason = error.strerror or error
            raise RunError(
                f"run.metrics_port={port}: no listener on {host}: {reason}; name another port, or 0 for no endpoint"
            ) from None
        if self.metrics.is_file():  # of a long run that goes on, its newest rows
            self.place.offset = max(0, self.metrics.stat().st_size - BATCH_BYTES)
        threading.Thread(target=self.server.serve_forever, name="phalanx-metrics", daemon=True).start()

    def text(self) -> str:
        """Returns the run's newest figures."""
        with self.lock:
            while rows := read_rows(self.metrics, self.place):
                self.newest.update((row["event"], row) for row in rows)
            return exposition(self.labels, self.newest)


def exposition(labels: Mapping[str, str], newest: Mapping[str, Row]) -> str:
    """Returns the newest row of each event in Prometheus' text format; `labels` are the run's."""
    gauges: dict[str, list[str]] = {"phalanx_info": [_sample("phalanx_info", labels, 1)]}
    for event, row in newest.items():
        for field, value in row.items():
            plain = event == "step" or field.startswith("val_")
            name = re.sub(r"\W", "_", f"phalanx_{field}" if plain else f"phalanx_{event}_{field}", flags=re.ASCII)
            for more, number in _numbers(event, field, value):
                gauges.setdefault(name, []).append(_sample(name, {"run": labels["run"], **more}, number))
    return "".join(f"# TYPE {name} gauge\n{''.join(samples)}" for name, samples in gauges.items())


def _numbers(event: str, field: str, value: Any) -> Iterator[tuple[dict[str, str], float]]:
    """Yields the numbers of a field with their labels. What was not finite is null in a row."""
    names = LABELS.get(field) or LABELS.get(event) or ("source",)
    for path, number in flat(value, "\0").items() if isinstance(value, dict) else [("", value)]:
        for place, each in enumerate(number) if isinstance(number, list) else [("", number)]:
            if each is None or (isinstance(each, int | float) and not isinstance(each, bool)):
                more = dict(zip(names, path.split("\0"), strict=False)) if path else {}
                yield more | ({"expert": str(place)} if place != "" else {}), math.nan if each is None else each


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    # JSON escapes backslashes, quotes and ends of lines as the format does; other characters stay.
    inside = ",".join(f"{label}={json.dumps(text, ensure_ascii=False)}" for label, text in labels.items())
    return f"{name}{{{inside}}} {'NaN' if math.isnan(value) else value}\n"


class _MetricsServer(ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True

    def __init__(self, host: str, port: int, text: Any):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.text = text
        super().__init__((host, port), _MetricsHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that goes away is not the run's affair."""


class _MetricsHandler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _MetricsServer  # pyrefly: ignore[bad-override-mutable-attribute]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404, "the metrics are at /metrics")
            return
        content = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: requests are no part of the run's log."""
