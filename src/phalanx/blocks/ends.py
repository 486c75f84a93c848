"""The operators outside the blocks: embedding, final norm, head and loss.

The vocabulary is cut by rows and padded to equal parts; the loss reduces three numbers per token over the tensor ranks:
the largest logit, the denominator and the target's logit (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.lora import frozen
from phalanx.blocks.operator import PLAIN, MemoryBound, Message, Operator, Weight
from phalanx.blocks.place import Place
from phalanx.blocks.residual import enter, leave, norm_weights
from phalanx.config.model import ModelConfig

VOCABULARY = PLAIN._replace(cut="rows", padded=True)
EMBEDDING_KERNELS, LOSS_KERNELS = 3, 20
LOSS_NUMBERS = 3


def embedding(place: Place, vocabulary: int) -> Operator:
    """Returns the look-up of a token's row and its sum with the position; `vocabulary` is the number of tokens in
    it."""
    model, numbers = place.model, 3 * place.hidden
    work = [MemoryBound("embedding", numbers, numbers, EMBEDDING_KERNELS)]
    if model.scaled_embedding:
        scaled = 2 * place.hidden / place.token_share
        work.append(MemoryBound("scale", scaled, scaled))
    messages = tuple(leave(place))
    if model.lora.rank:  # nothing before the first block has a gradient
        work = [each._replace(backward=0) for each in work]
        messages = tuple(each._replace(backward=0) for each in messages)
    return Operator("embedding", embedding_weights(model, vocabulary), memory_bound=tuple(work), messages=messages)


def head(place: Place, vocabulary: int) -> Iterator[Operator]:
    """Yields the final norm, the head and the loss, whose fp32 logits are read and written by the softmax and by its
    gradient."""
    model = place.model
    yield Operator(
        "final norm",
        frozen(model, norm_weights(model, "final_norm", model.d_model)),
        memory_bound=(MemoryBound("final norm", 2 * place.hidden, 3 * place.hidden),),
        messages=tuple(enter(place)),
    )
    matrix = _table("head.weight", model, vocabulary)
    yield Operator("head", frozen(model, (matrix,)), place.tokens, sixteen=True)
    logits = place.tokens * matrix.part(place.tp)
    if model.logit_softcap:
        yield Operator("soft cap", memory_bound=(MemoryBound("soft cap", 2 * logits, 3 * logits, 3),))
    yield Operator(
        "loss",
        memory_bound=(MemoryBound("loss", 8 * logits, 6 * logits, LOSS_KERNELS),),
        messages=(Message("tp", "all_reduce", LOSS_NUMBERS * place.tokens, "wide", forward=1),),
    )


def boundary(place: Place) -> Message:
    """Returns the message between two stages of a pipeline: the hidden states of a micro-batch, or of a slice of it."""
    return Message("pp", "send", place.hidden / place.slices / place.token_share, forward=1, backward=1)


def embedding_weights(model: ModelConfig, vocabulary: int) -> tuple[Weight, ...]:
    """Returns the weights of the first stage."""
    rows = _table("embed.weight", model, vocabulary)
    learned = (Weight("positions.weight", (model.seq_len, model.d_model)),) if model.positions == "learned" else ()
    return frozen(model, (rows, *learned))


def head_weights(model: ModelConfig, vocabulary: int) -> tuple[Weight, ...]:
    """Returns the weights of the last stage. A tied head has no weight of its own."""
    norm = norm_weights(model, "final_norm", model.d_model)
    head = () if model.tied else (_table("head.weight", model, vocabulary),)
    return frozen(model, (*norm, *head))


def _table(name: str, model: ModelConfig, vocabulary: int) -> Weight:
    """Returns the matrix of one end. A tied one, which both ends read, does not run in tiles."""
    return VOCABULARY._replace(name=name, shape=(vocabulary, model.d_model), tiled=not model.tied)
