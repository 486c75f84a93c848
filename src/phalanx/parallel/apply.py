"""The one function that turns a plain model into a parallel one: the techniques, in the order in which they compose."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from phalanx.blocks.parameters import weight_of
from phalanx.comm.axis import Axis
from phalanx.comm.calls import name_modules
from phalanx.config.corpora import has_pairs, has_prompts
from phalanx.config.dispatchers import DISPATCHERS
from phalanx.config.job import Job
from phalanx.config.precision import FP8_UNITS
from phalanx.cost.job_spec import rank_spec
from phalanx.errors import JobError
from phalanx.model.layers import allocate, prepare_compiler
from phalanx.model.seeding import initialise_part
from phalanx.model.sparse import Indexer
from phalanx.model.transformer import Transformer
from phalanx.optimizers.catalogue import granularity_of
from phalanx.parallel import context, expert, redundant, tensor
from phalanx.parallel.compiled import compile_blocks, keep_compiled, missing
from phalanx.parallel.compression import CompressedSum
from phalanx.parallel.data import GradientSum, LocalModel, PartialGradients, Replica, TensorSlices, ThreadReplicas
from phalanx.parallel.linear import (
    DeferredWeightGrads,
    ScaledProduct,
    defer_weight_grads,
    onednn_is_faster,
    use_onednn,
    use_scaled,
)
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import Objective, PairLoss, PolicyLoss
from phalanx.parallel.offload import Host, offload_activations, on_host
from phalanx.parallel.pipeline import PipeDream, Pipeline, StashingPipeline
from phalanx.parallel.recompute import recompute
from phalanx.parallel.stages import Stages
from phalanx.parallel.tiling import project_tiles, tile
from phalanx.parallel.vocabulary import CrossEntropy, HeadTile, ScoreLoss, TiledHead
from phalanx.parallel.zero import BucketReplica
from phalanx.partition import derived as batch
from phalanx.partition.cut import describe, layer_costs, stages_of
from phalanx.partition.derived import (
    Mode,
    gathers_parameters,
    is_copied,
    is_offloaded,
    recompute_of,
    schedule_of,
    stashes,
    written,
)
from phalanx.partition.tensor_slices import padded_vocabulary
from phalanx.registry import package_code
from phalanx.techniques.catalogue import OWN, TECHNIQUES, techniques_of
from phalanx.techniques.memory import compiles, refusal
from phalanx.units import counted

log = logging.getLogger(__name__)


def apply(model: Transformer, job: Job, mesh: Mesh, device: torch.device, host: Host | None = None) -> Replica:
    """Applies the job's techniques to `model`, which is on the meta device, and initialises it on `device`; what it
    offloads goes to `host`, by default one of its own.

    Each technique does nothing unless the job asks for it, and otherwise logs one line on rank 0. Techniques that
    remove or cut layers come first, then those that replace a layer's kernels, then wrappers of blocks, then data
    parallelism. Raises JobError for threads on a device other than a CPU.
    """
    parts = Construction(model, job, mesh, device, host or Host(device))
    parts.log("mesh: %s", mesh)
    if parts.compiled or device.type != "cpu":  # optimizers have kernels that are compiled for it
        keep_compiled()
    apply_pipeline(parts)
    apply_tensor_parallel(parts)
    apply_context_parallel(parts)
    apply_expert_parallel(parts)
    sum_between_stages(parts)
    apply_techniques(parts, "layers")
    apply_deferred_weight_grads(parts)
    apply_techniques(parts, "blocks")
    objective = apply_loss(parts)
    replica = apply_data_parallel(parts, objective)
    run_by_schedule(parts, replica)
    initialise(replica, job)
    if not parts.compiled:
        name_modules(parts.model)
    return replica


@dataclass
class Construction:
    """A model under construction: the state that one technique passes to the next."""

    model: Transformer
    job: Job
    mesh: Mesh
    device: torch.device
    host: Host
    vocab: int = field(init=False)
    """Vocabulary size in tokens, without padding."""
    dtype: torch.dtype = field(init=False)
    """The parameters' type."""
    compiled: bool = field(init=False)
    """What train.compile stands for on this device."""
    stages: Stages | None = None
    """This rank's part of the pipeline."""
    p2p_groups: tuple[Axis, Axis] | None = None
    """The pipeline's process groups for messages, Mesh.p2p_groups("pp"); None without a pipeline."""
    deferred: DeferredWeightGrads | None = None
    """Takes weight gradients if backward passes are split."""
    parallel: tensor.TensorParallel | None = None
    """The cut over the tp axis, if it has several ranks."""
    tensor_slices: TensorSlices = field(default_factory=dict)
    partials: list[PartialGradients] = field(default_factory=list)
    plain_names: dict[str, str] = field(default_factory=dict)
    """Plain-model names of the parameters that are renamed: those of tiles."""
    deferring: set[nn.Module] = field(default_factory=set)
    """Linear layers that already leave their weight gradients to `deferred`."""

    def __post_init__(self) -> None:
        self.vocab, self.dtype = self.model.embed.num_embeddings, self.model.embed.weight.dtype
        self.compiled = compiles(self.job, self.device.type) and not missing(self.device)
        if self.job.layout.loss_chunk == "auto" or not isinstance(self.job.layout.recompute, str):
            self.job = replace(self.job, layout=rank_spec(self.job, self.vocab, self.device.type).layout)

    @property
    def loss(self) -> CrossEntropy:
        """The cross-entropy of the job, without its logits' product."""
        cap, smoothing = self.model.config.logit_softcap, self.job.train.label_smoothing
        return CrossEntropy(self.mesh.axis("tp"), self.vocab, cap, smoothing)

    def log(self, line: str, *values: object) -> None:
        """Logs a line once for all ranks."""
        log.log(logging.INFO if self.mesh.axis("world").rank == 0 else logging.DEBUG, line, *values)


