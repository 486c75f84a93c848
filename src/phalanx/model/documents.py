"""Packed sequences: several documents in one, of which none sees another."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_PER_DOCUMENT = 128
"""Rows that flash attention adds to its buffers for every document in the backward pass."""


class PackedDocuments(NamedTuple):
    """Documents that flash attention computes in one call."""

    tokens: slice
    """Their tokens, among those of all sequences in order."""
    bounds: Tensor
    """Where each document begins, and last where all end, counted from the first token: (documents + 1,), int32."""
    longest: int
    """Tokens of the longest."""


class Documents:
    """The documents of the sequences of a batch. Each is a run of tokens."""

    def __init__(self, numbers: Tensor):
        self.numbers = numbers
        """The document number of each token, (batch, seq), int64: others in the documents before and after it."""

    @cached_property
    def packed(self) -> tuple[PackedDocuments, ...]:
        """The documents for flash attention, so many in a call that its buffers have at most twice the rows of the
        tokens. A program waits here for the device."""
        begins = F.pad(self.numbers.diff(dim=1) != 0, (1, 0), value=True).flatten().cpu()
        every = F.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel())
        most, found = max(1, begins.numel() // ROWS_PER_DOCUMENT), list[PackedDocuments]()
        for first in range(0, len(every) - 1, most):
            bounds = every[first : first + most + 1]
            tokens = slice(int(bounds[0]), int(bounds[-1]))
            counted = (bounds - tokens.start).int().to(self.numbers.device)
            found.append(PackedDocuments(tokens, counted, int(bounds.diff().max())))
        return tuple(found)

    def to(self, device: torch.device) -> Documents:
        """Copies them to a device, packed before so that nothing waits for it."""
        moved = Documents(self.numbers.to(device, non_blocking=True))
        if device.type != self.numbers.device.type:
            moved.packed = tuple(
                part._replace(bounds=part.bounds.to(device, non_blocking=True)) for part in self.packed
            )
        return moved

    def part(self, samples: slice) -> Documents:
        """Returns those of some of the sequences."""
        return Documents(self.numbers[samples])
