"""The pictures of benchmarks/sync.py and compression.py, from their documents: this draws without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.check.load import load_file
from phalanx.cost.breakdown import model_name
from phalanx.pictures.panels import Panel, panels_svg
from phalanx.units import counted

JOB = Path(__file__).parents[1] / "examples" / "main.yaml"
TECHNIQUES = ("bsp", "asp", "local_sgd", "diloco")
EVEN, SLOW = "one speed", "last one slow"


def picture(result: dict[str, Any]) -> str:
    """Returns loss against steps, against time, and against time with a straggler, from the benchmark's document."""

    def lines(speed: str, column: int) -> dict[str, list[tuple[float, float]]]:
        runs = {sync: result["runs"][f"{sync}, {speed}"]["curve"] for sync in TECHNIQUES}
        return {sync: [(point[column], point[2]) for point in curve] for sync, curve in runs.items()}

    loss, replicas = "validation loss, nats per token", counted(result["options"]["replicas"], "replica")
    model = model_name(load_file(JOB, []).job.model)
    return panels_svg(
        f"{model}, on {replicas} of one thread each, {result['machine']['processor']}",
        [
            Panel("against steps", "steps", loss, lines(EVEN, 0)),
            Panel("against time", "seconds of training", loss, lines(EVEN, 1)),
            Panel("against time, last replica slow", "seconds of training", loss, lines(SLOW, 1)),
        ],
    )


def compression_picture(result: dict[str, Any]) -> str:
    """Returns loss against steps, and against the bytes sent, from the document of benchmarks/compression.py."""
    runs, title = result["runs"], "validation loss, nats per token"
    steps = {name: [(step, loss) for step, _, loss in run["curve"]] for name, run in runs.items()}
    sent = {
        name: [(step * run["sent_bytes_per_step"] / 2**20, loss) for step, _, loss in run["curve"] if step]
        for name, run in runs.items()
    }
    model, replicas = model_name(load_file(JOB, []).job.model), counted(result["options"]["replicas"], "replica")
    return panels_svg(
        f"{model}, gradients summed over {replicas}",
        [
            Panel("against steps", "steps", title, steps),
            Panel("against traffic", "MiB sent by rank 0", title, sent, log=10),
        ],
    )
