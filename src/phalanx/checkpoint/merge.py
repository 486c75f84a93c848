"""Merges the adapters of a checkpoint into their matrices: W + alpha / rank · B A (Hu et al. 2022, section 4.1).

The result reads like a checkpoint of the model without adapters, one tensor or a box of one at a time: conversions and
exports need not know of adapters.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Tensor

from phalanx.blocks.residual import A, B, is_adapter
from phalanx.checkpoint.boxes import Box
from phalanx.checkpoint.manifest import kind_of
from phalanx.checkpoint.meta import job_of
from phalanx.checkpoint.reader import Reader
from phalanx.config.model import LoRA
from phalanx.errors import CheckpointError


def merged(source: Reader) -> Reader:
    """Returns the parameters of a checkpoint with its adapters merged into their matrices; without adapters `source`
    itself, optimizer state included. Raises CheckpointError if the checkpoint states no job that this version reads."""
    meta = source.manifest.meta
    if not any(is_adapter(name) for name in source.manifest.tensors):
        return source
    if "job" not in meta:
        raise CheckpointError(
            f"{source.manifest.path} has adapters and no job, which states their alpha: merge them from the run's own "
            "checkpoint, or from what phalanx checkpoint convert has written"
        )
    return MergedReader(source)


class MergedReader(Reader):
    """The tensors of the model without adapters."""

    def __init__(self, source: Reader):
        manifest = source.manifest
        self.source, job = source, job_of(manifest)
        self.scale = job.model.lora.scale
        tensors = {
            name: tensor for name, tensor in manifest.tensors.items() if not kind_of(name) and not is_adapter(name)
        }
        model = manifest.meta["job"]["model"] | {"lora": asdict(LoRA())}
        meta = manifest.meta | {"job": manifest.meta["job"] | {"model": model}}
        super().__init__(replace(manifest, meta=meta, tensors=tensors))

    def __exit__(self, *error: object) -> None:
        self.source.__exit__(*error)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"checkpoint {self.manifest.path} has no parameter {name}")
        base, layer = self.source.read(name, box), name.removesuffix(".weight")
        shapes = self.source.manifest.tensors
        if (adapter := f"{layer}.{A}.weight") not in shapes:
            return base
        box = box or Box.of(shapes[name].shape)
        rank = shapes[adapter].shape[-2]
        *stack, rows, columns = zip(box.offsets, box.sizes, strict=True)
        a = self.source.read(adapter, _box(*stack, (0, rank), columns))
        b = self.source.read(f"{layer}.{B}.weight", _box(*stack, rows, (0, rank)))
        wide = torch.promote_types(base.dtype, torch.float32)
        return (base.to(wide) + self.scale * (b.to(wide) @ a.to(wide))).to(base.dtype)


def _box(*ranges: tuple[int, int]) -> Box:
    """Returns the box of some ranges, (offset, size) of each dimension."""
    offsets, sizes = zip(*ranges, strict=True)
    return Box(offsets, sizes)
