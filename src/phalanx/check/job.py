"""The problems of a resolved job: all at once, each with its equation and the nearest legal values."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.check.layout import Problem, layout_problems, tensor_problems
from phalanx.check.model import model_problems
from phalanx.check.pipeline import pipeline_problems
from phalanx.check.sync import sync_problems
from phalanx.config.data import Data
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig
from phalanx.nearest import nearest, nearest_divisors

CORPORA = ("stdlib", "shakespeare_char", "text", "random")
MIN_BPE_VOCAB = 257
"""The 256 bytes and the end of text."""


def problems_of(job: Job) -> list[Problem]:
    """Returns every problem that makes a job illegal; empty if it is legal. For a layout that is left to the planner
    (layout.auto), returns the problems that no choice of the open fields could solve."""
    found = [*_ranges(job), *data_problems(job.data)]
    if found:
        return found  # the equations below would only repeat a zero or negative number in other words
    return [
        *_model(job.model),
        *(tensor_problems(job) if job.layout.auto else _whole_layout(job)),
        *_data(job),
        *_train(job),
        *_optimizer(job),
    ]


def _whole_layout(job: Job) -> Iterator[Problem]:
    """What needs all of a layout, and waits for the planner where that is to choose it."""
    yield from layout_problems(job)
    yield from pipeline_problems(job)
    yield from sync_problems(job)


def untrainable(job: Job) -> list[Problem]:
    """Returns the legal fields of a job that this version of `phalanx train` does not run."""
    if job.layout.offload == "none":
        return []
    return [("layout.offload", "this version does not run offloading; nearest legal: none")]


AT_LEAST_ONE = [
    "model.n_layers",
    "model.d_model",
    "model.n_heads",
    "model.seq_len",
    "model.moe.top_k",
    "model.moe.n_groups",
    "model.moe.top_groups",
    "cluster.nodes",
    "cluster.accelerator.cores",
    "layout.dp_replicate",
    "layout.dp_shard",
    "layout.cp",
    "layout.cp_ulysses",
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
    "model.moe.d_ff",
    "model.moe.n_shared",
    "model.moe.n_dense_layers",
    "cluster.devices_per_node",
    "cluster.peak_tflops",
    "cluster.domain",
    "cluster.pod",
    *(f"cluster.accelerator.{name}" for name in ("bf16_tflops", "fp16_tflops", "fp8_tflops", "fp4_tflops")),
    *(f"cluster.accelerator.{name}" for name in ("fp32_tflops", "memory_gib", "bandwidth_gbs", "launch_us")),
    *(f"cluster.accelerator.{name}" for name in ("product_us", "host_us")),
    *(f"cluster.sharing.{name}" for name in ("node_cores", "processes", "linked", "alone_products", "alone_streams")),
    *(f"cluster.{link}.{name}" for link in ("intra", "inter") for name in ("gbs", "latency_us")),
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
    "cluster.oversubscription",
]
SHARES = [
    *(
        f"cluster.{name}"
        for name in ("accelerator.ceiling", "accelerator.fp8_ceiling", "intra.reached", "inter.reached")
    ),
    "optimizer.min_lr_ratio",
    "optimizer.decay_fraction",
]


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


def _model(model: ModelConfig) -> Iterator[Problem]:
    if not model.head_dim and not model.mla.kv_rank and model.d_model % model.n_heads:
        yield (
            "model.n_heads",
            f"d_model {model.d_model} / n_heads {model.n_heads} is not an integer; nearest n_heads: "
            f"{nearest_divisors(model.d_model, model.n_heads)} (or set head_dim)",
        )
    if model.n_heads % model.kv_heads:
        yield (
            "model.n_kv_heads",
            f"n_heads {model.n_heads} / n_kv_heads {model.kv_heads} is not an integer; nearest n_kv_heads: "
            f"{nearest_divisors(model.n_heads, model.kv_heads)}",
        )
    if model.positions == "rope" and not model.mla.kv_rank and model.head_size % 2:
        yield "model.head_dim", f"rotary positions turn pairs: head_dim must be even, is {model.head_size}"
    if not model.dropout < 1:
        yield "model.dropout", f"must be below 1, is {model.dropout}"
    yield from model_problems(model)
    if model.rope_scaling.factor < 1:
        yield "model.rope_scaling.factor", f"must be at least 1, is {model.rope_scaling.factor}"


def data_problems(data: Data) -> Iterator[Problem]:
    """Yields the problems of the data settings by themselves; `phalanx.data` raises the same."""
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
    if data.document_mask and data.corpus == "random":
        yield (
            "data.document_mask",
            "corpus random has no documents; nearest legal: document_mask=false, or corpus=stdlib",
        )
    if data.random_tokens < 1:
        yield "data.random_tokens", f"must be at least 1, is {data.random_tokens}"
    if not 1 <= data.random_vocab <= 1 << 32:
        yield "data.random_vocab", f"must lie between 1 and {1 << 32}, is {data.random_vocab}"
    if data.workers < 0:
        yield "data.workers", f"must be a number of processes, or 0 for one per core, is {data.workers}"
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
        yield (
            "train.compile",
            "the compiler cannot trace tensor-parallel collectives; nearest legal: tp 1, or compile off",
        )
    if train.compile and job.layout.cp > 1:
        yield (
            "train.compile",
            "the compiler cannot trace context-parallel collectives; nearest legal: cp 1, or compile off",
        )
    if train.compile and job.model.moe.n_experts:
        yield (
            "train.compile",
            f"the tokens per expert (n_experts {job.model.moe.n_experts}) change from step to step, which would "
            "recompile "
            "the blocks each time; nearest legal: compile off, or n_experts 0",
        )
    if train.cpu_linear == "onednn" and (train.precision != "fp32" or train.compile or job.cluster.device == "cuda"):
        yield (
            "train.cpu_linear",
            "onednn needs precision fp32 on a CPU, without compile; auto uses it where it can",
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
            f"batch_scaling {optimizer.batch_scaling} needs the global batch for which lr was chosen",
        )
