"""The balance of a run's experts: the routers' statistics, summed over all ranks, as a row of metrics.jsonl.

A row covers all steps since the previous one:

{"event": "experts", "step": 20, "steps": 10, "loads": {"layer": [tokens of each expert]}, "max_violation": 0.42,
"worst_layer": 3, "idle": 0, "aux_loss": 0.0213, "z_loss": ...}

A load is the number of tokens that chose the expert; with model.moe.capacity, some of them may have been dropped. With
m the mean of a layer's loads, `max_violation` is (the largest - m) / m of the layer where that is largest (MaxVio, Wang
et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", section 4), `idle` the number of
experts of all layers that no token chose. The penalties, if the job has them, are summed over layers, with their
coefficients: means per token, which the `loss` of a step, a cross entropy, does not include.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from phalanx.blocks.kinds import block_kinds
from phalanx.config.job import Job
from phalanx.cost.breakdown import subject
from phalanx.data.files import write_atomic
from phalanx.errors import DataError
from phalanx.model.moe import Routing
from phalanx.parallel.mesh import Mesh
from phalanx.pictures import experts as experts_picture
from phalanx.train.metrics import MetricsFile
from phalanx.train.run_directory import RunDirectory

log = logging.getLogger(__name__)


class ExpertLoads:
    """One rank's part in summing the loads. A dense model has none, and nothing is done."""

    def __init__(self, job: Job, mesh: Mesh, routing: Routing, device: torch.device, step: int):
        self.job, self.mesh, self.routing, self.device = job, mesh, routing, device
        self.step = step
        """The step up to which loads have been summed."""
        self.layers = [layer for layer, kind in enumerate(block_kinds(job.model)) if kind.routed]
        self.penalties = [name for name in ("aux_loss", "z_loss") if getattr(job.model.moe, name)]

    def restart(self, step: int) -> None:
        """Forgets what was recorded: the run goes on from an earlier step."""
        self.routing.clear()
        self.step = step

    def after(self, step: int, rows: MetricsFile, *, shown: bool, ends: bool) -> None:
        """Writes a row after a step that is shown, and after the last one of the run. All ranks call this after every
        step.

        Independent replicas do not wait for each other here: they write a row when they synchronize anyway, with
        local_sgd and diloco if the step is also shown, with asp at a validation or checkpoint, which call `collect`."""
        layout = self.job.layout
        synchronizes = layout.sync in ("bsp", "asp") or step % layout.sync_every == 0
        if self.layers and (ends or layout.sync == "asp" or (shown and synchronizes)):
            row = self.collect(step)
            rows.write("experts", **row)
            log.info("%s", line(row))

    def collect(self, step: int) -> dict[str, Any]:
        """Sums what all ranks' routers recorded since the last call, up to `step`, and returns a row. A collective."""
        n, top_k, routing = self.job.model.moe.n_experts, self.job.model.moe.top_k, self.routing
        noted = torch.zeros(len(self.layers) * n + len(self.penalties), dtype=torch.float64, device=self.device)
        of_layers, of_penalties = noted[: len(self.layers) * n].view(-1, n), noted[len(self.layers) * n :]
        # All tensor ranks record the same tokens. Layers of other pipeline ranks are zero here.
        if self.mesh.owns_loss:
            for place, layer in enumerate(self.layers):
                of_layers[place] += routing.loads.get(layer, 0)
            for place, name in enumerate(self.penalties):
                of_penalties[place] += routing.penalties.get(name, 0.0)
        routing.clear()
        with self.mesh.ledger.untracked():
            self.mesh.axis("world").all_reduce(noted).wait()
        loads = {layer: [int(load) for load in row] for layer, row in zip(self.layers, of_layers.tolist(), strict=True)}
        tokens = sum(loads[self.layers[0]]) / top_k
        violations = {layer: max(row) * n / sum(row) - 1 for layer, row in loads.items()}
        worst = max(violations, key=lambda layer: violations[layer])
        steps, self.step = step - self.step, step
        return {
            "step": step,
            "steps": steps,
            "loads": loads,
            "max_violation": violations[worst],
            "worst_layer": worst,
            "idle": sum(row.count(0) for row in loads.values()),
            **{name: sum_ / tokens for name, sum_ in zip(self.penalties, of_penalties.tolist(), strict=True)},
        }

    def draw(self, directory: RunDirectory) -> None:
        """Writes the picture of the run so far into its directory, on rank 0."""
        if self.layers and self.mesh.axis("world").rank == 0:
            path, model = directory.path / "experts.svg", subject(self.job, self.job.layout.world)
            try:
                write_atomic(path, experts_picture.svg(directory.path.name, directory.metrics, model).encode())
            except (OSError, DataError) as error:  # the rows may still wait for a full disk
                log.warning("experts: %s was not drawn: %s", path, error)
            else:
                log.info("experts: %s", path)


def line(row: dict[str, Any]) -> str:
    """Returns the log line of a row:

    experts: max_violation 0.42 (layer 3) idle: 0 aux_loss: 0.0213
    """
    parts = [f"max_violation {row['max_violation']:.2f} (layer {row['worst_layer']})", f"idle: {row['idle']}"]
    parts += [f"{name}: {row[name]:.4f}" for name in ("aux_loss", "z_loss") if name in row]
    return f"experts: {'  '.join(parts)}"
