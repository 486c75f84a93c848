"""The tensors of a checkpoint, written and read by one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.inventory import Retention, check, directory_of
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.save import KEEP_ALL, Save
from phalanx.checkpoint.shard_file import Reader
from phalanx.errors import RunError


def save_tensors(
    root: Path, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any], retention: Retention = KEEP_ALL
) -> Path:
    """Writes a checkpoint of whole tensors, which are finite, and returns its path."""
    save = Save.begin(root, step, 1, sum(tensor.nbytes for tensor in tensors.values()))
    if save is None:
        return directory_of(root, step)
    try:
        save.write(0, [Part(name, (*x.shape,), Box.of((*x.shape,)), x.detach()) for name, x in tensors.items()])
        return save.commit(meta, retention)
    except RunError:
        save.discard()
        raise


def contents(path: Path) -> dict[str, Tensor]:
    """Returns every tensor of a checkpoint, whose digests are checked, by name."""
    with Reader(check(path)) as tensors:
        return {name: tensors.read(name).clone() for name in tensors.names()}


def require_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fails unless both hold the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
