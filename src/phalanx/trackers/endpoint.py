"""A run's newest figures for Prometheus, over HTTP in its text format 0.0.4. Rank 0 listens, in a thread, so that the
endpoint ends with the run. Each request reads the rows that metrics.jsonl has got since the one before.

A number `loss` of a step is the gauge phalanx_loss, of another event the gauge phalanx_checkpoint_bytes; numbers by
axis, source or GPU have it as a label. Every sample has the label `run`."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from phalanx.config.job import Job
from phalanx.errors import RunError
from phalanx.trackers.tracker import BATCH_BYTES, ReadPosition, Row, flat, read_rows

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
    server: _MetricsServer  # pyright: ignore[reportIncompatibleVariableOverride]

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
