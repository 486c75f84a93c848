"""The job on fewer nodes than it was made for: the same batches in the same order, in a layout for the devices left."""

from __future__ import annotations

from dataclasses import replace

from phalanx.check.effect import without_idle
from phalanx.check.job import problems_of
from phalanx.check.load import LoadedJob
from phalanx.cli import auto_layout
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.partition import derived as batch_equation


def words_for(loaded: LoadedJob, nodes: int) -> tuple[str, ...]:
    """Returns the words of the command line that adapt a job of `run.nnodes` nodes to `nodes` of them.

    A layout that the user has chosen keeps its tensor, context and pipeline ranks and loses data ranks, if that is
    legal. Otherwise the planner chooses. Raises JobError or DoesNotFitError if there is no layout."""
    job = loaded.job
    most = job.run.most_nodes
    per_node = job.layout.processes // most
    words = [f"run.nnodes={nodes}", f"cluster.nodes={nodes}"]
    if job.cluster.devices_per_node:
        words.append(f"cluster.devices_per_node={per_node}")
    if nodes == most:
        return tuple(words)
    batch = batch_equation.solve(job.train.global_batch, job.layout).global_batch
    cluster = replace(job.cluster, nodes=nodes, devices_per_node=job.cluster.devices_per_node and per_node)
    train, run = replace(job.train, global_batch=batch), replace(job.run, nnodes=str(nodes))
    smaller = replace(job, cluster=cluster, train=train, run=run)
    fewer = None if auto_layout.was_planned(loaded) else _with_fewer_data_ranks(smaller, nodes, most)
    layout = fewer or _planned(LoadedJob(smaller, loaded.origins), per_node)
    layout = without_idle(replace(smaller, layout=layout))
    words += [f"train.global_batch={batch}", f"layout={layout.line()}"]
    if layout.bucket_mb != Layout().bucket_mb:
        words.append(f"layout.bucket_mb={layout.bucket_mb}")
    return tuple(words)


def _with_fewer_data_ranks(job: Job, nodes: int, most: int) -> Layout | None:
    """Returns the layout on a fraction of the data ranks, or None if none is legal."""
    layout = job.layout
    for axis in ("dp_replicate", "dp_shard"):
        ranks, rest = divmod(getattr(layout, axis) * nodes, most)
        if not rest and ranks:
            # More micro-batches make up for the ranks.
            fewer = replace(layout, **{axis: ranks}, accumulation=0)
            if not problems_of(replace(job, layout=fewer)):
                return fewer
    return None


def _planned(loaded: LoadedJob, per_node: int) -> Layout:
    cluster = replace(loaded.job.cluster, devices_per_node=per_node)
    job = replace(loaded.job, layout=Layout(auto=True), cluster=cluster)
    origins = {path: "default" if path.startswith("layout.") else origin for path, origin in loaded.origins.items()}
    return auto_layout.planned(LoadedJob(job, origins), measures=False).job.layout
