"""Digests of tensors: exact 64-bit hashes of their bits, computed on the device at the speed of its memory.

A tensor's bits are read as a matrix of 64-bit words, about as wide as it is high. The sums of its rows and of its
columns, modulo 2^64, differ after any change of one, two or three words, so after any flipped bit and any two words
that change places: a changed word that is alone in its row changes the row's sum, and of three words at least one is
alone in its row or in its column. The sums, a few thousand for a million elements, are then hashed with a weight for
each place. Two reads of the tensor are all the work that grows with it, and nothing of its size is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # odd: 2^64 / golden ratio, and splitmix64's
_LOW_BITS = 0xFFFFFFFF


@torch.no_grad()
def digests(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the digest of every tensor, (len(tensors),) of int64 on `device`; 0 for None.

    Tensors of equal bits and shapes have equal digests, on any device. Different ones have different digests, but for
    one chance in 2^63."""
    entries: list[Tensor] = []
    lengths: list[int] = []
    for tensor in tensors:
        # Offloaded state is summed on its host.
        parts = [] if tensor is None else [part.to(device) for part in _sums(words(tensor))]
        entries += parts
        lengths.append(sum(part.numel() for part in parts))
    result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if not entries:
        return result
    values = torch.cat(entries)
    owners = torch.repeat_interleave(torch.tensor(lengths, device=device), output_size=len(values))
    # Places count from the start of each tensor, so that a digest does not depend on the tensors beside it.
    starts = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
    places = torch.arange(len(values), device=device) - starts[owners]
    weights = _mixed(places + 1) | 1
    return result.index_add_(0, owners, _mixed(values + weights) * weights)


def words(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as 64-bit words, (n,) of int64: a view where it fills whole words."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    if flat.is_contiguous() and not flat.nbytes % 8 and not flat.storage_offset() * size % 8:
        return flat.view(torch.int64)
    padded = torch.zeros(-(-flat.nbytes // 8), dtype=torch.int64, device=flat.device)
    padded.view(flat.dtype)[: flat.numel()].copy_(flat)
    return padded


def _sums(bits: Tensor) -> list[Tensor]:
    """Returns the sums of rows and of columns of the words (n,) as a matrix, and the words that fill no row."""
    width = 1 << (len(bits).bit_length() // 2)
    whole = len(bits) // width * width
    matrix = bits[:whole].view(-1, width)
    return [matrix.sum(1), matrix.sum(0), bits[whole:]]


def _mixed(x: Tensor) -> Tensor:
    """Returns a bijective hash of 64-bit words (the steps of splitmix64: Steele et al. 2014)."""
    for multiplier in _MULTIPLIERS:
        x = (x ^ ((x >> 32) & _LOW_BITS)) * multiplier
    return x ^ ((x >> 32) & _LOW_BITS)
