"""Jobs that name no machine, on the machine that `phalanx bench` measured."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.clusters import cluster_of
from phalanx.config.job import Job
from phalanx.errors import JobError


def on_known_cluster(job: Job, device: str = "") -> Job:
    """Returns the job on its cluster, or on cluster=local if it names none. Raises JobError if nothing was measured, or
    if the ranks are on another kind of `device` (cpu, cuda) than was measured."""
    if job.cluster.accelerator.name:
        return job
    local = cluster_of("local")
    if device and local.device != device:
        raise JobError(f"cluster=local is a measured {local.device}, the ranks are on {device}; name the cluster")
    nodes = job.cluster.nodes
    return replace(job, cluster=replace(local, nodes=nodes, devices_per_node=max(1, job.layout.processes // nodes)))
