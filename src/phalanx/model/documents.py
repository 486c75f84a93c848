"""Sequences that hold several documents, of which none sees another, or conversations and padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers import uncompiled
from phalanx.partition.documents import DocumentCut, Numbers, Places, begins_of, chunked

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

    def __init__(self, numbers: Tensor, places: Places = (), host: Numbers | None = None, place: int = 0):
        """`host` are the numbers in the host's memory, which `places` need, and `place` is this rank's."""
        self.numbers = numbers
        """The document number of each token, (batch, seq), int64: others in the documents before and after it."""
        self.places, self.host, self.place = places, host, place
        """The tokens of each position of a ring, as runs, if these go by documents; or of each cp rank, if these have
        whole documents."""
        self.cuts = dict[int, DocumentCut]()
        self.parts = dict[tuple[int | None, int | None], Documents]()
        self.by_chunk: dict[int, Documents] = {}
        """The chunks of the documents as documents, by their tokens."""

    @cached_property
    def bounds(self) -> Tensor:
        """Where each document begins, and last where all end, among the tokens of all sequences in order: (documents +
        1,), int64, on the CPU. A program waits here for the device."""
        begins = F.pad(self.numbers.diff(dim=1) != 0, (1, 0), value=True).flatten().cpu()
        return F.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel())

    @cached_property
    def bounds_there(self) -> Tensor:
        """The bounds on the device of the numbers."""
        return self.bounds.to(self.numbers.device, non_blocking=True)

    @cached_property
    def packed(self) -> tuple[PackedDocuments, ...]:
        """The documents for flash attention, so many in a call that its buffers have at most twice the rows of the
        tokens."""
        every, found = self.bounds, list[PackedDocuments]()
        most = max(1, self.numbers.numel() // ROWS_PER_DOCUMENT)
        for first in range(0, len(every) - 1, most):
            bounds = every[first : first + most + 1]
            tokens = slice(int(bounds[0]), int(bounds[-1]))
            counted = (bounds - tokens.start).int().to(self.numbers.device)
            found.append(PackedDocuments(tokens, counted, int(bounds.diff().max())))
        return tuple(found)

    def to(self, device: torch.device) -> Documents:
        """Copies them to a device, packed before so that nothing waits for it."""
        moved = Documents(self.numbers.to(device, non_blocking=True), self.places, self.host, self.place)
        if device.type != self.numbers.device.type:
            moved.bounds = self.bounds
            moved.packed = tuple(
                part._replace(bounds=part.bounds.to(device, non_blocking=True)) for part in self.packed
            )
        return moved

    def part(self, samples: slice) -> Documents:
        """Returns those of some of the sequences. The layers share them."""
        key = samples.start, samples.stop
        if key not in self.parts:
            host = None if self.host is None else self.host[samples]
            self.parts[key] = Documents(self.numbers[samples], self.places, host, self.place)
        return self.parts[key]

    @cached_property
    def local(self) -> Documents | None:
        """The documents of this place's tokens alone; None if some place has a part of one."""
        assert self.host is not None, "places come with the host's numbers"
        begins = begins_of(self.host)
        if not all(begins[:, run.start].all() for runs in self.places for run in runs):
            return None
        held = np.concatenate([np.arange(run.start, run.stop) for run in self.places[self.place]])
        return Documents(torch.from_numpy(begins[:, held].cumsum(axis=1))).to(self.numbers.device)

    def cut(self, window: int) -> DocumentCut:
        """Returns what this rank's place sees of the others' keys. The layers share it."""
        if window not in self.cuts:
            assert self.host is not None, "places come with the host's numbers"
            self.cuts[window] = DocumentCut(self.host, self.places, self.place, window)
        return self.cuts[window]


