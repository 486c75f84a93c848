"""The one function that turns a plain model into a parallel one: the techniques, in the order in which they compose."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from phalanx.comm.axis import Axis
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.model.init import initial_value
from phalanx.model.loss import cross_entropy_sum
from phalanx.model.transformer import Transformer
from phalanx.parallel import context, expert, tensor, vocabulary
from phalanx.parallel.data import PartialGradients, Pieces, Replica, ThreadReplicas
from phalanx.parallel.fragments import by_whole
from phalanx.parallel.fsdp import ShardedReplica
from phalanx.parallel.linear import DeferredWeightGrads, collect, onednn_is_faster, use_onednn
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import ChunkedObjective, Loss, Objective
from phalanx.parallel.pipedream import PipeDream
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.recompute import recompute
from phalanx.parallel.stages import Stages
from phalanx.parallel.tiling import tile
from phalanx.parallel.zero import BucketReplica
from phalanx.partition import batch
from phalanx.partition.cut import layer_costs, shown, stages_of
from phalanx.partition.pipeline import schedule_of
from phalanx.partition.recompute import recompute_of, written
from phalanx.partition.tensor_slices import BALANCING, WITHIN, padded_vocabulary
from phalanx.units import counted

log = logging.getLogger(__name__)


def apply(model: Transformer, job: Job, mesh: Mesh, device: torch.device) -> Replica:
    """Apply the job's techniques to `model`, which lies on the meta device, and put it, initialised, on `device`.

    A pipeline comes first: of the model it leaves this rank's layers. Then inner techniques: what cuts a layer (tensor,
    sequence, context, expert parallel) or changes its kernels, then what wraps blocks (recompute, compile), then what
    spreads the whole over data ranks. Each is one log line.
    """
    log.info("mesh: %s", mesh)
    layout, dtype, vocab = job.layout, model.embed.weight.dtype, model.embed.num_embeddings
    stages = _stages(model, job, mesh, vocab) if layout.pp > 1 else None
    # Where no backward pass is cut in halves, autograd's own way is some 2 % faster.
    later = DeferredWeightGrads() if stages and stages.schedule.splits else None
    lanes = mesh.lanes("pp")  # of all ranks, so before the groups that only some of them make
    pieces, partials, taken = _cut(model, mesh, layout, vocab, later)
    _deal_out(model, mesh, layout)
    partials += _shared(mesh, stages, pieces) if stages else []
    names = {}
    if layout.tiles > 1:
        pieces, names = tile(model, pieces, layout.tiles)
        log.info("tiles: %d parameters in %d tiles each", len(set(names.values())), layout.tiles)
    if job.train.cpu_linear == "onednn" or (
        job.train.cpu_linear == "auto" and not job.train.compile and onednn_is_faster(device, dtype)
    ):
        log.info("linear layers: %d through oneDNN", use_onednn(model))
    if later is not None:
        # Matrices that tensor parallelism has cut leave theirs to it by themselves; a head that works through its
        # tokens in chunks has one gradient all the same.
        taken |= {model.head} if layout.loss_chunk else set()
        collect((module for module in model.modules() if module not in taken), later)
    if written(layout) != "none":
        log.info("recompute: %s, %d modules here", written(layout), recompute(model, layout))
    if job.train.compile:
        for block in model.blocks.values():
            block.compile()
        log.info("compile: %d blocks, each on its own", len(model.blocks))
    replica = _spread(_objective(model, mesh, layout, vocab), pieces, partials, job, mesh, device, stages, names)
    for fragment in replica.fragments:
        fragment.whole_name = names.get(fragment.name, fragment.name)
        fragment.copy = stages is not None and stages.holders(fragment.whole_name)[0] != stages.rank
    if stages is not None:
        parts = layout.tp if layout.sp else 1
        kind = Pipeline if stages.schedule.steps == 1 else PipeDream
        replica.runner = kind(replica, stages, lanes, later or DeferredWeightGrads(), parts)
    _initialise(replica, job, mesh)
    return replica


def _stages(model: Transformer, job: Job, mesh: Mesh, vocab: int) -> Stages:
    """Pipeline parallelism: what of the model this rank holds. The rest is taken out of it."""
    accumulation = batch.solve(job.train.global_batch, job.layout).accumulation
    schedule = schedule_of(job.layout, accumulation)
    cut = stages_of(job.model, job.layout, schedule.stages, vocab)
    stages = Stages(schedule, mesh.coordinates["pp"], job.model, vocab, cut)
    stages.keep(model)
    log.info(
        "pipeline: %s, %d micro-batches, %s", schedule.name, accumulation, shown(cut, layer_costs(job.model, vocab))
    )
    return stages


def _shared(mesh: Mesh, stages: Stages, pieces: Pieces) -> list[PartialGradients]:
    """Parameters that several ranks of a pipeline hold: the embedding where it is the head's as well, and with a second
    direction all of them. The ranks add up what each has found."""
    names: dict[tuple[int, ...], set[str]] = {}
    for name in pieces:
        if len(ranks := tuple(sorted(stages.holders(name)))) > 1:
            names.setdefault(ranks, set()).add(name)
    return [PartialGradients(mesh.among("pp", ranks), frozenset(shared)) for ranks, shared in sorted(names.items())]


def _cut(
    model: Transformer, mesh: Mesh, layout: Layout, vocab: int, later: DeferredWeightGrads | None
) -> tuple[Pieces, list[PartialGradients], set[nn.Module]]:
    """Tensor and sequence parallelism: what each tensor rank holds, whose gradients have to be summed over them, and
    the layers whose products it makes."""
    tp = mesh.axis("tp")
    pieces = tensor.cut_parameters(model, tp)
    if tp.size == 1:
        return pieces, [], set()
    # A block that is computed again gathers its inputs then.
    keeps = [layer for layer in model.blocks if recompute_of(layout, int(layer), model.model.n_layers) == "full"]
    taken = tensor.connect(model, tensor.TensorParallel(tp, layout.sp, layout.sp_regather, later), keeps)
    padding = padded_vocabulary(vocab, tp.size) - vocab
    log.info("tensor parallel: %d ranks%s", tp.size, f", vocabulary {vocab} + {padding} padding" if padding else "")
    partials = []
    copies = max(piece[0].copies for piece in pieces.values() if piece[0].dim is not None)
    if copies > 1:
        shared = frozenset(name for name, piece in pieces.items() if piece[0].dim is not None and piece[0].copies > 1)
        partials.append(PartialGradients(mesh.neighbours("tp", copies), shared))
        log.info("tensor parallel: each key/value head on %d ranks", copies)
    whole = (name for name, piece in pieces.items() if piece[0].dim is None and not name.endswith(BALANCING))
    partials.append(PartialGradients(tp, frozenset(name for name in whole if layout.sp or name.endswith(WITHIN))))
    if layout.sp:
        log.info("sequence parallel: %d tokens of each sequence per rank", model.model.seq_len // tp.size)
    return pieces, partials, taken


def _deal_out(model: Transformer, mesh: Mesh, layout: Layout) -> None:
    """Context and expert parallelism: each rank has some tokens of every sequence, and some experts."""
    if layout.cp > 1:
        context.connect(model, layout, mesh)
        model.routing.sequences = context.SplitSequences(layout, mesh.axis("cp"))
        ways = [f"ring of {layout.ring}"] if layout.ring > 1 else []
        ways += [f"Ulysses over {layout.cp_ulysses}"] if layout.cp_ulysses > 1 else []
        log.info("context parallel: %s, %d tokens per rank", " × ".join(ways), model.model.seq_len // layout.cp)
    if layout.ep > 1:
        ep, experts = mesh.axis("ep"), model.model.moe.n_experts
        expert.cut_experts(model, ep)
        expert.connect(model, ep)
        log.info("expert parallel: %d of %d experts per rank", experts // ep.size, experts)


def _objective(model: Transformer, mesh: Mesh, layout: Layout, vocab: int) -> Objective:
    loss: Loss = cross_entropy_sum
    if mesh.axis("tp").size > 1:
        loss = partial(vocabulary.cross_entropy_sum, tp=mesh.axis("tp"), vocab=vocab)
    if not layout.loss_chunk:
        return Objective(model, loss)
    log.info("loss: the logits of %d tokens at a time", layout.loss_chunk)
    return ChunkedObjective(model, layout.loss_chunk, loss)


def _spread(
    objective: Objective,
    pieces: Pieces,
    partials: list[PartialGradients],
    job: Job,
    mesh: Mesh,
    device: torch.device,
    stages: Stages | None,
    names: Mapping[str, str],
) -> Replica:
    """Data parallelism in the layout's form. `names` are those of the plain model, where a parameter has another."""
    layout, tp = job.layout, mesh.axis("tp")
    shard = mesh.axis("shard")
    # Replicas that agree by other means (train/sync) do not sum their gradients.
    replicate = Axis("dp_replicate") if layout.apart > 1 else mesh.axis("dp_replicate")
    gradient_dtype = torch.float32 if job.train.gradients == "fp32" else None
    if shard.size > 1 and layout.zero == 3:
        replica = ShardedReplica(
            objective,
            pieces,
            tp,
            partials,
            mesh=mesh,
            replicate=replicate,
            layout=layout,
            device=device,
            gradient_dtype=gradient_dtype,
            stages={number: stage.layers for number, stage in stages.held.items()} if stages else None,
        )
        hybrid = f" × {replicate.size} replicas (HSDP)" if replicate.size > 1 else ""
        log.info("data parallel: ZeRO-3 (FSDP2) over %d ranks%s, reshard %s", shard.size, hybrid, layout.reshard)
        return replica
    objective.to_empty(device=device)
    if layout.data_parallel == "threads" and layout.dp_replicate > 1:
        if device.type != "cpu":
            raise JobError(
                f"layout.data_parallel=threads is a baseline for CPUs, this rank's device is {device}; "
                "ddp runs on both, cluster.device=cpu runs threads"
            )
        log.info("data parallel: %d threads of one process", layout.dp_replicate)
        return ThreadReplicas(objective, pieces, tp, layout.dp_replicate)
    if shard.size * replicate.size == 1:
        return Replica(objective, pieces, tp, partials)
    replica = BucketReplica(
        objective,
        pieces,
        tp,
        partials,
        shard=shard,
        replicate=replicate,
        zero=layout.zero,
        bucket_mb=layout.bucket_mb,
        gradient_dtype=gradient_dtype,
        every_micro_batch=layout.accumulate == "sharded",
        experts=(mesh.axis("ep"), mesh.axis("edp")) if layout.ep > 1 else None,
        users=lambda name: stages.users(names.get(name, name)) if stages else (0,),
        holders=lambda name: stages.holders(names.get(name, name)) if stages else (0,),
    )
    kinds = [f"ZeRO-{layout.zero} over {shard.size} ranks"] if shard.size > 1 else []
    kinds += [f"DDP over {replicate.size} ranks"] if replicate.size > 1 else []
    log.info("data parallel: %s, %s", " × ".join(kinds), counted(len(replica.buckets), "bucket"))
    return replica


def _initialise(replica: Replica, job: Job, mesh: Mesh) -> None:
    """Every rank draws the whole of one parameter after the other and takes its share; replicas take the first's."""
    for name, fragments in by_whole(replica.fragments).items():
        whole = initial_value(name, fragments[0].piece.whole, job.model, job.train.seed)
        for fragment in fragments:
            fragment.assign(whole)
            if fragment.value.numel():
                mesh.axis("dp_replicate").broadcast(fragment.value.detach()).wait()
    replica.publish()
