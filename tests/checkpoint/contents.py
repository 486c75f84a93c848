"""The tensors of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.shard_file import Reader


def contents(path: Path) -> dict[str, Tensor]:
    """Returns every tensor of a checkpoint, whose digests are checked, by name."""
    with Reader(check(path)) as tensors:
        return {name: tensors.read(name).clone() for name in tensors.names()}


def require_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fails unless both hold the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
