"""The one function that turns a plain model into a parallel one: the techniques, in the order in which they compose."""

from __future__ import annotations

import logging

from phalanx.errors import JobError
from phalanx.job.job import Job
from phalanx.model.transformer import Transformer
from phalanx.parallel.data import DDPReplica, Replica, ThreadReplicas
from phalanx.parallel.linear import onednn_is_faster, use_onednn
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import ChunkedObjective, Objective
from phalanx.parallel.recompute import recompute

log = logging.getLogger(__name__)


def apply(model: Transformer, job: Job, mesh: Mesh) -> Replica:
    """Apply the job's techniques to `model`, whose weights are initialised and lie on the device.

    Inner techniques come first: what changes a layer (its kernels; tensor, context, expert parallel), then what wraps
    blocks (recompute, compile), then what spreads the whole over data ranks. Each is one log line.
    """
    log.info("mesh: %s", mesh)
    weight = model.embed.weight
    if job.train.cpu_linear == "onednn" or (
        job.train.cpu_linear == "auto" and not job.train.compile and onednn_is_faster(weight.device, weight.dtype)
    ):
        log.info("linear layers: %d through oneDNN", use_onednn(model))
    if job.layout.recompute != "none":
        log.info("recompute: %s, %d modules", job.layout.recompute, recompute(model, job.layout.recompute))
    if job.train.compile:
        for block in model.blocks.values():
            block.compile()
        log.info("compile: %d blocks, each on its own", len(model.blocks))
    layout = job.layout
    objective = Objective(model)
    if layout.loss_chunk:
        objective = ChunkedObjective(model, layout.loss_chunk)
        log.info("loss: the logits of %d tokens at a time", layout.loss_chunk)
    if layout.data_parallel == "threads" and layout.dp_replicate > 1:
        if weight.device.type != "cpu":
            raise JobError(
                f"layout.data_parallel=threads is a baseline for CPUs, this rank's device is {weight.device}; "
                "ddp runs on both, cluster.device=cpu runs threads"
            )
        log.info("data parallel: %d threads of one process", layout.dp_replicate)
        return ThreadReplicas(objective, layout.dp_replicate)
    if mesh.sizes["dp_replicate"] > 1:
        replica = DDPReplica(objective, mesh, layout.bucket_mb)
        replica.warm_up()
        log.info("data parallel: DDP over %d ranks, buckets of %g MiB", layout.dp_replicate, layout.bucket_mb)
        return replica
    return Replica(objective)
