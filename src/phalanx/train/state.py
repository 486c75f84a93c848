"""What a run is at one moment: the weights, the optimizer, and how far it has come; saved and put back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import CheckpointError
from phalanx.job.job import Job
from phalanx.job.show import as_dict
from phalanx.model.transformer import Transformer
from phalanx.parallel.precision import LossScale
from phalanx.train import checkpoint
from phalanx.train.optimizer import AdamW


@dataclass
class State:
    """All that the next step depends on."""

    model: Transformer
    optimizer: AdamW
    loss_scale: LossScale
    data_fingerprint: str
    """Of the token shards: a run does not go on with other data."""
    step: int = 0
    """Steps done."""
    samples: int = 0
    """Sequences read, which is the place in the order of samples."""
    val_loss: float | None = None
    """The last validation loss."""

    def save(self, root: Path, job: Job) -> Path:
        """Write a checkpoint. Raises RunError."""
        groups = {"model": dict(self.model.named_parameters()), "optimizer": self.optimizer.state_tensors()}
        meta: dict[str, Any] = {
            "job": as_dict(job),
            "samples": self.samples,
            "updates": self.optimizer.updates,
            "loss_scale": self.loss_scale.state(),
            "data": self.data_fingerprint,
            "vocab_size": self.model.embed.num_embeddings,
            "val_loss": self.val_loss,
        }
        return checkpoint.save(root, self.step, groups, meta, job.checkpoint.keep)

    def load(self, path: Path, verify: bool) -> None:
        """Become what the checkpoint holds. Raises CheckpointError where it is damaged or belongs to other data."""
        manifest, groups = checkpoint.load(path, verify)
        meta = manifest.meta
        if meta["data"] != self.data_fingerprint:
            raise CheckpointError(
                f"checkpoint {path} was trained on other data (shards {meta['data'][:12]}…, now "
                f"{self.data_fingerprint[:12]}…); restore the corpus, or start over with --fresh"
            )
        load_parameters(self.model, groups["model"], path)
        self.optimizer.load_state_tensors(groups["optimizer"], meta["updates"])
        self.loss_scale.load_state(meta["loss_scale"])
        self.step, self.samples, self.val_loss = manifest.step, meta["samples"], meta["val_loss"]


@torch.no_grad()
def load_parameters(model: Transformer, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Fill a model's parameters. Raises CheckpointError with every name that is missing, extra or of another shape."""
    parameters = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in parameters.keys() - tensors.keys()]
    wrong += [f"{name} is not in the model" for name in tensors.keys() - parameters.keys()]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)} there and {tuple(parameters[name].shape)} here"
        for name in parameters.keys() & tensors.keys()
        if tensors[name].shape != parameters[name].shape
    ]
    if wrong:
        raise CheckpointError(f"checkpoint {path} does not fit the model: {'; '.join(sorted(wrong))}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