def apply_techniques(parts: Construction, stage: str) -> None:
    """Applies the techniques of a stage in the order of their catalogue, packages' after the project's own."""
    for name, technique in techniques_of(parts.job).items():
        if technique.stage == stage and technique.apply is not None and (name in OWN or technique.is_on(parts.job)):
            with (
                nullcontext() if name in OWN else package_code(f"technique {name!r} of {TECHNIQUES.owner(name)} failed")
            ):
                TECHNIQUES.code(name, "apply")(parts)
        if stage == "blocks" and name not in OWN and technique.is_on(parts.job):
            parts.log("%s: %s", name, technique.title)


def apply_pipeline(parts: Construction) -> None:
    """Removes the layers of other ranks' stages from the model."""
    job, mesh, vocab = parts.job, parts.mesh, parts.vocab
    if job.layout.pp == 1:
        return
    accumulation = batch.solve(job.train.global_batch, job.layout).accumulation
    schedule = schedule_of(job.layout, accumulation)
    cut = stages_of(job.model, job.layout, schedule.stages, vocab)
    parts.stages = Stages(schedule, mesh.coordinates["pp"], job.model, vocab, cut)
    parts.stages.keep(parts.model)
    # All ranks of the axis make these groups, so before those that only some of them make.
    parts.p2p_groups = mesh.p2p_groups("pp")
    # If no backward pass is split, autograd's own accumulation is about 2 % faster.
    parts.deferred = DeferredWeightGrads() if schedule.splits else None
    costs = layer_costs(job.model, vocab)
    parts.log("pipeline: %s, %d micro-batches, %s", schedule.name, accumulation, describe(cut, costs))


