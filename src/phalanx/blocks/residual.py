"""The operators between the matrices: norms, residual sums, and the messages on and off the residual stream.

Tensor parallelism: an all-reduce of the residual stream after each half of a block in the forward pass, and before it
in the backward pass (Shoeybi et al. 2019, section 3); with sequence parallelism each is an all-gather and a
reduce-scatter (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from phalanx.blocks.operator import PLAIN, WIDE, Half, MemoryBound, Message, Operator, Place, SavedTensor, Weight
from phalanx.config.model import LoRA, ModelConfig

A, B = "lora_a", "lora_b"
"""The adapter's layers, inside the linear layer of their matrix."""
INDEX = "attn.index."
"""How the names of an indexer's weights begin (blocks/sparse.py)."""
EVERY = "all"
"""The target that stands for every matrix."""


def is_adapter(name: str) -> bool:
    """Returns whether a parameter belongs to an adapter."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def frozen(model: ModelConfig, weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Returns weights that are not an adapter's: frozen if the model has adapters, or if its indexer alone is
    trained."""
    if not model.freezes:
        return tuple(weights)
    own = INDEX if model.warms_up else A
    return tuple(weight if weight.name.startswith(own) else weight._replace(frozen=True) for weight in weights)


def layer_of(name: str) -> str:
    """Returns the name within its block of the layer that a weight belongs to: "moe.shared.up" of
    "moe.shared.up.weight"."""
    return name.rpartition(".")[0]


def names_of(layer: str) -> list[str]:
    """Returns the names by which targets may mean a layer: "moe.shared.up", "shared.up" and "up"."""
    parts = layer.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def can_adapt(weight: Weight) -> bool:
    """Returns whether a weight of a block's half may have an adapter: the matrix of any linear layer but a router."""
    return weight.is_matrix and not layer_of(weight.name).endswith("router")


def is_target(lora: LoRA, half: Half, layer: str) -> bool:
    """Returns whether a linear layer of a half of a block, such as "attn.wq" or "moe.shared.up", has an adapter."""
    return bool(lora.rank) and not {EVERY, half, *names_of(layer)}.isdisjoint(lora.names)


def saved_input(place: Place, half: Half, *layers: str) -> int:
    """Returns the bytes per element of the input of some linear layers that is saved for the gradients of their
    weights: none if they are frozen and have no adapters, which read the same."""
    lora = place.model.lora
    return place.read if not place.model.freezes or any(is_target(lora, half, layer) for layer in layers) else 0


def targets(place: Place, half: Half, operators: Iterable[Operator]) -> Iterator[str]:
    """Yields the linear layers with adapters among the operators of a half of a block, without adapters themselves."""
    for operator in operators:
        yield from (
            layer_of(weight.name) for weight in operator.weights if _has_adapter(place.model.lora, half, weight)
        )


def _has_adapter(lora: LoRA, half: Half, weight: Weight) -> bool:
    return can_adapt(weight) and is_target(lora, half, layer_of(weight.name))


def adapted(place: Place, half: Half, operators: Iterable[Operator]) -> Iterator[Operator]:
    """Yields the operators of a half of a block with their weights frozen, each followed by the adapters of those that
    are targets; without adapters the operators themselves."""
    lora = place.model.lora
    for operator in operators:
        if not place.model.freezes:
            yield operator
            continue
        yield replace(operator, weights=frozen(place.model, operator.weights))
        if found := [weight for weight in operator.weights if _has_adapter(lora, half, weight)]:
            yield from _adapters(place, operator, found)


def _adapters(place: Place, operator: Operator, matrices: list[Weight]) -> Iterator[Operator]:
    """Yields the product of an operator's input with the adapters' A, which all read the same, and those with B."""
    pairs = [_pair(weight, place.model.lora.rank) for weight in matrices]
    first = pairs[0][0]
    number = first.shape_on(place.tp, place.ep_shard)[0] if first.routed else 1
    rows = operator.rows * number
    compressed = place.model.lora.rank * len(pairs)
    uneven = place.profile.imbalance if first.routed and place.ep > 1 else 1
    inputs = first.shape_on(place.tp, place.ep_shard)[-1]
    yield Operator(
        f"{operator.name} {A}",
        tuple(a for a, _ in pairs),
        operator.rows,
        sixteen=True,
        repeated=operator.repeated,
        # The factor, and the sum of the gradients of the input.
        memory_bound=(MemoryBound(A, 2 * rows * compressed, rows * (2 * compressed + 3 * inputs), number),),
        saved=(
            SavedTensor(
                A, uneven * rows / place.tokens * compressed * place.width, "whole", repeated=operator.repeated
            ),
        ),
    )
    for _, b in pairs:
        outputs = rows * b.shape_on(place.tp, place.ep_shard)[-2]
        yield Operator(
            f"{operator.name} {B}",
            (b,),
            operator.rows,
            sixteen=True,
            repeated=operator.repeated,
            memory_bound=(MemoryBound(B, 3 * outputs, 0),),
        )


