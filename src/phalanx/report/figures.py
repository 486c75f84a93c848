"""The figures of a run, measured beside predicted: what `phalanx report --json` prints and the page shows."""

from __future__ import annotations

from typing import Any

from phalanx.report.expected import Expected
from phalanx.report.metrics import middle, number, traffic_of
from phalanx.report.run import RunRecord, history
from phalanx.report.sources import sources_of

RECENT = 100
"""Newest steps whose median is the measured figure."""


def figures(record: RunRecord) -> dict[str, Any]:
    """Returns the measured figures, None where there are none. Throughput is the median of the newest steps; `tps`,
    `tflops` and `mfu` are per device, `tps_total` is of all devices; none counts `padding` (a share)."""
    metrics = record.metrics
    recent = {name: middle(metrics.values(name, RECENT)) for name in ("step_time_s", "data_wait_s", "tps", "tps_total")}
    recent |= {name: middle(metrics.values(name, RECENT)) for name in ("tflops", "mfu", "padding")}
    start = metrics.last("start") or {}
    validations = [value for row in metrics.of("validation") if (value := number(row.get("val_loss"))) is not None]
    return {
        "step": metrics.last_step,
        "steps": record.total,
        "loss": next(reversed(metrics.values("loss", 1)), None),
        "val_loss": validations[-1] if validations else None,
        "best_val_loss": min(validations, default=None),
        **recent,
        "memory_bytes": max(metrics.values("memory"), default=None),
        "tokens": _tokens(record),
        "seconds": sum(metrics.values("step_time_s")),
        "peak_flops": number(start.get("peak_flops")),
        "peak_source": str(start.get("peak_source", "")),
        "devices": number(start.get("devices")),
    }


def _tokens(record: RunRecord) -> float | None:
    if record.loaded is None:
        return None
    job, padding = record.loaded.job, record.metrics.values("padding")
    share = 1 - sum(padding) / len(padding) if padding else 1
    return record.metrics.last_step * job.train.global_batch * job.model.seq_len * share


def document(record: RunRecord, prediction: Expected) -> dict[str, Any]:
    """Returns the run as one JSON value."""
    measured = figures(record)
    return {
        "run": str(record.path),
        "state": record.state,
        "layout": record.loaded.job.layout.line() if record.loaded else None,
        "measured": measured,
        "predicted": predicted_figures(prediction, measured["padding"]),
        "not_predicted": prediction.reason,
        "sources": sources_of(record),
        "traffic_bytes": traffic_of(record.metrics.last("traffic")),
        "predicted_traffic_bytes": prediction.traffic,
        "checkpoints": [each.step for each in record.checkpoints],
        "attempts": record.attempts,
        "history": [
            {"time": time, "step": step, "event": kind, "text": words} for time, step, kind, words in history(record)
        ],
        "notes": record.notes,
    }


def predicted_figures(prediction: Expected, padding: float | None) -> dict[str, Any] | None:
    """Returns the predicted figures under the names of the measured ones. A step takes as long with `padding` (a share,
    None: there is none) as without, which throughput does not count."""
    found, tokens = prediction.prediction, 1 - (padding or 0.0)
    if found is None:
        return None
    return {
        "step_time_s": found.step_time_s,
        "tps": tokens * found.tokens_per_s_per_device,
        "tps_total": tokens * found.tokens_per_s,
        "tflops": tokens * found.tflops_per_device,
        "mfu": None if found.mfu is None else tokens * found.mfu,
        "memory_bytes": found.fullest.peak,
        "bubble": found.bubble,
        "cluster": prediction.cluster,
    }