def apply_tensor_parallel(parts: Construction) -> None:
    """Cuts matrices over the tp axis, and with `sp` also the tokens between them."""
    model, mesh, layout, tp = parts.model, parts.mesh, parts.job.layout, parts.mesh.axis("tp")
    slices = parts.tensor_slices = tensor.cut_parameters(model, tp, folds=layout.folds)
    if tp.size == 1:
        return
    n_layers = parts.job.model.n_layers
    recomputes: dict[str, Mode] = {layer: recompute_of(layout, int(layer), n_layers) for layer in model.blocks}
    parallel = parts.parallel = tensor.TensorParallel(
        *(tp, layout.sp, layout.sp_regather, parts.deferred, layout.folds),
        halved=batch.halved(parts.job.train.global_batch, layout),
    )
    parts.deferring |= tensor.connect(model, parallel, recomputes)
    line = [f"tensor parallel: {tp.size} ranks"]
    if padding := padded_vocabulary(parts.vocab, tp.size) - parts.vocab:
        line.append(f"vocabulary {parts.vocab} + {padding} padding")
    cut = {name: own[0] for name, own in slices.items() if own[0].dim is not None}
    if (copies := max(own.copies for own in cut.values())) > 1:
        shared = frozenset(name for name, own in cut.items() if own.copies > 1)
        parts.partials.append(PartialGradients(mesh.neighbours("tp", copies), shared))
        line.append(f"each key/value head on {copies} ranks")
    config, folds = parts.model.config, layout.folds
    summed = frozenset(name for name in slices if weight_of(config, name).folded(folds).is_summed(layout.sp))
    parts.partials.append(PartialGradients(tp, summed))
    if layout.sp:
        line.append(f"sequence parallel with {parts.job.model.seq_len // tp.size} tokens of each sequence per rank")
    parts.log("%s", ", ".join(line))


def apply_context_parallel(parts: Construction) -> None:
    """Gives each cp rank a part of every sequence's tokens."""
    layout = parts.job.layout
    if layout.cp == 1:
        return
    context.connect(parts.model, parts.mesh, layout)
    parts.model.routing.sequences = context.SplitSequences(layout, parts.mesh.axis("cp"))
    ways = [f"ring of {layout.ring}"] if layout.ring > 1 else []
    ways += [f"Ulysses over {layout.cp_ulysses}"] if layout.cp_ulysses > 1 else []
    tokens = parts.job.model.seq_len // layout.cp
    parts.log("context parallel: %s, %d tokens per rank", " × ".join(ways), tokens)


