"""The tensors of a checkpoint."""

from pathlib import Path

from torch import Tensor

from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.shard_file import Reader


def contents(path: Path) -> dict[str, Tensor]:
    """Returns every tensor of a checkpoint, whose digests are checked, by name."""
    with Reader(check(path)) as tensors:
        return {name: tensors.read(name).clone() for name in tensors.names()}
