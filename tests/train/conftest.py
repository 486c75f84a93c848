"""What the tests of whole runs train."""

import pytest

from phalanx.config.cluster import Cluster
from phalanx.config.job import Checkpoint, Data, Job, Optimizer, RunOptions, Train
from phalanx.config.model import ModelConfig

SHAPE = ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=16)


@pytest.fixture
def job(tmp_path):
    """Twelve samples a step of a random corpus, in float64."""
    return Job(
        model=SHAPE,
        cluster=Cluster(peak_tflops=1.0),
        data=Data(corpus="random", random_tokens=5000, random_vocab=13, dir=str(tmp_path / "data")),
        optimizer=Optimizer(lr=1e-2, warmup_steps=2),
        train=Train(steps=6, global_batch=12, precision="fp64", eval_samples=10),
        checkpoint=Checkpoint(keep=0),
        run=RunOptions(name="run", dir=str(tmp_path / "runs"), sample_tokens=0),
    )
