"""The KV cache: with it, generating a token costs one position instead of the whole context.

The sequences of a batch end in the same column, so that new queries are always those of the last columns, and a shorter
sequence begins in a later column. Attention needs no form of its own for that: the columns before a sequence are
another document.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.blocks.attention import SPARE_COLUMNS, cache_columns
from phalanx.model.documents import Documents


class Cache:
    """Keys and values of up to `capacity` positions for every layer; allocated when a layer first writes to it."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        """Columns filled: positions of the longest sequence. The model advances it once all its layers have written."""
        self.starts: list[int] = []
        """The column in which each sequence begins; empty where all begin in the first."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def lengths(self) -> list[int]:
        """Positions of each sequence; empty where all have `length`."""
        return [self.length - start for start in self.starts]

    @property
    def is_ragged(self) -> bool:
        """Whether some sequence begins in a later column than the first."""
        return any(self.starts)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values (batch, kv_heads, seq, head_size) of one layer; returns those of all positions,
        (batch, kv_heads, length + seq, head_size)."""
        end = self.length + keys.shape[2]
        old = self._layers.get(layer)
        if old is None or old[0].shape[2] < end:
            self._layers[layer] = (self._room(keys, end, old, 0), self._room(values, end, old, 1))
        all_keys, all_values = self._layers[layer]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def positions(self, seq: int, device: torch.device) -> Tensor:
        """Returns the positions of the next `seq` tokens: (seq,), or (batch, seq) where sequences differ in length."""
        columns = torch.arange(self.length, self.length + seq, device=device)
        if not self.is_ragged:
            return columns
        return columns - torch.tensor(self.starts, device=device)[:, None]

    def documents(self, seq: int, device: torch.device) -> Documents | None:
        """Returns which columns are a sequence's own, with the next `seq` tokens, as document 1 of 0 and 1. None where
        all columns are."""
        if not self.is_ragged:
            return None
        columns = torch.arange(self.length + seq, device=device)
        return Documents((columns >= torch.tensor(self.starts, device=device)[:, None]).long())

    def append(self, other: Cache, copies: int = 1) -> None:
        """Appends the sequences of `other`, each `copies` times in a row."""
        rows = [(other, row) for row in range(other._batch) for _ in range(copies)]
        self._rebuild([(self, row) for row in range(self._batch)] + rows)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the sequences `rows` in this order, and forgets the others."""
        if list(rows) != list(range(self._batch)):
            self._rebuild([(self, row) for row in rows])

    def take(self, row: int) -> Cache:
        """Returns a cache of the sequence `row` alone, a copy."""
        alone = Cache(self.capacity)
        alone._rebuild([(self, row)])
        return alone

    def rewind(self, dropped: Sequence[int]) -> None:
        """Forgets the last positions of each sequence, `dropped` of them; one number for each sequence."""
        fewest = min(dropped)
        starts = self.starts or [0] * len(dropped)
        for row, more in enumerate(dropped):
            if more > fewest:  # its end moves right, to the common last column
                shift, first, end = more - fewest, starts[row], self.length - more
                for pair in self._layers.values():
                    for tensor in pair:
                        tensor[row, :, first + shift : end + shift] = tensor[row, :, first:end].clone()
        self.starts = [start + more - fewest for start, more in zip(starts, dropped, strict=True)]
        self.length -= fewest
        if min(self.starts) > SPARE_COLUMNS // 2:
            self._rebuild([(self, row) for row in range(len(dropped))])

    def tensors(self) -> list[Tensor]:
        """Returns the keys and values of every layer."""
        return [tensor for pair in self._layers.values() for tensor in pair]

    @property
    def _batch(self) -> int:
        return next(iter(self._layers.values()))[0].shape[0] if self._layers else 0

    def _room(self, like: Tensor, end: int, old: tuple[Tensor, Tensor] | None, which: int) -> Tensor:
        """Returns room for at least `end` columns, with those that are filled."""
        batch, heads, _, size = like.shape
        made = like.new_empty(batch, heads, cache_columns(end, self.capacity), size)
        if old:
            made[:, :, : self.length] = old[which][:, :, : self.length]
        return made

    def _rebuild(self, rows: Sequence[tuple[Cache, int]]) -> None:
        """Makes the sequences of several caches those of this one, in this order. One layer after the other moves."""
        firsts = [cache.starts[row] if cache.starts else 0 for cache, row in rows]
        lengths = [cache.length - first for (cache, _), first in zip(rows, firsts, strict=True)]
        longest = max(lengths, default=0)
        together: dict[tuple[Cache, int, int], tuple[list[int], list[int]]] = {}
        for place, ((cache, row), first, length) in enumerate(zip(rows, firsts, lengths, strict=True)):
            places, sources = together.setdefault((cache, first, length), ([], []))
            places.append(place)
            sources.append(row)
        for layer in list(rows[0][0]._layers) if rows else ():
            made = []
            for which in (0, 1):
                like = rows[0][0]._layers[layer][which]
                columns = cache_columns(max(longest + 1, like.shape[2]), self.capacity)
                tensor = like.new_zeros(len(rows), like.shape[1], columns, like.shape[3])
                for (cache, first, length), (places, sources) in together.items():
                    source = cache._layers[layer][which][:, :, first : first + length]
                    tensor[places, :, longest - length : longest] = source[sources]
                made.append(tensor)
            self._layers[layer] = (made[0], made[1])
        self._layers = self._layers if rows else {}
        self.length, self.starts = longest, [longest - length for length in lengths]
