"""Shapes and types of an optimizer's state tensors."""

from __future__ import annotations

import torch

from phalanx.config.optimizer import Optimizer
from phalanx.optimizers.catalogue import state_tensors
from phalanx.parallel.parameter_shards import ParameterShard

DTYPES = {1: torch.uint8}
"""Types of state with a stated number of bytes per element; the rest has the optimizer's precision."""


def state_shapes(
    config: Optimizer, shard: ParameterShard, precision: torch.dtype
) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
    """Returns shape, type and elements per block of the state tensors of a shard, by kind, besides its master, which
    has the optimizer's `precision`: the shard's own shape, or (elements / block,)."""
    found = {}
    for kind in state_tensors(config, shard.whole_name, shard.tensor_slice.whole):
        numbers = shard.value.numel() // kind.block
        shape = shard.value.shape if kind.block == 1 else torch.Size([numbers])
        found[kind.kind] = shape, DTYPES[kind.bytes] if kind.bytes else precision, kind.block
    return found
