"""The question of a search: a job without its layout, and the fields of the layout that are fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.check.layout import layout_problems, offload_problems
from phalanx.check.pipeline import pipeline_problems
from phalanx.config.cluster import Cluster, with_processes
from phalanx.config.corpora import PAIR, has_pairs
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.job_spec import framework_of, stages, step_spec
from phalanx.cost.spec import Products, StepSpec, as_used_by
from phalanx.errors import JobError
from phalanx.partition import batch


@dataclass(frozen=True)
class PlanRequest:
    """The question of a search: which layout is the fastest that fits?"""

    model: ModelConfig
    """The model, with its vocabulary size set."""
    cluster: Cluster
    global_batch: int
    """Sequences per step."""
    products: Products = "bf16"
    width: int = 2
    """Bytes per element of a parameter and of an activation."""
    framework: Framework = field(default_factory=Framework)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fixed fields of the layout with their values."""
    worlds: tuple[int, ...] = ()
    """Numbers of devices that may be used; empty: all of the cluster's."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    together: int = 1
    """Sequences that belong together: micro-batches are multiples of it."""
    document_mask: bool = False
    """Whether attention must not cross documents."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of devices that may be used."""
        return self.worlds or (self.cluster.devices,)

    def each(self) -> Iterator[PlanRequest]:
        """Yields one request per number of devices. Processes on the same CPU each have their part of it."""
        for world in self.devices:
            per_node = max(1, world // self.cluster.nodes)
            cluster, framework = as_used_by(world, with_processes(self.cluster, per_node), self.framework)
            yield replace(self, cluster=cluster, framework=framework, worlds=(world,))

    def spec(self, layout: Layout) -> StepSpec:
        """Returns the spec of one layout. Raises JobError or ValueError if it does not fit model or batch."""
        solved = batch.solve(self.global_batch, layout)
        complete = replace(layout, micro_batch=solved.micro_batch, accumulation=solved.accumulation)
        return replace(self.unchecked_spec(complete, solved), stages=stages(self.model, complete))

    def unchecked_spec(self, layout: Layout, solved: batch.Batch) -> StepSpec:
        """Returns the spec of a layout whose stages are as even as possible."""
        return StepSpec(
            self.model,
            self.cluster,
            layout,
            solved,
            self.products,
            self.width,
            self.framework,
            optimizer=self.optimizer,
            document_mask=self.document_mask,
        )

    def problems(self, layout: Layout) -> list[str]:
        """Returns the conflicts of a layout with model, devices and batch, each with its equation; empty if it is
        legal."""
        job = Job(
            model=self.model,
            cluster=self.cluster,
            layout=layout,
            optimizer=self.optimizer,
            train=Train(global_batch=self.global_batch),
        )
        found = [message for _, message in (*layout_problems(job), *pipeline_problems(job), *offload_problems(job))]
        if found:
            return found
        try:
            self.spec(layout)
        except (JobError, ValueError) as error:
            return [str(error)]
        return []


def plan_request(job: Job, vocab: int, fixed: Mapping[str, Any] | None = None) -> PlanRequest:
    """Returns the request of a job. Raises JobError if the devices or their number are not known."""
    if not job.cluster.devices:
        raise JobError("cluster: how many devices are there? Set cluster.devices_per_node, or name a machine")
    # The spec of the simplest layout has everything that does not depend on the layout.
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
        framework_of(job),
        dict(fixed or {}),
        optimizer=spec.optimizer,
        together=PAIR if has_pairs(job.data) else 1,
        document_mask=spec.document_mask,
    )
