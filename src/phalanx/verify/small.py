"""The job to compare: the model itself if that is cheap, else a small one of the same kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from phalanx.blocks.kinds import alike, model_kinds
from phalanx.blocks.parameters import count
from phalanx.config import fields
from phalanx.config.cluster import Cluster
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig

CHEAP_PARAMETERS = 3_000_000
CHEAP_SEQ_LEN = 128
SMALL_LAYERS, SMALL_HEAD, SMALL_WIDTH, SMALL_SEQ_LEN, SMALL_VOCAB, SMALL_WINDOW = 2, 8, 256, 32, 251, 5
"""The vocabulary is a prime: no number of tensor ranks divides it, so that its padding is at work."""
BUCKETS = 4
"""Gradient buckets of the compared model: a real one has many, and their order matters."""
MIN_EPS = 1e-8
"""Adam's eps at least: a smaller one would amplify the rounding of gradients that are zero."""

Changes = dict[str, tuple[Any, Any]]
"""The job's value and the compared value, by dotted path."""


@dataclass(frozen=True)
class ComparedJob:
    """The job that is compared, and what it has in place of the original."""

    job: Job
    """The compared job, with a layout of one process; in float64."""
    vocab_size: int
    changes: Changes
    """The differences between both jobs; empty if the job is compared as it is."""


def compared_job(job: Job, as_is: bool, max_ranks: int) -> ComparedJob:
    """Returns the job to compare in place of `job`: smaller if the original takes too long, unless `as_is`.

    A small model has the same parts, heads and key/value heads, and its widths and experts are divisible by the same
    numbers of ranks up to `max_ranks`: the same layouts are legal for it. It runs on CPU processes unless the job asks
    for `cluster.device=cuda`.
    """
    vocab = job.model.vocab_size or SMALL_VOCAB
    small = job
    if not as_is:
        model = _small_model(job.model, vocab, max_ranks)
        vocab = model.vocab_size or SMALL_VOCAB
        bucket_mb = min(job.layout.bucket_mb, float(f"{count(model, vocab) * 8 / BUCKETS / 2**20:.3g}"))
        optimizer = replace(job.optimizer, eps=max(job.optimizer.eps, MIN_EPS))
        small = replace(job, model=model, optimizer=optimizer, layout=replace(job.layout, bucket_mb=bucket_mb))
    changes = {
        path: (fields.get(job, path), fields.get(small, path))
        for path in fields.leaves()
        if fields.get(job, path) != fields.get(small, path)
    }
    precision = "fp8" if job.train.precision == "fp8" else "fp64"
    train = replace(
        small.train, precision=precision, gradients="same", compile=False, cpu_linear="auto", global_batch=0
    )
    layout = Layout(bucket_mb=small.layout.bucket_mb)
    cluster = Cluster(device="cuda" if job.cluster.device == "cuda" else "cpu")
    return ComparedJob(replace(small, train=train, layout=layout, cluster=cluster), vocab, changes)


def _small_model(model: ModelConfig, vocab: int, max_ranks: int) -> ModelConfig:
    seq_len = model.seq_len
    if seq_len > CHEAP_SEQ_LEN:
        seq_len = alike(seq_len, SMALL_SEQ_LEN, max_ranks)
    # As large a part of the sequence, but enough keys for a softmax; never 0, which is no window.
    window = max(-(-model.window * seq_len // model.seq_len), min(model.window, SMALL_WINDOW))
    model = replace(model, seq_len=seq_len, window=window)
    if count(model, vocab) <= CHEAP_PARAMETERS:
        return model
    n_layers = min(model.n_layers, SMALL_LAYERS)
    # Of layers with and without a window at least one each.
    full_every = min(model.full_every, n_layers) if model.full_every <= model.n_layers else 0
    head = min(model.head_size, SMALL_HEAD)
    width = min(model.d_model, model.n_heads * head, SMALL_WIDTH)
    small = replace(
        model,
        n_layers=n_layers,
        full_every=full_every,
        d_model=width,
        rotary_fraction=_small_fraction(model.rotary_fraction, head),
        head_dim=head
        if not model.mla.kv_rank and (model.head_dim or width != model.n_heads * head)
        else model.head_dim,
        d_ff=alike(model.ff_size, min(model.ff_size, 2 * width), max_ranks),
        vocab_size=min(vocab, SMALL_VOCAB) if model.vocab_size else 0,
    )
    for kind in model_kinds(model):
        small = kind.shrink(model, small, max_ranks)
    return small


def _small_fraction(fraction: float, head: int) -> float:
    """Returns the share of a small head that turns: about as large a part, of whole pairs."""
    return fraction if fraction == 1 else max(2, 2 * round(head * fraction / 2)) / head
