"""Slices of sequences that travel through a pipeline one after the other (TeraPipe: Li et al. 2021, section 3.2).

Attention is causal, so that a slice needs of those before it only their keys and values, layer by layer. In the
backward pass, which meets the slices in the opposite order, what later slices found for those keys and values is added
to a slice's own gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Earlier:
    """Keys and values of one micro-batch at one stage, of all the slices that were there so far."""

    def __init__(self) -> None:
        self.now = 0
        """The slice that is computed, or computed again."""
        self.made: list[dict[int, tuple[Tensor, Tensor]]] = []
        """By slice and layer, keys and values as they were computed."""
        self.seen: list[dict[int, tuple[Tensor, Tensor]]] = []
        """By slice and layer, the same as later slices see them: leaves, which collect their gradients."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, kv_heads, tokens, head_size) of all slices up to this one."""
        if layer not in self.made[self.now]:  # else it is the second time: recomputation
            self.made[self.now][layer] = keys, values
        before = [seen[layer] for seen in self.seen[: self.now]]
        if not before:
            return keys, values
        every_key, every_value = zip(*before, (keys, values), strict=True)
        return torch.cat(every_key, dim=2), torch.cat(every_value, dim=2)

    def begin(self, number: int) -> None:
        """Begin computing slice `number`."""
        self.now = number
        self.made.append({})

    def end(self) -> None:
        """End computing the present slice: later ones see its keys and values from now on."""
        self.seen.append({layer: (_leaf(k), _leaf(v)) for layer, (k, v) in self.made[self.now].items()})

    def again(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Begin a slice's backward pass. Returns the keys and values that later slices have seen, and their gradients
        from there."""
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
