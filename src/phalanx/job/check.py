"""What a resolved job gets wrong: every problem at once, each with its equation and the nearest legal values."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.job import batch
from phalanx.job.check_pipeline import pipeline_problems
from phalanx.job.check_sync import sync_problems
from phalanx.job.data import Data
from phalanx.job.fields import get
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.nearest import nearest, nearest_divisors, nearest_of

CORPORA = ("stdlib", "shakespeare_char", "text", "random")
MIN_BPE_VOCAB = 257
"""The 256 bytes and the end of text."""

Problem = tuple[str, str]
"""The dotted path of the field at fault, and the message."""


def problems_of(job: Job) -> list[Problem]:
    """Everything that no run of this job could get past. Empty where the job is legal."""
    found = [*_ranges(job), *data_problems(job.data)]
    if found:
        return found  # the equations below would only repeat a zero or negative number in other words
    return [
        *_model(job.model),
        *_layout(job),
        *_batch(job),
        *pipeline_problems(job),
        *_data(job),
        *_train(job),
        *_optimizer(job),
        *sync_problems(job),
    ]


def untrainable(job: Job) -> list[Problem]:
    """The legal parts of a job that this version of `phalanx train` does not run yet."""
    layout, found = job.layout, []
    later = {
        "cp": "context parallel",
        "ep": "expert parallel",
    }
    for axis, technique in later.items():
        if getattr(layout, axis) > 1:
            found.append(
                (
                    f"layout.{axis}",
                    f"{technique} ({axis} {getattr(layout, axis)}) is not trained by this version; nearest layout that "
                    f"is: {axis} 1, dp_replicate {layout.world}",
                )
            )
    if layout.offload != "none":
        found.append(("layout.offload", "offloading is not done by this version; the layout that is: none"))
    return [*found, *untrainable_shape(job.model)]


def untrainable_shape(model: Model) -> Iterator[Problem]:
    """The parts of a model that are counted (parameters, FLOPs) but not computed by this version."""
    if model.moe.n_experts:
        yield (
            "model.moe.n_experts",
            f"mixture of experts ({model.moe.n_experts}) is not trainable in this version (parameters and FLOPs are "
            "counted); 0 gives a dense MLP",
        )
    if model.mla.kv_rank:
        yield (
            "model.mla.kv_rank",
            f"latent attention (rank {model.mla.kv_rank}) is not trainable in this version (parameters and FLOPs are "
            "counted); 0 gives ordinary attention",
        )


AT_LEAST_ONE = [
    "model.n_layers",
    "model.d_model",
    "model.n_heads",
    "model.seq_len",
    "cluster.nodes",
    "layout.dp_replicate",
    "layout.dp_shard",
    "layout.cp",
    "layout.tp",
    "layout.pp",
    "layout.ep",
    "layout.tiles",
    "layout.sync_every",
    "train.steps",
    "train.log_every",
]
AT_LEAST_ZERO = [
    "model.n_kv_heads",
    "model.head_dim",
    "model.d_ff",
    "model.vocab_size",
    "model.dropout",
    "model.moe.n_experts",
    "cluster.devices_per_node",
    "cluster.peak_tflops",
    "layout.pp_chunks",
    "layout.pp_slices",
    "layout.micro_batch",
    "layout.accumulation",
    "layout.loss_chunk",
    "optimizer.weight_decay",
    "optimizer.clip",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.base_batch",
    "train.global_batch",
    "train.eval_every",
    "train.eval_samples",
    "checkpoint.every",
    "checkpoint.keep",
    "run.threads",
    "run.sample_tokens",
    "train.seed",
]
POSITIVE = [
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.outer_lr",
    "model.norm_eps",
    "model.rope_theta",
    "run.timeout_s",
    "layout.bucket_mb",
]
SHARES = ["optimizer.min_lr_ratio", "optimizer.decay_fraction"]


def _ranges(job: Job) -> Iterator[Problem]:
    for path in AT_LEAST_ONE:
        if get(job, path) < 1:
            yield path, f"must be at least 1, is {get(job, path)}"
    for path in AT_LEAST_ZERO:
        if get(job, path) < 0:
            yield path, f"must not be negative, is {get(job, path)}"
    for path in POSITIVE:
        if get(job, path) <= 0:
            yield path, f"must be above 0, is {get(job, path)}"
    for path in SHARES:
        if not 0 <= get(job, path) <= 1:
            yield path, f"must lie between 0 and 1, is {get(job, path)}"


def _model(model: Model) -> Iterator[Problem]:
    if not model.head_dim and not model.mla.kv_rank and model.d_model % model.n_heads:
        yield (
            "model.n_heads",
            f"d_model {model.d_model} / n_heads {model.n_heads} is not whole; nearest n_heads: "
            f"{nearest_divisors(model.d_model, model.n_heads)} (or set head_dim)",
        )
    if model.n_heads % model.kv_heads:
        yield (
            "model.n_kv_heads",
            f"n_heads {model.n_heads} / n_kv_heads {model.kv_heads} is not whole; nearest n_kv_heads: "
            f"{nearest_divisors(model.n_heads, model.kv_heads)}",
        )
    if model.positions == "rope" and model.head_size % 2:
        yield "model.head_dim", f"rotary positions turn pairs: head_dim must be even, is {model.head_size}"
    if not model.dropout < 1:
        yield "model.dropout", f"must be below 1, is {model.dropout}"
    if model.moe.n_experts and not 1 <= model.moe.top_k <= model.moe.n_experts:
        yield (
            "model.moe.top_k",
            f"must lie between 1 and n_experts {model.moe.n_experts}, is {model.moe.top_k}",
        )
    if model.rope_scaling.factor < 1:
        yield "model.rope_scaling.factor", f"must be at least 1, is {model.rope_scaling.factor}"


def _layout(job: Job) -> Iterator[Problem]:
    layout, model = job.layout, job.model
    if model.n_heads % layout.tp:
        yield (
            "layout.tp",
            f"n_heads {model.n_heads} / tp {layout.tp} is not whole; nearest tp: "
            f"{nearest_divisors(model.n_heads, layout.tp)}",
        )
    if model.ff_size % layout.tp:
        yield (
            "layout.tp",
            f"MLP width {model.ff_size} / tp {layout.tp} is not whole; nearest tp: "
            f"{nearest_divisors(model.ff_size, layout.tp)}",
        )
    kv_heads = model.kv_heads
    if model.n_heads % layout.tp == 0 and kv_heads % layout.tp and layout.tp % kv_heads:
        legal = [
            tp
            for tp in range(1, model.n_heads + 1)
            if model.n_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
        ]
        yield (
            "layout.tp",
            f"tp {layout.tp} neither divides the n_kv_heads {kv_heads} nor is a multiple of them; nearest tp: "
            f"{nearest_of(legal, layout.tp)}",
        )
    if layout.sp and model.seq_len % layout.tp:
        yield (
            "layout.sp",
            f"sequence parallel: seq_len {model.seq_len} / tp {layout.tp} is not whole; nearest tp: "
            f"{nearest_divisors(model.seq_len, layout.tp)}, or sp=false",
        )
    if layout.sp_regather and not layout.sp:
        yield "layout.sp_regather", "is a part of sequence parallel: sp=true, or leave it out"
    if layout.tiles > 1 and layout.tp > 1:
        yield "layout.tiles", f"tiles {layout.tiles} go with tp 1, tp is {layout.tp}: tiles=1, or tp=1"
    if model.ff_size % layout.tiles:
        yield (
            "layout.tiles",
            f"MLP width {model.ff_size} / tiles {layout.tiles} is not whole; nearest tiles: "
            f"{nearest_divisors(model.ff_size, layout.tiles)}",
        )
    if layout.accumulate == "sharded" and layout.zero == 1:
        yield "layout.accumulate", "sharded gradients need zero 2 or 3, zero is 1; local goes with any"
    if model.seq_len % layout.cp:
        yield (
            "layout.cp",
            f"seq_len {model.seq_len} / cp {layout.cp} is not whole; nearest cp: "
            f"{nearest_divisors(model.seq_len, layout.cp)}",
        )
    if (layout.dp_shard * layout.cp) % layout.ep:
        yield (
            "layout.ep",
            f"ep is taken from dp_shard {layout.dp_shard} × cp {layout.cp} = {layout.dp_shard * layout.cp}, which ep "
            f"{layout.ep} does not divide; nearest ep: {nearest_divisors(layout.dp_shard * layout.cp, layout.ep)}",
        )
    if layout.data_parallel == "threads" and layout.world != layout.dp_replicate:
        yield "layout.data_parallel", f"threads goes with dp_replicate alone, not with {layout.line()}"
    yield from _world(layout, job.cluster.nodes, job.cluster.devices_per_node)


def _world(layout: Layout, nodes: int, devices_per_node: int) -> Iterator[Problem]:
    product = (
        f"dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × cp {layout.cp} × tp {layout.tp} × pp "
        f"{layout.pp} = {layout.world}"
    )
    if not devices_per_node:
        if layout.world % nodes:
            yield "cluster.nodes", f"{product} devices do not divide by nodes {nodes}"
        return
    devices = nodes * devices_per_node
    if layout.world != devices:
        others = layout.world // layout.dp_replicate
        fits = devices // others
        legal = (
            f"dp_replicate={fits} makes it {devices}"
            if fits and devices % others == 0
            else f"the axes without dp_replicate make {others}, which must divide {devices}"
        )
        yield (
            "layout",
            f"{product}, but the cluster has nodes {nodes} × devices {devices_per_node} = {devices}; {legal}",
        )


def _batch(job: Job) -> Iterator[Problem]:
    try:
        batch.solve(job.train.global_batch, job.layout)
    except ValueError as error:
        yield "train.global_batch" if job.train.global_batch else "layout", str(error)


def data_problems(data: Data) -> Iterator[Problem]:
    """What makes no sense in data settings by themselves: `phalanx.data` refuses them for the same reasons."""
    if data.corpus not in CORPORA:
        meant = nearest(data.corpus, CORPORA)
        hint = f"; did you mean {meant}?" if meant else ""
        yield (
            "data.corpus",
            f"no corpus {data.corpus!r}{hint} (known: {', '.join(CORPORA)}; your own: corpus text and path)",
        )
    if data.corpus == "text" and not data.path:
        yield "data.path", "corpus text needs the path of a text or JSONL file, or a folder of them"
    if not 0 <= data.val_fraction < 1:
        yield "data.val_fraction", f"must be at least 0 and below 1, is {data.val_fraction}"
    if not 0 <= data.limit_mb < 1e12:
        yield "data.limit_mb", f"must be a number of megabytes, or 0 for all, is {data.limit_mb}"
    if data.tokenizer == "bpe" and data.bpe_vocab < MIN_BPE_VOCAB:
        yield (
            "data.bpe_vocab",
            f"must be at least {MIN_BPE_VOCAB} (the 256 bytes and the end of text), is {data.bpe_vocab}",
        )
    if data.random_tokens < 1:
        yield "data.random_tokens", f"must be at least 1, is {data.random_tokens}"
    if not 1 <= data.random_vocab <= 1 << 32:
        yield "data.random_vocab", f"must lie between 1 and {1 << 32}, is {data.random_vocab}"
    if data.workers < 0:
        yield "data.workers", f"must be a number of processes, or 0 for one a core, is {data.workers}"
    if data.prefetch < 0:
        yield "data.prefetch", f"must be a number of steps, is {data.prefetch}"


def _data(job: Job) -> Iterator[Problem]:
    if job.train.eval_samples and not job.data.val_fraction:
        yield (
            "data.val_fraction",
            f"is 0, but train.eval_samples is {job.train.eval_samples}: set one above 0 or the other to 0",
        )
    if job.data.corpus == "random" and 0 < job.model.vocab_size < job.data.random_vocab:
        yield (
            "data.random_vocab",
            f"is {job.data.random_vocab}, but the model's vocabulary has {job.model.vocab_size}",
        )


def _train(job: Job) -> Iterator[Problem]:
    train = job.train
    if train.compile and job.layout.tp > 1:
        yield "train.compile", "the compiler does not see through tensor parallel's collectives: tp 1, or compile off"
    if train.cpu_linear == "onednn" and (train.precision != "fp32" or train.compile or job.cluster.device == "cuda"):
        yield (
            "train.cpu_linear",
            "onednn goes with precision fp32 on a CPU, without compile; auto takes it where it can",
        )


def _optimizer(job: Job) -> Iterator[Problem]:
    optimizer = job.optimizer
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield "optimizer.betas", f"must lie in [0, 1), are {optimizer.betas}"
    if optimizer.warmup_steps > job.train.steps:
        yield (
            "optimizer.warmup_steps",
            f"warmup_steps {optimizer.warmup_steps} is more than train.steps {job.train.steps}",
        )
    if optimizer.batch_scaling != "none" and not optimizer.base_batch:
        yield (
            "optimizer.base_batch",
            f"batch_scaling {optimizer.batch_scaling} needs the batch for which lr was chosen",
        )
