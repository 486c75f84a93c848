"""A run's directory as a trainer leaves it, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.check.load import LoadedJob, as_yaml
from phalanx.config.cluster import Cluster
from phalanx.config.fields import leaves
from phalanx.config.job import Data, Job, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig

JOB = Job(
    model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=16),
    cluster=Cluster(peak_tflops=1.0, device="cpu"),
    data=Data(corpus="random", random_tokens=5000, random_vocab=13),
    layout=Layout(pp=2, accumulation=2),
    train=Train(steps=40, global_batch=12),
    run=RunOptions(name="main"),
)
START = {"event": "start", "time": 1e9, "step": 0, "layout": "pp=2", "devices": 2, "device": "cpu", "vocab_size": 13}
PEAK = {"peak_flops": 1e12, "peak_source": "cluster.peak_tflops"}


def step(number: int, **values: Any) -> dict[str, Any]:
    """The row of a step."""
    row = {"event": "step", "time": 1e9 + number, "step": number, "loss": 3 + math.exp(-number / 10), "grad_norm": 0.5}
    row |= {"lr": 1e-3, "step_time_s": 0.5, "data_wait_s": 1e-4, "tps": 1234567.0, "tps_total": 2469134.0}
    return {**row, "tflops": 0.25, "mfu": 0.25, "memory": 3 * 2**28, **values}


def rows(steps: int = 40) -> list[dict[str, Any]]:
    """The rows of a whole run."""
    found = [{**START, **PEAK}, *(step(number) for number in range(1, steps + 1))]
    found.append({"event": "validation", "time": 1e9 + steps, "step": steps, "val_loss": 3.25, "seconds": 1.0})
    found.append({"event": "traffic", "step": steps, "steps": steps, "traffic_bytes": {"pp": {"send": 24576.0}}})
    saved = {"event": "checkpoint", "time": 1e9 + steps, "step": steps, "name": "step-000040", "seconds": 0.5}
    return [*found, saved, {"event": "end", "time": 1e9 + steps, "step": steps, "status": "finished", "reason": ""}]


def run(folder: Path, lines: Iterable[dict[str, Any] | str] = (), job: Job = JOB) -> Path:
    """Writes a run's directory and returns it; `lines` are rows of metrics.jsonl, or text in their place."""
    folder.mkdir(parents=True)
    origins = {path: "job.yaml" if path == "train.steps" else "default" for path in leaves()}
    (folder / "config.yaml").write_text(as_yaml(LoadedJob(job, origins)))
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines or rows())
    (folder / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    (folder / "env.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    (folder / "command.txt").write_text("2026-11-25T00:00:00+0000  phalanx train job.yaml\n")
    (folder / "checkpoints" / "step-000040").mkdir(parents=True)
    (folder / "checkpoints" / "step-000040" / "manifest.json").write_text("{}")
    return folder
