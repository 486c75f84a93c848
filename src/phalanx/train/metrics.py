"""The measurements of a step: the row for metrics.jsonl and the log line."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.train.append import AppendedFile
from phalanx.units import gib

log = logging.getLogger(__name__)


@dataclass
class Meter:
    """Measures steps and computes throughput per device, like torchtitan, and of the whole job."""

    positions_per_step: int
    """Tokens and padding per step over all devices."""
    flops_per_step: float
    """Model FLOPs of one device for all of them: forward and backward, without recomputation."""
    peak_flops: float
    """FLOP/s of one device; 0 if unknown, and rows and lines then have no `mfu`."""
    devices: int
    waited: float = 0.0
    """Seconds of this step spent waiting for data."""
    began: float = field(default_factory=time.perf_counter)
    unshown: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of each step since the last line, and the share of its positions that are tokens."""
    tokens_of: Callable[[int], int] | None = None
    """Returns the tokens of a step, counted from 1; None if there is no padding."""

    def step(self, number: int) -> dict[str, float]:
        """Ends step `number`: returns its time and throughput."""
        now = time.perf_counter()
        seconds, waited = now - self.began, self.waited
        self.began, self.waited = now, 0.0
        share = 1.0 if self.tokens_of is None else self.tokens_of(number) / self.positions_per_step
        self.unshown.append((seconds, share))
        return {"step_time_s": seconds, "data_wait_s": waited, **self._throughput(seconds, share)}

    def since_shown(self) -> dict[str, float]:
        """Returns the throughput over the steps since the last call, for a line that covers all of them."""
        seconds, shares = (sum(values) / len(self.unshown) for values in zip(*self.unshown, strict=True))
        self.unshown.clear()
        return self._throughput(seconds, shares)

    def pause(self, seconds: float) -> None:
        """Excludes time that was not training (a validation, a checkpoint)."""
        self.began += seconds

    def _throughput(self, seconds: float, share: float) -> dict[str, float]:
        total, flops = share * self.positions_per_step / seconds, share * self.flops_per_step / seconds
        found = {"tps": total / self.devices, "tps_total": total, "tflops": flops / 1e12}
        if self.peak_flops:
            found["mfu"] = flops / self.peak_flops
        return found if self.tokens_of is None else {**found, "padding": 1 - share}


class MetricsFile:
    """metrics.jsonl: one JSON object per line, written row by row (train/append.py). A context manager.

    Without a path (every rank but the first) rows are discarded.
    """

    def __init__(self, path: Path | None):
        self.file = AppendedFile(path, log.warning) if path else None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file:
            self.file.close()

    def write(self, event: str, **values: Any) -> None:
        """Appends a row: {"event": "step", "time": seconds since the epoch, "step": 10, ...}. NaN and infinity become
        null, since JSON has neither."""
        if self.file:
            row = {"event": event, "time": round(time.time(), 3), **values}
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            self.file.append(json.dumps(finite))


def line(row: dict[str, float], memory: int) -> str:
    """Returns the log line of a step: `key: value` pairs in a stable order. `tps`, `tflops` and `mfu` are per device:

    step: 10 loss: 2.1234 grad_norm: 0.51 lr: 3.0e-04 tps: 9,999 tps_total: 79,992 tflops: 1.23 mfu: 40.1% memory:
    12.3GiB

    Of preference pairs, margin and accuracy of the rewards stand before `tps`; of conversations, the share of the
    positions that are padding, which no figure counts.
    """
    pairs = ""
    if "reward_margin" in row:
        pairs = f"margin: {row['reward_margin']:.3f}  accuracy: {row['reward_accuracy']:.1%}  "
    mfu = f"mfu: {row['mfu']:.1%}  " if "mfu" in row else ""
    padding = f"padding: {row['padding']:.1%}  " if "padding" in row else ""
    return (
        f"step: {row['step']:.0f}  loss: {row['loss']:.4f}  grad_norm: {row['grad_norm']:.2f}  lr: {row['lr']:.1e}  "
        f"{pairs}{padding}"
        f"tps: {row['tps']:,.0f}  tps_total: {row['tps_total']:,.0f}  tflops: {_significant(row['tflops'])}  "
        f"{mfu}memory: {gib(memory)}"
    )


def _significant(value: float) -> str:
    """Formats a value with three significant digits and no exponent: 163, 1.23, 0.0519."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