def _pair(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """Returns the adapter's two weights."""
    *stack, outputs, inputs = weight.shape
    layer = weight.name.removesuffix(".weight")
    a = b = PLAIN._replace(gradient=weight.gradient)
    if weight.cut == "rows":
        a, b = a._replace(gradient="partial"), b._replace(cut="rows", unit=weight.unit)
    elif weight.cut == "columns":
        a, b = a._replace(cut="columns"), b._replace(gradient="partial")
    elif weight.cut == "experts":
        a = b = weight
    return (
        a._replace(name=f"{layer}.{A}.weight", shape=(*stack, rank, inputs), initial="adapter"),
        b._replace(name=f"{layer}.{B}.weight", shape=(*stack, outputs, rank), initial="zeros"),
    )


def by_layer(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Returns weights in the order of the module tree: an adapter comes right after the matrix that it adapts."""
    places: dict[str, int] = {}
    return tuple(sorted(weights, key=lambda weight: places.setdefault(_adapted_layer(weight.name), len(places))))


def _adapted_layer(name: str) -> str:
    """Returns the linear layer of a weight, of an adapter's that of the matrix beside it."""
    owner = name.rpartition(".")[0]
    return owner.removesuffix(f".{A}").removesuffix(f".{B}")


RMS_TENSORS = 6
"""Tensors, in fp32, that the backward pass of torch's RMS norm has at once without a kernel of its own: the
input, the gradient of the normalised input, the input's by that, and three factors of the gradient by the mean
square."""


def norm(place: Place, name: str, *, first: bool = False) -> Operator:
    """Returns a norm before or after a half of a block, the `first` of the block or another. It reads and writes the
    stream; backward it reads the gradient and the input and writes a gradient. In a parallel block both norms read one
    input, of all tokens."""
    model, together = place.model, place.model.parallel_block
    numbers = place.hidden / (1 if together else place.token_share)
    saved = norm_saved(place, model.d_model, shared=together and not first)
    read = 0 if together and not first else model.d_model * place.width
    return Operator(
        name,
        norm_weights(model, name, model.d_model),
        memory_bound=(MemoryBound(name, 2 * numbers, 3 * numbers, norm_kernels(model), cheap=True),),
        saved=(SavedTensor(name, saved, "whole" if together else "tokens", cheap=saved - read),) if saved else (),
        results=(SavedTensor("block input", model.d_model * place.width, "tokens"),) if first else (),
    )


def own_norms(place: Place, operator: Operator) -> Operator:
    """Returns an operator of a half whose routed and shared experts have norms of their own (model.moe.own_norms): the
    norm before them has no weights, and after them come three."""
    width = place.model.d_model
    if operator.name == "mlp_norm":
        saved = (SavedTensor("mlp_norm", width * place.width, "tokens"),)
        return replace(operator, weights=(), saved=saved if operator.saved else ())
    if operator.name != "mlp_post_norm":
        return operator
    three = [norm(place, f"mlp_post_norm.{part}") for part in ("routed", "shared", "both")]
    joined = tuple(weight._replace(initial="ones") for one in three for weight in one.weights)
    work, saved = (tuple(each for one in three for each in getattr(one, part)) for part in ("memory_bound", "saved"))
    return replace(operator, weights=joined, memory_bound=work, saved=saved)


def residual(place: Place, name: str) -> Operator:
    """Returns the sum at the end of a half of a block: it reads two tensors and writes one. Dropout reads and writes a
    mask of one byte per element."""
    numbers = place.hidden / place.token_share
    drops = 0.5 if place.model.dropout else 0
    return Operator(
        f"{name} residual",
        memory_bound=(MemoryBound(f"{name} residual", (3 + drops) * numbers, (2 + drops) * numbers, 2),),
        saved=(SavedTensor(f"{name} dropout", place.model.d_model if place.model.dropout else 0, "tokens"),),
    )


def sum_of_halves(place: Place) -> tuple[Operator, Operator]:
    """Returns the sums at the end of a parallel block: of its halves, for all tokens (backward: of the gradients of
    their inputs), and onto the residual stream."""
    halves = MemoryBound("halves", 3 * place.hidden, 3 * place.hidden)
    return Operator("halves", memory_bound=(halves,)), residual(place, "block")


def enter(place: Place, *, regather: bool = False) -> Iterator[Message]:
    """Yields the messages off the residual stream: every tensor rank gets the whole input of the matrices.

    `regather`: the gathered input is not saved, but gathered again during the computation of weight gradients, or by a
    repeated forward pass."""
    if place.exchange == "leave":
        return
    if place.sp:
        yield Message("tp", "all_gather", place.hidden, forward=1, full=1)
    yield Message("tp", "reduce_scatter" if place.sp else "all_reduce", place.hidden, backward=1)
    if regather and place.sp and place.regathers:
        yield Message("tp", "all_gather", place.hidden, backward=1, spared=True, beside="weight_gradients")


def leave(place: Place, *, again: bool = True) -> Iterator[Message]:
    """Yields the messages onto the residual stream, which sum the tensor ranks' partial results. `again`: a repeated
    forward pass needs it, as the last matrix is summed with what it saves. The sum of a parallel block comes after
    it."""
    if place.exchange == "enter":
        return
    again = again if place.exchange == "both" else needs_sum(place.model)
    yield Message("tp", "reduce_scatter" if place.sp else "all_reduce", place.hidden, forward=1, full=again)
    if place.sp:
        yield Message("tp", "all_gather", place.hidden, backward=1)


def needs_sum(model: ModelConfig) -> bool:
    """Returns whether something after a block's sum over tensor ranks saves a tensor, so that a repeated forward pass
    reaches it: the mask of a dropout, or the input of a norm."""
    return model.dropout > 0 or model.norms_outputs


def linear_weights(
    name: str, outputs: int, inputs: int, bias: bool, weight: Weight = PLAIN, *, cuts_bias: bool = True
) -> tuple[Weight, ...]:
    """Returns a linear layer's weight and bias, divided as `weight` says. A bias has only rows: `cuts_bias` is false
    for a layer that is cut by columns, whose bias is added once, after the sum."""
    whole = weight._replace(name=f"{name}.weight", shape=(outputs, inputs))
    if not bias:
        return (whole,)
    shape = whole._replace(name=f"{name}.bias", shape=(outputs,))
    return whole, shape if cuts_bias else shape._replace(cut="whole", tiled=False)


def norm_saved(place: Place, numbers: int, *, read: int = 0, shared: bool = False) -> int:
    """Returns the bytes per token that a norm over `numbers` elements saves: its input, with the rest of the tensor of
    `read` elements that it is a part of (0: of nothing more), unless that is `shared` with another norm, which counts
    it; and what `MemoryProfile.rms_copies` says."""
    model, width, wide = place.model, place.width, max(place.width, WIDE)
    own = 0 if shared else (read or numbers) * width
    if not place.profile.rms_copies or model.norm != "rmsnorm" or width == wide:
        return own
    return numbers * wide * (1 if model.freezes else 2)


def norm_backward(place: Place, numbers: int) -> int:
    """Returns the bytes per token of a norm over `numbers` elements in the fullest moment of its backward pass, with
    what it has saved; 0 where one kernel computes it."""
    if not place.profile.rms_copies or place.model.norm != "rmsnorm" or place.width >= WIDE:
        return 0
    return RMS_TENSORS * numbers * WIDE


def norm_kernels(model: ModelConfig) -> int:
    """Returns the forward kernels of a norm without fusion."""
    return 1 if model.norm == "layernorm" else 4


def norm_weights(model: ModelConfig, name: str, width: int, weight: Weight = PLAIN) -> tuple[Weight, ...]:
    """Returns a norm's weight and, for a LayerNorm with biases, its bias."""
    scale = weight._replace(name=f"{name}.weight", shape=(width,))
    return (scale, scale._replace(name=f"{name}.bias")) if model.bias and model.norm == "layernorm" else (scale,)


VOCABULARY = PLAIN._replace(cut="rows", padded=True)
EMBEDDING_KERNELS, LOSS_KERNELS = 3, 20
LOSS_NUMBERS = 3


def head_rows(model: ModelConfig, vocabulary: int) -> int:
    """Returns the rows of the head's matrix: one for each token of the vocabulary, or one in a reward model."""
    return 1 if model.reward else vocabulary


def embedding(place: Place, vocabulary: int) -> Operator:
    """Returns the look-up of a token's row and its sum with the position; `vocabulary` is the number of tokens in
    it."""
    model, numbers = place.model, 3 * place.hidden
    work = [MemoryBound("embedding", numbers, numbers, EMBEDDING_KERNELS)]
    if model.scaled_embedding or model.embedding_multiplier != 1:
        scaled = 2 * place.hidden / place.token_share
        work.append(MemoryBound("scale", scaled, scaled))
    messages = tuple(leave(place))
    if model.freezes:  # nothing before the first block has a gradient
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
        memory_bound=(
            MemoryBound("final norm", 2 * place.hidden, 3 * place.hidden),
            *([MemoryBound("scale", 2 * place.hidden, 2 * place.hidden)] if model.logit_divisor != 1 else []),
        ),
        messages=tuple(enter(place)),
    )
    matrix = _table("head.weight", model, head_rows(model, vocabulary))
    yield Operator("head", frozen(model, (matrix,)), place.tokens, sixteen=True)
    logits = place.tokens * matrix.part(place.tp)
    if model.logit_softcap:
        yield Operator("soft cap", memory_bound=(MemoryBound("soft cap", 2 * logits, 3 * logits, 3),))
    yield Operator(
        "loss",
        memory_bound=(MemoryBound("loss", 8 * logits, 6 * logits, LOSS_KERNELS),),
        messages=(
            Message("tp", "all_reduce", (1 if model.reward else LOSS_NUMBERS) * place.tokens, "wide", forward=1),
        ),
    )


def joined(place: Place) -> Iterator[Operator]:
    """Yields what a module for one more token does before its block (DeepSeek-V3, section 2.2): the look-up of the
    tokens' embeddings, norms of these and of the hidden states, and the matrix that joins them. The look-up is outside
    of what is computed again."""
    model, numbers = place.model, place.hidden / place.token_share
    width = model.d_model
    yield replace(
        embedding(place, place.model.vocab_size),
        name="join embedding",
        weights=(),
        # A frozen embedding has no gradient.
        messages=tuple(each._replace(backward=0) if model.freezes else each for each in leave(place, again=False)),
    )
    # Of all tokens the hidden states are the input of the head of the depth before, which counts them.
    norms = norm_saved(place, width, shared=place.token_share == 1) + norm_saved(place, width)
    own = (1 + (place.token_share > 1)) * width * place.width
    joined = 2 * width * saved_input(place, "attention")
    yield Operator(
        "join",
        frozen(
            model,
            (
                *norm_weights(model, "join.hidden_norm", width),
                *norm_weights(model, "join.embed_norm", width),
                *linear_weights("join.proj", width, 2 * width, False),
            ),
        ),
        place.tokens // place.token_share,
        memory_bound=(MemoryBound("join", 6 * numbers, 9 * numbers, 2 * norm_kernels(model), 2),),
        saved=(SavedTensor("join", norms + joined, "tokens", cheap=norms - own),),
    )


def predicted(place: Place) -> Iterator[Operator]:
    """Yields what it does after its block: a norm, which ends the block, and the model's own head and loss, which are
    outside of what is computed again."""
    vocab = place.model.vocab_size
    for operator in head(place, vocab):
        weights = operator.weights
        if operator.name == "head":
            weights = tuple(weight._replace(shared=True) for weight in weights)
        elif weights:
            weights = frozen(place.model, norm_weights(place.model, "predict_norm", place.model.d_model))
        saved = ()
        if operator.name == "final norm":
            size, read = norm_saved(place, place.model.d_model), place.model.d_model * place.width
            saved = (SavedTensor("predict_norm", size, "tokens", cheap=size - read),)
        messages = tuple(message._replace(full=0) for message in operator.messages)
        yield replace(operator, name=f"predict {operator.name}", weights=weights, messages=messages, saved=saved)


def layer_input(place: Place) -> Iterator[Operator]:
    """Yields what a block does with its own embedding of the tokens (model.layer_embedding), between its MLP and the
    next block: the look-up, whose parts tensor ranks sum, and two small matrices around the product, which each tensor
    rank computes for the tokens of its residual stream."""
    model, width, size = place.model, place.width, place.model.layer_embedding
    tokens = place.tokens // place.token_share
    numbers, own = tokens * model.d_model, tokens * size
    table = VOCABULARY._replace(name="layer_input.table.weight", shape=(model.vocab_size, size))
    messages = (message._replace(elements=place.tokens * size) for message in leave(place._replace(exchange="both")))
    if model.freezes:
        messages = (message._replace(backward=0) for message in messages)
    yield Operator(
        "layer embedding",
        frozen(model, (table,)),
        memory_bound=(MemoryBound("layer embedding", 3 * place.tokens * size, 3 * place.tokens * size, 3),),
        messages=tuple(messages),
    )
    gate = Weight("layer_input.gate.weight", (size, model.d_model))
    out = Weight("layer_input.out.weight", (model.d_model, size), initial="residual")
    read = saved_input(place, "feed_forward")
    inner = SavedTensor("layer product", (3 * width + read) * size, "tokens", cheap=2 * size * width)
    yield Operator(
        *("layer gate", frozen(model, (gate,)), tokens),
        sixteen=True,
        memory_bound=(MemoryBound("layer product", 5 * own, 8 * own, 3, cheap=True),),
        saved=(SavedTensor("layer gate", model.d_model * read, "tokens"), inner),
    )
    normed = norm_saved(place, model.d_model)
    yield Operator(
        *("layer out", frozen(model, (out, *norm_weights(model, "layer_input.norm", model.d_model))), tokens),
        sixteen=True,
        memory_bound=(MemoryBound("layer norm", 5 * numbers, 5 * numbers, norm_kernels(model), cheap=True),),
        saved=(
            SavedTensor("layer norm", normed, "tokens", cheap=normed - model.d_model * width),
            SavedTensor("layer dropout", model.d_model if model.dropout else 0, "tokens"),
        ),
    )


def layer_projection(place: Place) -> Operator:
    """Returns the projection of the embedding for the tables of all layers, and its norm, which saves what it reads."""
    model, own = place.model, place.tokens // place.token_share * place.model.n_layers * place.model.layer_embedding
    saved = (SavedTensor("layer inputs", model.n_layers * norm_saved(place, model.layer_embedding), "tokens"),)
    work = MemoryBound("layer inputs", 4 * own, 5 * own, 1 + norm_kernels(model))
    rows = place.tokens // place.token_share
    return Operator("layer inputs", layer_projection_weights(model), rows, True, memory_bound=(work,), saved=saved)


def layer_projection_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Returns the weights of that projection; nothing without it."""
    size = model.layer_embedding
    if not size:
        return ()
    matrix = Weight("layer_inputs.project.weight", (model.n_layers * size, model.d_model))
    return frozen(model, (matrix, *norm_weights(model, "layer_inputs.norm", size)))


def rescaled(place: Place) -> Iterator[Operator]:
    """Yields the product of a block's output with its own number (model.layer_scale)."""
    numbers = 2 * place.hidden / place.token_share
    weight = Weight("rescale.weight", (1,), initial="ones", frozen=True)
    yield Operator("rescale", (weight,), memory_bound=(MemoryBound("rescale", numbers, numbers),))


def boundary(place: Place) -> Message:
    """Returns the message between two stages of a pipeline: the hidden states of a micro-batch, or of a slice of it,
    with what layers read beside them."""
    numbers = place.tokens * place.model.stream_width
    return Message("pp", "send", numbers / place.slices / place.token_share, forward=1, backward=1)


def embedding_weights(model: ModelConfig, vocabulary: int) -> tuple[Weight, ...]:
    """Returns the weights of the first stage."""
    rows = _table("embed.weight", model, vocabulary)
    learned = (Weight("positions.weight", (model.seq_len, model.d_model)),) if model.positions == "learned" else ()
    return frozen(model, (rows, *learned)) + layer_projection_weights(model)


def head_weights(model: ModelConfig, vocabulary: int) -> tuple[Weight, ...]:
    """Returns the weights of the last stage. A tied head has no weight of its own."""
    norm = norm_weights(model, "final_norm", model.d_model)
    head = () if model.tied else (_table("head.weight", model, head_rows(model, vocabulary)),)
    return frozen(model, (*norm, *head))


def _table(name: str, model: ModelConfig, vocabulary: int) -> Weight:
    """Returns the matrix of one end. One that several parts of the model read (a tied one, and those of modules
    for further tokens) does not run in tiles."""
    return VOCABULARY._replace(name=name, shape=(vocabulary, model.d_model), tiled=not model.embeds_at_end)
