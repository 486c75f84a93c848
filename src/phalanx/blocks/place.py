"""One rank's part of a micro-batch: everything in a job that determines the sizes of an operator."""

from __future__ import annotations

from typing import Literal, NamedTuple

from phalanx.blocks.memory_profile import PHALANX, MemoryProfile
from phalanx.blocks.operator import Message
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig

INDEX = 8
"""Bytes of a count, an expert's number or an index into a tensor (int64)."""
Half = Literal["attention", "feed_forward"]
"""The halves of a block."""
WIDE = 4
"""Least bytes per element of losses, routers and sums over attention (fp32)."""


class Place(NamedTuple):
    """A tensor, context and expert rank with a micro-batch of `sequences` sequences."""

    model: ModelConfig
    tp: int = 1
    sp: bool = False
    sp_regather: bool = False
    ring: int = 1
    ulysses: int = 1
    ep: int = 1
    sequences: int = 1
    conversations: int = 1
    """The most conversations that are packed into a sequence, which routers count each for itself."""
    slices: int = 1
    """Slices into which pipelined sequences are cut."""
    width: int = 2
    """Bytes per element of an activation."""
    narrow: bool = False
    """Whether matrix products are in 8 bits, which matters to frameworks that save their operands so."""
    profile: MemoryProfile = PHALANX
    documents: bool = False
    """Whether attention must not cross documents."""
    window: int = 0
    """Keys that a query of this layer sees at most, fewer than the sequence has; 0: all. Set by the kind of block."""
    ring_rank: int | None = None
    """Position in the ring, on which messages depend with a window; None: a position with the most bytes."""
    tiled: frozenset[str] = frozenset()
    """Layers that run in tiles, by the names of `layout.tile`."""
    exchange: Literal["both", "enter", "leave"] = "both"
    """Messages between the residual stream and a half of a block: off it and onto it, or in a parallel block off it
    before the first half and onto it after the second. Set by the kind of block."""

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def tokens(self) -> int:
        """Tokens of the sequences on this context rank."""
        return -(-self.sequences * self.model.seq_len // self.cp)

    @property
    def token_share(self) -> int:
        """Number of tensor ranks that share the tokens between the matrices."""
        return self.tp if self.sp else 1

    @property
    def hidden(self) -> int:
        """Elements of the residual stream of these tokens, all tensor ranks' shares together."""
        return self.tokens * self.model.d_model

    @property
    def read(self) -> int:
        """Bytes per element of the saved operand of a matrix product."""
        return 1 if self.narrow and self.profile.keeps_narrow else self.width

    @property
    def regathers(self) -> bool:
        """Whether gathered inputs are dropped after the forward pass and gathered again in the backward pass. What a
        parallel block gathers is the input of its norms, not of matrices."""
        return (self.sp_regather or self.profile.regathers) and not self.model.parallel_block

    def repeats_input(self, size: float, *, regathered: bool = True) -> float:
        """Returns the part of the `size` of a matrix's input that recompute=products computes again: a norm's output,
        unless tensor ranks gather it and the backward pass does not gather it again (`regathered`: as with
        `sp_regather`)."""
        gathered = self.sp and not self.model.parallel_block and not (regathered and self.regathers)
        return size if self.model.norms_inputs and not gathered else 0

    def bytes_of(self, message: Message) -> float:
        """Returns the bytes of a message's tensor."""
        widths = {"activation": self.width, "wide": max(self.width, WIDE), "index": INDEX}
        return message.elements * widths[message.number]

    def ranks_of(self, message: Message) -> int:
        """Returns how many ranks a message's collective joins; for a send, the size of the ring."""
        return {"tp": self.tp, "ring": self.ring, "ulysses": self.ulysses, "cp": self.cp, "ep": self.ep}[message.axis]


def place_of(
    model: ModelConfig,
    layout: Layout,
    sequences: int = 1,
    *,
    width: int = 2,
    narrow: bool = False,
    slices: int = 1,
    profile: MemoryProfile = PHALANX,
    documents: bool = False,
    ring_rank: int | None = None,
    conversations: int = 1,
) -> Place:
    """Returns the place of a rank under a layout."""
    return Place(
        model,
        layout.tp,
        layout.sp,
        layout.sp_regather,
        layout.ring,
        layout.cp_ulysses,
        layout.ep,
        sequences,
        conversations,
        slices,
        width,
        narrow,
        profile,
        documents,
        ring_rank=ring_rank,
        tiled=layout.tiled_layers if layout.tiles > 1 else frozenset(),
    )
