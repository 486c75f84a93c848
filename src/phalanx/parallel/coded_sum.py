"""The sum of gradients that are sent as codes (ZeRO++'s qgZ: Wang et al. 2023, section 3.3).

A reduce-scatter cannot add codes, so ranks exchange them by all-to-all and add numbers. Inside a node each rank gets
the shares of the ranks at its own place in every node, and adds what its neighbours have. Only these sums cross to
other nodes, again as codes. So gradients are rounded twice, not once per step of a ring: with s the scale of an
element's block, its sum is off by at most s/2 of every rank's gradient and s/2 of every node's sum, all added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.parallel.codec import Codec


class CodedSum:
    """The ranks that sum gradients: `near` inside a node, then `across` nodes; both have one rank if all of `shard`
    exchange at once."""

    def __init__(self, shard: Axis, near: Axis, across: Axis):
        self.near = near
        self.across = across if across.size > 1 else shard

    def reduce_scatter(self, part: Tensor, whole: Tensor, codec: Codec) -> Pending:
        """Sets `part` (n,) to this rank's part of the sum of all ranks' `whole` (ranks × n,), as Axis.reduce_scatter
        does. Numbers are added in fp32 or wider, in rank order."""
        nodes, near = self.across.size, self.near.size
        codes = codec.encode(whole.view(nodes * near, -1))
        return _Hops(self, part, codes.view(nodes, near, -1).transpose(0, 1).flatten(0, 1), codec)

    def exchange(self, axis: Axis, sent: Tensor) -> tuple[Pending, Tensor]:
        """Starts an all-to-all of rows of bytes. Returns it with what arrives."""
        received = torch.empty_like(sent)
        return axis.all_to_all(received, sent), received


class _Hops:
    """A sum of codes in flight: the second exchange begins once the first is awaited."""

    def __init__(self, ranks: CodedSum, part: Tensor, sent: Tensor, codec: Codec):
        self.ranks, self.part, self.codec = ranks, part, codec
        self.sent = sent
        first = ranks.near if ranks.near.size > 1 else ranks.across
        self.pending, self.received = ranks.exchange(first, sent)

    def wait(self) -> None:
        """Returns once the sum is there."""
        self.pending.wait()
        ranks = self.ranks
        if ranks.near.size > 1:
            sums = self._added(ranks.near.size)
            self.pending, self.received = ranks.exchange(ranks.across, self.codec.encode(sums))
            self.pending.wait()
        self.part.copy_(self._added(ranks.across.size).view(-1))

    def _added(self, ranks: int) -> Tensor:
        """Returns the sums (rows / ranks, n) of what `ranks` ranks have sent."""
        numbers = self.part.new_empty(len(self.received), self.codec.elements)
        self.codec.decode(self.received, numbers)
        wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
        return numbers.view(ranks, -1, numbers.shape[1]).sum(0, dtype=wide).to(numbers.dtype)