@uncompiled
def in_chunks(documents: Documents | None, size: int, keys: Tensor) -> Documents:
    """Returns chunks of `size` tokens as documents, counted from the start of each of `documents`, which are of at
    least the `keys` (batch, heads, tokens, head_size), by default of the sequences."""
    if documents is None:
        places = torch.arange(keys.shape[2], device=keys.device)
        return Documents((places // size).expand(keys.shape[0], -1))
    if size not in documents.by_chunk:
        begins = F.pad(documents.numbers.diff(dim=1) != 0, (1, 0), value=True)
        places = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
        within = places - places.where(begins, 0).cummax(1).values
        numbers = (begins | (within % size == 0)).long().cumsum(1)
        host = None if documents.host is None else chunked(documents.host, size)
        documents.by_chunk[size] = Documents(numbers, documents.places, host, documents.place)
    return documents.by_chunk[size]


class Conversations:
    """The conversations of the sequences of a batch, which routers count each for itself, and its padding, which they
    do not count.

    A batch has `rows` conversations, as if every sequence had `most`: sequence s has those from s × most on."""

    def __init__(self, numbers: Tensor, most: int, here: Tensor | None = None, first: Tensor | None = None):
        """`numbers` (batch, whole sequence), int64, is the conversation of each position within its sequence, from 0 on
        and below `most`; -1 for padding. `here` (batch, seq) are those of the tokens here, by default all; `first`
        (batch, seq or 1) is the first conversation of each one's sequence."""
        self.whole, self.most = numbers, most
        self.here = numbers if here is None else here
        self.rows = len(numbers) * most
        self.each = torch.arange(0, self.rows, most, device=numbers.device).unsqueeze(1)
        """The first conversation of each sequence, (batch, 1)."""
        self.first = self.each if first is None else first

    def at(self, places: Tensor | slice) -> Conversations:
        """Returns them with only some places of the sequences here."""
        return Conversations(self.whole, self.most, self.here[:, places])

    def part(self, samples: slice) -> Conversations:
        """Returns those of some of the sequences."""
        return Conversations(self.whole[samples], self.most, self.here[samples])

    def those(self, run: Callable[[Tensor], Tensor]) -> Conversations:
        """Returns them with only those tokens here that `run` takes of (batch, seq)."""
        return Conversations(self.whole, self.most, run(self.here), run(self.first.expand_as(self.here)))

    @property
    def real(self) -> Tensor:
        """Whether each token here is none of the padding, (batch, seq)."""
        return self.here >= 0

    @uncompiled
    def sums(self, x: Tensor) -> Tensor:
        """Returns `x` (batch, seq, n) summed over the tokens here of each conversation, (rows, n)."""
        sums = x.new_zeros(self.rows + 1, x.shape[-1])
        return sums.index_add(0, self._rows_of(self.here, self.first).flatten(), x.flatten(0, 1))[:-1]

    @uncompiled
    def counts(self, chosen: Tensor, n: int) -> Tensor:
        """Returns how often each of `n` values occurs in `chosen` (batch, seq, m) in each conversation, (rows, n)."""
        places = n * self._rows_of(self.here, self.first).unsqueeze(-1) + chosen
        counts = chosen.new_zeros((self.rows + 1) * n)
        return counts.scatter_add_(0, places.flatten(), torch.ones_like(chosen).flatten()).view(-1, n)[:-1]

    def lengths(self) -> Tensor:
        """Returns the tokens of the conversation at each position of the whole sequences, (batch, whole sequence); 0 at
        padding."""
        rows = self._rows_of(self.whole, self.each)
        counts = rows.new_zeros(self.rows + 1).scatter_add_(0, rows.flatten(), (self.whole >= 0).long().flatten())
        return counts[rows]

    def begins(self) -> Tensor:
        """Returns the position at which the conversation of each position begins, (batch, whole sequence)."""
        places = torch.arange(self.whole.shape[1], device=self.whole.device).expand_as(self.whole)
        return places.where(F.pad(self.whole.diff(dim=1) != 0, (1, 0), value=True), 0).cummax(1).values

    def _rows_of(self, numbers: Tensor, first: Tensor) -> Tensor:
        """Returns the row of the conversation of each of `numbers` (batch, n), those of whose sequence begin with
        `first`; `rows` for padding."""
        return (first + numbers).where(numbers >= 0, self.rows)
