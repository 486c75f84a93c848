"""The picture of benchmarks/sync.py, from its document: this draws without torch."""

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
