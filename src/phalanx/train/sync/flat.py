"""Joins many tensors into a flat one, for a single message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a new tensor (n,) with the elements of all `tensors`, in their order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of `flat` (n,) with the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


@torch.no_grad()
def spread(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copies the elements of `join`'s result back into tensors of those shapes."""
    for tensor, part in zip(into, parts(flat, into), strict=True):
        tensor.copy_(part)
