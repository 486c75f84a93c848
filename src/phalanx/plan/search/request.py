"""What a search is asked: everything of a case but its layout, and what of the layout is settled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.check.layout import layout_problems
from phalanx.check.pipeline import pipeline_problems
from phalanx.config.cluster import Cluster
from phalanx.config.cpu_node import with_processes
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.train import Train
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.job_spec import stages, step_spec
from phalanx.cost.spec import Products, StepSpec
from phalanx.errors import JobError
from phalanx.partition import batch


@dataclass(frozen=True)
class PlanRequest:
    """Which layout is the fastest that fits?"""

    model: ModelConfig
    """With its vocabulary written out."""
    cluster: Cluster
    global_batch: int
    """Sequences of a step."""
    products: Products = "bf16"
    width: int = 2
    """Bytes of a parameter and of an activation."""
    framework: Framework = field(default_factory=Framework)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the layout that are not open, and their values."""
    worlds: tuple[int, ...] = ()
    """Numbers of devices that may be used; empty means all of the cluster's."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of devices that may be used."""
        return self.worlds or (self.cluster.devices,)

    def each(self) -> Iterator[PlanRequest]:
        """The same for each number of devices alone. Processes that share a processor have each their part of it."""
        for world in self.devices:
            per_node = max(1, world // self.cluster.nodes)
            yield replace(self, cluster=with_processes(self.cluster, per_node), worlds=(world,))

    def spec(self, layout: Layout) -> StepSpec:
        """The case of one layout. Raises JobError or ValueError where it does not go with model or batch."""
        solved = batch.solve(self.global_batch, layout)
        complete = replace(layout, micro_batch=solved.micro_batch, accumulation=solved.accumulation)
        return StepSpec(
            self.model,
            self.cluster,
            complete,
            solved,
            self.products,
            self.width,
            self.framework,
            stages(self.model, complete),
        )

    def problems(self, layout: Layout) -> list[str]:
        """What of a layout does not go with model, devices and batch, each with its equation; empty where it is
        legal."""
        job = Job(model=self.model, cluster=self.cluster, layout=layout, train=Train(global_batch=self.global_batch))
        found = [message for _, message in (*layout_problems(job), *pipeline_problems(job))]
        if found:
            return found
        try:
            self.spec(layout)
        except (JobError, ValueError) as error:
            return [str(error)]
        return []


def plan_request(job: Job, vocab: int, fixed: Mapping[str, Any] | None = None) -> PlanRequest:
    """What a job leaves open. Raises JobError where nothing is known about the devices, or how many there are."""
    if not job.cluster.devices:
        raise JobError("cluster: how many devices are there? Set cluster.devices_per_node, or name a machine")
    # A case of the simplest layout has everything that does not depend on the layout.
    spec = step_spec(replace(job, layout=Layout()), vocab)
    if job.cluster.devices > 1 and not (job.cluster.intra.gbs or job.cluster.inter.gbs):
        raise JobError(
            f"cluster: {job.cluster.devices} devices, and nothing is known about the links between them; set "
            "cluster.intra.gbs and cluster.inter.gbs, or measure them with `phalanx bench comm`"
        )
    return PlanRequest(
        spec.model,
        job.cluster,
        job.train.global_batch or batch.DEFAULT_GLOBAL_BATCH,
        spec.products,
        spec.width,
        spec.framework,
        dict(fixed or {}),
    )
