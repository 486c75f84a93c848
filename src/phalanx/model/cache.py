"""The KV cache: with it, generating a token costs one position instead of the whole context."""

from __future__ import annotations

from torch import Tensor


class Cache:
    """Keys and values of up to `capacity` positions for every layer; allocated when a layer first writes to it."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        """Positions filled. The model advances it once all its layers have written."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values (batch, kv_heads, seq, head_size) of one layer; returns those of all positions,
        (batch, kv_heads, length + seq, head_size)."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(keys), self._empty(values))
        end = self.length + keys.shape[2]
        all_keys, all_values = self._layers[layer]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def _empty(self, like: Tensor) -> Tensor:
        batch, heads, _, size = like.shape
        return like.new_empty(batch, heads, self.capacity, size)
