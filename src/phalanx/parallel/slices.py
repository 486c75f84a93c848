"""Slices of sequences that pass through a pipeline one after the other (TeraPipe: Li et al. 2021, section 3.2).

Attention is causal, so a slice needs only the keys and values of earlier slices, layer by layer. In the backward pass,
which visits the slices in reverse order, the gradients that later slices contribute to those keys and values are added
to a slice's own.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Earlier:
    """Keys and values of one micro-batch at one stage, of all slices processed so far."""

    def __init__(self) -> None:
        self.now = 0
        """The slice being computed or recomputed."""
        self.made: list[dict[int, tuple[Tensor, Tensor]]] = []
        """Keys and values as computed, by slice and layer."""
        self.seen: list[dict[int, tuple[Tensor, Tensor]]] = []
        """Keys and values as later slices see them, by slice and layer: leaves, which accumulate their gradients."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values (batch, kv_heads, tokens, head_size) of all slices up to this one."""
        if layer not in self.made[self.now]:  # otherwise this is recomputation
            self.made[self.now][layer] = keys, values
        before = [seen[layer] for seen in self.seen[: self.now]]
        if not before:
            return keys, values
        every_key, every_value = zip(*before, (keys, values), strict=True)
        return torch.cat(every_key, dim=2), torch.cat(every_value, dim=2)

    def begin(self, number: int) -> None:
        """Begins computing slice `number`."""
        self.now = number
        self.made.append({})

    def end(self) -> None:
        """Ends computing the current slice: later ones see its keys and values from now on."""
        self.seen.append({layer: (_leaf(k), _leaf(v)) for layer, (k, v) in self.made[self.now].items()})

    def again(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Begins a slice's backward pass. Returns the keys and values that later slices have seen, and the gradients
        that these contributed."""
        self.now = number
        del self.made[number + 1 :]
        made, seen = self.made[number], self.seen.pop()
        roots, gradients = [], []
        for layer, pair in made.items():
            for tensor, leaf in zip(pair, seen[layer], strict=True):
                if leaf.grad is not None:
                    roots.append(tensor)
                    gradients.append(leaf.grad)
        return roots, gradients


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
