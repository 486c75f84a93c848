"""A small job for real runs, and their checkpoints."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.cluster import Cluster
from phalanx.config.job import Checkpoint, Data, Job, Optimizer, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig

ONE_PROCESS = Layout()


def small_job(folder: Path, layout: Layout = ONE_PROCESS, precision: str = "fp64", every: int = 0) -> Job:
    """Six steps of 12 samples of a random corpus, with a checkpoint after `every` steps."""
    return Job(
        model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=16),
        cluster=Cluster(peak_tflops=1.0),
        layout=layout,
        data=Data(corpus="random", random_tokens=5000, random_vocab=13, dir=str(folder / "data")),
        optimizer=Optimizer(lr=1e-2, warmup_steps=2),
        train=Train(steps=6, global_batch=12, precision=precision, eval_samples=10),
        checkpoint=Checkpoint(every=every, keep=0),
        run=RunOptions(name="run", dir=str(folder / "runs"), sample_tokens=0),
    )