def apply_expert_parallel(parts: Construction) -> None:
    """Gives each ep rank some of the routed experts."""
    layout = parts.job.layout
    if layout.ep == 1:
        return
    ep, experts = parts.mesh.axis("ep"), parts.job.model.moe.n_experts
    expert.cut_experts(parts.model, layout.ep_shard)
    name, axes = layout.dispatch, (ep, parts.mesh.axis("ep_near"), parts.mesh.axis("ep_far"))
    with package_code(f"dispatcher {name!r} of {DISPATCHERS.owner(name)} failed", passing=(JobError,)):
        dispatch = expert.dispatcher(name, parts.device)(*axes)
    if layout.redundant_experts:
        dispatch = redundant.connect(parts.model, dispatch, layout.redundant_experts)
    expert.connect(parts.model, dispatch, layout)
    if layout.ep_overlap:
        expert.overlap_halves(parts.model, parts.parallel, parts.deferred)
    whole = "" if name == "rows" else f", sent by {name}"
    if layout.folds:
        routing = parts.model.routing
        halved = batch.halved(parts.job.train.global_batch, layout)
        routing.sequences = expert.FoldedSequences(routing.sequences, parts.mesh.axis("tp"), halved)
        whole = f", whole ones on each of {layout.tp} tensor ranks"
    whole += f", tokens inside {layout.ep_node} ranks first, then between {layout.ep_nodes}" * (layout.ep_nodes > 1)
    whole += ", while the other half of the sequences computes" * layout.ep_overlap
    copies = layout.redundant_experts
    whole += f", and {counted(copies, 'redundant expert')}" if copies else ""
    parts.log("expert parallel: %d of %d experts per rank%s", experts // ep.size, experts, whole)


def sum_between_stages(parts: Construction) -> None:
    """Sums the gradients of parameters that several pipeline ranks hold: of a tied embedding, and with a second
    direction of all parameters."""
    if parts.stages is None:
        return
    names: dict[tuple[int, ...], set[str]] = {}
    for name in parts.tensor_slices:
        if len(ranks := tuple(sorted(parts.stages.holders(name)))) > 1:
            names.setdefault(ranks, set()).add(name)
    for ranks, shared in sorted(names.items()):
        parts.partials.append(PartialGradients(parts.mesh.among("pp", ranks), frozenset(shared)))


def apply_tiling(parts: Construction) -> None:
    """Runs large matrices in tiles: those of blocks, embedding and head."""
    layout = parts.job.layout
    if layout.tiles == 1:
        return
    parts.tensor_slices, parts.plain_names = tile(parts.model, parts.tensor_slices, layout, parts.loss)
    parts.deferring -= project_tiles(parts.model)
    # A tile of the head has no logits whose gradient could wait.
    parts.deferring |= {module for module in parts.model.modules() if isinstance(module, HeadTile)}
    parts.log("tiles: %d parameters in %d tiles each", len(set(parts.plain_names.values())), layout.tiles)


def apply_number_format(parts: Construction) -> None:
    """Makes linear layers multiply in the job's number format, by the library that it asks for."""
    apply_onednn(parts)
    apply_fp8(parts)


def apply_onednn(parts: Construction) -> None:
    """Replaces the product of linear layers, on CPUs where oneDNN's is faster."""
    wanted = parts.job.train.cpu_linear
    chosen = wanted == "auto" and not parts.compiled and onednn_is_faster(parts.device, parts.dtype)
    if chosen or wanted == "onednn":
        parts.log("linear layers: %d use oneDNN", use_onednn(parts.model))


def apply_fp8(parts: Construction) -> None:
    """Makes the linear layers of blocks multiply in 8 bits."""
    train = parts.job.train
    if train.precision != "fp8":
        return
    product = ScaledProduct.on(parts.device, train.fp8_scaling, parts.dtype)
    if parts.compiled:  # also where products are outside of the blocks' graphs, as between collectives
        prepare_compiler()
        product = product.compiled()
    taken, left = use_scaled(parts.model, product)
    how = "emulated, " if product.emulated else ""
    parts.log("fp8: %s, %s%s scales", counted(len(taken), "linear layer"), how, train.fp8_scaling)
    unit = FP8_UNITS[train.fp8_scaling]
    for kernel, reason in ((True, f"whose sizes are no multiples of {unit}"), (False, "which have no kernel here")):
        if names := [name for name in left if (product.grouped or ".experts." not in name) == kernel]:
            parts.log("fp8: in bf16, %s: %s", reason, ", ".join(names))


def apply_deferred_weight_grads(parts: Construction) -> None:
    """Makes layers leave their weight gradients to the second half of the backward pass, if it has two."""
    if parts.deferred is None:
        return
    deferring = set(parts.deferring)
    if parts.job.layout.loss_chunk:
        deferring.add(parts.model.head)  # it processes its tokens in chunks but has a single gradient
    for index in (module for module in parts.model.modules() if isinstance(module, Indexer)):
        deferring |= set(index.modules())  # what they read has no gradient, by which alone they would be reached
    defer_weight_grads((module for module in parts.model.modules() if module not in deferring), parts.deferred)


def apply_recompute(parts: Construction) -> None:
    """Saves only the inputs of blocks, or of their attention cores, or what products write."""
    layout = parts.job.layout
    if written(layout) != "none":
        modules = recompute(parts.model, layout, compiled=parts.compiled)
        parts.log("recompute: %s, %d modules here", written(layout), modules)


def apply_offload(parts: Construction) -> None:
    """Moves what blocks save for the backward pass to the host."""
    layout = parts.job.layout
    if is_offloaded(layout, "activations"):
        stages = [range(parts.job.model.n_layers)] if parts.stages is None else parts.stages.cut
        moved = offload_activations(parts.model, layout, stages, parts.host)
        parts.log("offload: activations of %s on the host", counted(moved, "block"))


def apply_compile(parts: Construction) -> None:
    """Compiles the blocks, those of a kind by the same graphs, the embedding and the final norm."""
    model, wanted = parts.model, parts.job.train.compile
    if wanted is True and (reason := missing(parts.device)):
        raise JobError(f"train.compile: {reason}; nearest legal: train.compile=auto, which leaves it off")
    if not parts.compiled:
        if wanted == "auto" and parts.device.type != "cpu":
            parts.log("compile: off, %s", refusal(parts.job) or missing(parts.device))
        return
    kinds = compile_blocks(model, exchanged=parts.job.layout.ep > 1)
    parts.log("compile: %d blocks of %s, embedding and final norm", len(model.blocks), counted(kinds, "kind"))


def apply_loss(parts: Construction) -> Objective:
    """Adds the loss to the model: over a cut vocabulary if needed, and with `loss_chunk` for some tokens at a time."""
    chunk, train, cp = int(parts.job.layout.loss_chunk), parts.job.train, parts.mesh.axis("cp")
    if parts.job.model.reward:
        parts.log("loss: rewards of pairs (Bradley-Terry)")
        return Objective(parts.model, ScoreLoss(parts.mesh.axis("tp")), PairLoss(replace(train.dpo, beta=1.0), cp))
    compared = PairLoss(train.dpo, cp) if has_pairs(parts.job.data) else None
    compared = PolicyLoss(train.grpo, cp) if has_prompts(parts.job.data) else compared
    if compared:
        parts.log("loss: %s, %s", "DPO" if isinstance(compared, PairLoss) else "GRPO", compared.options.line())
    loss = parts.loss
    if loss.smoothing:
        parts.log("loss: label smoothing %g, in training", loss.smoothing)
    if chunk:
        parts.log("loss: the logits of %d tokens at a time", chunk)
    if parts.compiled and not isinstance(parts.model.head, TiledHead):  # fused with its cast
        loss = replace(loss, compute=torch.compile(loss.compute))
        parts.log("compile: the loss")
    mtp_weight = parts.job.train.mtp_weight
    if depths := parts.model.config.mtp:
        parts.log("loss: %s × the mean of %s", f"{mtp_weight:g}", counted(depths, "module") + " for further tokens")
    return Objective(parts.model, loss, compared, chunk, mtp_weight)


def apply_data_parallel(parts: Construction, objective: Objective) -> Replica:
    """Distributes the model over the data ranks in the layout's form, and allocates it."""
    job, layout, mesh, device = parts.job, parts.job.layout, parts.mesh, parts.device
    model = LocalModel(objective, parts.tensor_slices, mesh.axis("tp"), parts.partials, parts.plain_names, parts.stages)
    sums = GradientSum(
        shard=mesh.axis("shard"),
        # Replicas that synchronize otherwise (train/sync) do not sum their gradients.
        replicate=Axis("dp_replicate") if layout.sync != "bsp" else mesh.axis("replicas"),
        dtype=torch.float32 if job.train.gradients == "fp32" else None,
        every_micro_batch=layout.accumulate == "sharded",
        granularity=granularity_of(job.optimizer),
        experts=(mesh.axis("ep").rank // (layout.tp if layout.folds else 1), mesh.axis("edp"))
        if layout.ep > 1
        else None,
    )
    shards, replicas = sums.shard.size, sums.replicate.size
    if gathers_parameters(layout):
        from phalanx.parallel.fsdp import ShardedReplica  # a second, for those who gather

        replica = ShardedReplica(model, sums, mesh, layout, parts.host)
        _compress(parts, replica, sums)
        hybrid = f" × {replicas} replicas (HSDP)" if replicas > 1 else ""
        hybrid += ", shards in host memory" if is_offloaded(layout, "parameters") else ""
        copied = f", a second copy on every {layout.hpz} ranks (hpZ)" if is_copied(layout) else ""
        how = {"none": "", "int8": ", gathered as int8 (qwZ)", "fp8": ", matrices of blocks gathered in fp8"}
        copied += how[layout.quantise_weights]
        copied += f", reduced as {layout.quantise_gradients} (qgZ)" if layout.quantise_gradients != "none" else ""
        parts.log("data parallel: ZeRO-3 (FSDP2) over %d ranks%s, reshard %s%s", shards, hybrid, layout.reshard, copied)
        return replica
    allocate(objective, device)
    if layout.data_parallel == "threads" and layout.dp_replicate > 1:
        if device.type != "cpu":
            raise JobError(
                f"layout.data_parallel=threads is a baseline for CPUs, this rank's device is {device}; "
                "ddp runs on both, cluster.device=cpu runs threads"
            )
        parts.log("data parallel: %d threads of one process", layout.dp_replicate)
        return ThreadReplicas(model, layout.dp_replicate)
    if shards * replicas == 1:
        return Replica(model)
    replica = BucketReplica(model, sums, zero=layout.zero, bucket_mb=layout.bucket_mb)
    _compress(parts, replica, sums)
    kinds = [f"ZeRO-{layout.zero} over {shards} ranks"] if shards > 1 else []
    kinds += [f"DDP over {replicas} ranks"] if replicas > 1 else []
    parts.log("data parallel: %s, %s", " × ".join(kinds), counted(len(replica.buckets), "bucket"))
    return replica


def _compress(parts: Construction, replica: Replica, sums: GradientSum) -> None:
    """Makes replicas compress the gradients that they sum."""
    layout = parts.job.layout
    # FSDP2 sums over the replicas of the mesh only.
    plain = layout.compression == "none" and not (gathers_parameters(layout) and layout.dp_replicate == 1)
    if plain or sums.replicate.size == 1:
        return
    width = (sums.dtype or replica.shards[0].value.dtype).itemsize
    replica.compress(CompressedSum(sums.replicate, layout, parts.job.train.seed, replica.shards, width))
    if layout.compression == "none":
        return
    how = f"PowerSGD of rank {layout.compression_rank}" if layout.compression == "powersgd" else layout.compression
    start = f" from step {layout.compression_start + 1} on" if layout.compression_start else ""
    parts.log("data parallel: replicas sum matrices' gradients as %s%s", how, start)


def run_by_schedule(parts: Construction, replica: Replica) -> None:
    """Makes the pipeline's schedule run the replica's micro-batches."""
    if parts.stages is None or parts.p2p_groups is None:
        return
    token_parts = parts.mesh.axis("tp").size if parts.job.layout.sp else 1
    kind = StashingPipeline if stashes(parts.job.layout) else Pipeline
    kind = kind if parts.stages.schedule.steps == 1 else PipeDream
    deferred = parts.deferred or DeferredWeightGrads()
    replica.runner = kind(replica, parts.stages, parts.p2p_groups, deferred, token_parts, parts.device)
    replica.runner.schedules = partial(schedule_of, parts.job.layout)


def initialise(replica: Replica, job: Job) -> None:
    """Draws the elements of every shard that this rank holds, where they live: equal on all ranks that hold them."""
    for shard in replica.shards:
        whole = shard.tensor_slice.whole
        with on_host():  # as nothing else is there yet, a few temporary numbers need no room of the device's budget
            initialise_part(shard.value.detach(), shard.whole_name, whole, job.model, job.train.seed, shard.places)
    replica.publish(frozen=True)
