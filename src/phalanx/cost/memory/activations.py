"""The tensors that a block saves for its backward pass, operator by operator: a view of phalanx.blocks.

The list implies Korthikanti et al. 2022, table 2, for the GPT-2 kind with dropout (s tokens, b sequences, hidden size
h, a heads, t tensor ranks, 2 bytes per element): sbh (34 + 5as/h) without tp; sbh (10 + 24/t + 5as/ht) with tp; all of
it over t with sp; without the terms in a s with selective recomputation; 2sbh with full. As there, a norm's mean and
deviation (two bytes each) and attention's log-sum-exp (four bytes per head) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from phalanx.blocks.kinds import BlockKind, block, half_block
from phalanx.blocks.memory_profile import MemoryProfile
from phalanx.blocks.operator import Operator
from phalanx.blocks.place import Place, place_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig


@lru_cache(maxsize=4096)
def workspace(
    model: ModelConfig,
    layout: Layout,
    width: int,
    kind: BlockKind,
    profile: MemoryProfile,
    narrow: bool = False,
    documents: bool = False,
    sequences: int = 1,
    slices: int = 1,
    splits: bool = False,
) -> float:
    """Returns the bytes that the backward pass of attention needs for a moment, of a micro-batch of so many sequences,
    or of the last of its slices, less those that the second half of the block has saved and released by then, all or
    with deferred weight gradients (`splits`) all but what these need; 0 where fused kernels need none."""
    place = place_of(
        model, layout, sequences, width=width, narrow=narrow, profile=profile, documents=documents, slices=slices
    )
    needed = sum(operator.workspace for operator in half_block(place, kind, "attention"))
    if not needed:
        return 0.0
    tensors = (tensor for operator in half_block(place, kind, "feed_forward") for tensor in operator.saved)
    released = sum(tensor.size / _shares(place)[tensor.cut] for tensor in tensors)
    released -= _deferred(place, half_block(place, kind, "feed_forward")) if splits else 0.0
    return max(0.0, needed - place.tokens / slices * released)


@lru_cache(maxsize=4096)
def saved(
    model: ModelConfig,
    layout: Layout,
    width: int,
    kind: BlockKind,
    profile: MemoryProfile,
    narrow: bool = False,
    slices: int = 1,
) -> tuple[tuple[str, float], ...]:
    """Returns the operators of a block and the bytes per token that each saves on a rank, in elements of `width` bytes.
    The block recomputes as `layout.recompute` says; sequences pass in `slices`.

    Without `layout.sp_regather` the inputs of the matrices are saved whole; without dropout there are no masks, and
    torch's fused attention saves no scores. Of RMS norms see `profile.rms_copies`. Tokens are balanced over experts,
    times `profile.imbalance`. `narrow`: products are in 8 bits, which matters to frameworks that save their operands
    so.
    """
    place = place_of(model, layout, width=width, narrow=narrow, profile=profile, slices=slices)
    shares = _shares(place)
    alone = (("block input", model.d_model * width / place.token_share),)
    if layout.recompute == "full":
        every = (tensor for operator in block(place, kind) for tensor in operator.saved if slices > 1 and tensor.across)
        return alone + tuple((each.operator, each.size / shares[each.cut]) for each in every)
    selective = profile.selective if layout.recompute == "selective" else ""
    tensors = (
        tensor
        for operator in block(place, kind)
        for tensor in (operator.results if selective == "products" else operator.saved)
    )
    products = layout.recompute == "products"
    found = (
        (each.operator, (each.size - (each.cheap if products else 0)) / shares[each.cut])
        for each in tensors
        if not (selective == "core" and each.inside)
    )
    return tuple((name, size / 2) for name, size in (*alone, *found)) if selective == "layers" else tuple(found)


@lru_cache(maxsize=4096)
def deferred(model: ModelConfig, layout: Layout, width: int, kind: BlockKind) -> float:
    """Returns the bytes per token that a block keeps on a rank after the gradients of its inputs, until those of its
    weights are computed: the input of every trained matrix and the gradient of its output. All else is released then,
    scores and what norms and activations have saved among it. Inputs that tensor ranks gather are whole here."""
    place = place_of(model, layout, width=width)
    return _deferred(place, block(place, kind))


def _deferred(place: Place, operators: Iterable[Operator]) -> float:
    products = (operator.product(place.tp, place.ep) for operator in operators)
    numbers = sum(each.m * each.number * (each.n + each.k) for each in products if each and not each.frozen)
    return numbers * place.width / place.tokens


def _shares(place: Place) -> dict[str, int]:
    """Returns the number of tensor ranks that share a saved tensor, by the way in which they do."""
    gathered = place.token_share if place.regathers else 1
    return {"whole": 1, "tokens": place.token_share, "width": place.tp, "gathered": gathered}
