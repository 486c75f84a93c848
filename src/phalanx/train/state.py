"""The state of a run: weights, optimizer and progress, saved to a checkpoint and loaded from one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.parameters import parameter_shapes
from phalanx.check.show import as_dict
from phalanx.comm.agree import on_rank_zero
from phalanx.errors import CheckpointError
from phalanx.parallel.parameter_shards import by_whole, wholes
from phalanx.train import checkpoint
from phalanx.train.optimizer import MOMENTS
from phalanx.train.step import Stepper


@dataclass
class TrainState:
    """The complete state that determines the next step."""

    stepper: Stepper
    data_fingerprint: str
    """Identifies the token shards: a run does not resume with other data."""
    vocab_size: int
    step: int = 0
    """Steps done."""
    samples: int = 0
    """Sequences read: the position in the order of samples."""
    val_loss: float | None = None
    """The last validation loss."""

    def advance(self, step: int, global_batch: int) -> None:
        """Records that `step` steps are done, each over `global_batch` sequences since the last call."""
        self.samples += (step - self.step) * global_batch
        self.step = step

    def save(self, root: Path) -> Path:
        """Writes a checkpoint, together with all other ranks. Raises RunError."""
        stepper = self.stepper
        groups = {"model": self._whole("", {f.name: f.value for f in stepper.replica.shards}), "optimizer": {}}
        for kind, tensors in stepper.optimizer.state_tensors().items():
            if not tensors:
                continue  # sync=asp: only the first replica, which serves, has an optimizer
            groups["optimizer"] |= self._whole(f"{kind}/", tensors)
            for replica in range(1, self.replicas if kind in MOMENTS else 1):
                theirs = self._of_replica(replica, tensors)
                groups["optimizer"] |= self._whole(f"replica{replica}/{kind}/", theirs)
        for kind, tensors in stepper.sync.state_tensors().items() if stepper.sync else ():
            groups["optimizer"] |= self._whole(f"{kind}/", tensors)
        meta: dict[str, Any] = {
            "job": as_dict(stepper.job),
            "samples": self.samples,
            "updates": stepper.optimizer.updates,
            "replicas": self.replicas,
            "loss_scale": stepper.loss_scale.state(),
            "data": self.data_fingerprint,
            "vocab_size": self.vocab_size,
            "val_loss": self.val_loss,
        }
        keep = stepper.job.checkpoint.keep
        return Path(on_rank_zero(lambda: str(checkpoint.save(root, self.step, groups, meta, keep))))

    def load(self, path: Path) -> None:
        """Restores the state from a checkpoint, whose digests have been checked. Raises CheckpointError if it is
        damaged or belongs to other data or another model."""
        manifest = checkpoint.check(path, verify=False)
        meta = manifest.meta
        if meta["data"] != self.data_fingerprint:
            raise CheckpointError(
                f"checkpoint {path} was trained on other data (shards {meta['data'][:12]}…, now "
                f"{self.data_fingerprint[:12]}…); restore the corpus, or start over with --fresh"
            )
        parameters = by_whole(self.stepper.replica.shards)
        with checkpoint.Reader(manifest, "model") as tensors:
            tensors.require(parameter_shapes(self.stepper.job.model, self.vocab_size))
            for name, shards in parameters.items():
                whole = tensors[name]
                for shard in shards:
                    shard.assign(whole)
        optimizer, sync = self.stepper.optimizer, self.stepper.sync
        # With another number of replicas, each takes the moments of one in turn.
        replica = self.stepper.mesh.coordinates["dp_replicate"] % meta.get("replicas", 1) if sync else 0
        own = f"replica{replica}/" if replica else ""
        updated = by_whole(optimizer.shards)
        with checkpoint.Reader(manifest, "optimizer") as tensors:
            saved = set(tensors.names())
            groups = {
                (own if kind in MOMENTS else "") + kind: tensors_of_kind
                for kind, tensors_of_kind in optimizer.make_state(meta["updates"]).items()
            }
            # A run that becomes DiLoCo begins without an outer momentum.
            outer = sync.state_tensors() if sync else {}
            groups |= {
                kind: tensors_of_kind for kind, tensors_of_kind in outer.items() if _all_there(kind, updated, saved)
            }
            for kind, tensors_of_kind in groups.items():
                for name, shards in updated.items():
                    whole = tensors[f"{kind}/{name}"]
                    for shard in shards:
                        shard.assign(whole, into=tensors_of_kind[shard.name])
        self.stepper.reload()
        self.stepper.loss_scale.load_state(meta["loss_scale"])
        self.step, self.samples, self.val_loss = manifest.step, meta["samples"], meta["val_loss"]

    @property
    def replicas(self) -> int:
        """The number of replicas whose moments differ."""
        return self.stepper.independent_replicas if self.stepper.sync else 1

    def _of_replica(self, replica: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors that the rank at this one's place in another replica holds."""
        tensors_of_replica = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for tensor in tensors_of_replica.values():
            if tensor.numel():
                self.stepper.mesh.axis("dp_replicate").broadcast(tensor, replica).wait()
        return tensors_of_replica

    def _whole(self, prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Reassembles the tensors of all ranks' shards: on rank 0, nothing elsewhere."""
        replica, mesh = self.stepper.replica, self.stepper.mesh
        keep = mesh.axis("world").rank == 0
        return {prefix + name: tensor for name, tensor in wholes(replica.shards, tensors, mesh, keep)}


def _all_there(kind: str, names: Iterable[str], saved: set[str]) -> bool:
    return all(f"{kind}/{name}" in saved for name in names)
