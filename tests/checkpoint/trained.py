"""A small job for checkpoints of real runs."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.cluster import Cluster
from phalanx.config.job import Checkpoint, Data, Job, Optimizer, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig


def small_job(folder: Path, layout: Layout, precision: str) -> Job:
    """Six steps of 12 samples, with a checkpoint after the fourth."""
    return Job(
        model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=16),
        cluster=Cluster(peak_tflops=1.0),
        layout=layout,
        data=Data(corpus="random", random_tokens=5000, random_vocab=13, dir=str(folder / "data")),
        optimizer=Optimizer(lr=1e-2, warmup_steps=2),
        train=Train(steps=6, global_batch=12, precision=precision, eval_samples=10),
        checkpoint=Checkpoint(every=4, keep=0),
        run=RunOptions(name="run", dir=str(folder / "runs"), sample_tokens=0),
    )
