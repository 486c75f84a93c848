"""A run's directory as training leaves it, without the training."""

from __future__ import annotations

from pathlib import Path

from checkpoint.contents import save_tensors
from model.kinds import build
from phalanx.check.load import as_dict
from phalanx.config.job import Data, Job, Train
from phalanx.config.model import ModelConfig
from phalanx.data.tokenizer import NumberTokenizer
from phalanx.model.transformer import Transformer


def write_run(path: Path, model: ModelConfig, data: Data | None = None) -> Transformer:
    """A run of a model in float64, whose texts are numbers. Returns the model."""
    transformer = build(model)
    job = Job(model=model, train=Train(precision="fp64"), data=data or Data())
    meta = {"job": as_dict(job), "vocab_size": model.vocab_size}
    save_tensors(path / "checkpoints", 1, dict(transformer.named_parameters()), meta)
    NumberTokenizer(model.vocab_size).save(path)
    (path / "config.yaml").touch()
    return transformer
