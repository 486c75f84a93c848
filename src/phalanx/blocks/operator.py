"""The data types of the model description: operators with weights, products, memory traffic, saved tensors, messages.

A block, the embedding, the head and the loss are lists of operators (attention.py, feed_forward.py, residual.py).
Parameter counts, tensor slices, FLOPs, memory, traffic, seconds, roofline and the planner's bounds are views
of these lists: each formula is written once, here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

from phalanx.config.dispatchers import sends_tokens
from phalanx.config.layout import Layout, Recompute
from phalanx.config.model import ModelConfig
from phalanx.hashed import Hashed, hashed_once

Cut = Literal["whole", "rows", "columns", "experts"]
"""How tensor parallelism cuts a weight: rows are outputs, columns are inputs (Shoeybi et al. 2019, section 3); experts:
whole experts of a stack, which tensor ranks hold that are ranks of ep (Liu et al. 2025)."""
Gradient = Literal["tokens", "partial", "whole"]
"""The part of a replicated weight's gradient that one tensor rank computes. tokens: that of its own tokens, which are
all of them without sequence parallelism. partial: that of its part of the layer. whole: all of it in every layout."""
Initial = Literal["by name", "zeros", "ones", "normal", "residual", "adapter", "rates", "steps"]
"""Initial values. normal: with standard deviation `model.init_std`; residual: smaller, for a matrix that writes to the
residual stream; adapter: with variance 1 / (3 inputs), as Hu et al. 2022's code; rates and steps: those of a state's
decay, spread over the heads."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
NumberType = Literal["activation", "wide", "index"]
"""The number format of a message. activation: the width of the computation; wide: at least fp32; index: 8 bytes."""
Beside = Literal["nothing", "attention", "weight_gradients"]


class Weight(NamedTuple):
    """One parameter, and how ranks divide it."""

    name: str
    """Name within its block, or within the model if it belongs to no block."""
    shape: tuple[int, ...]
    """Shape of the whole parameter. A linear layer's is (outputs, inputs); routed experts add a leading dimension."""
    cut: Cut = "whole"
    unit: int = 1
    """Rows that stay together: a key/value head, of which several tensor ranks hold copies if there are fewer heads."""
    padded: bool = False
    """Whether rows are padded to a multiple of the tensor ranks (the vocabulary)."""
    gradient: Gradient = "tokens"
    tiled: bool = False
    """Whether `layout.tiles` may cut it, along the dimension that tp cuts (partition/tensor_slices.py)."""
    initial: Initial = "by name"
    """Its initial value (model/seeding.py), if its name does not say it."""
    frozen: bool = False
    """Whether training leaves it as it is: it has no gradient and no optimizer state."""
    shared: bool = False
    """Whether it is another operator's, which counts it among the parameters."""

    @property
    def routed(self) -> bool:
        """Whether it belongs to routed experts, which expert parallelism distributes."""
        return is_expert(self.name)

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied by it."""
        return len(self.shape) > 1 and self.name.endswith(".weight") and not is_table(self.name)

    @property
    def dim(self) -> int | None:
        """The dimension that tp cuts; None if every tensor rank holds the whole."""
        if self.cut in ("whole", "experts"):
            return None if self.cut == "whole" else 0
        return (self.cut == "columns") + self.routed

    @property
    def cuts_matrices(self) -> bool:
        """Whether tensor ranks hold parts of matrices."""
        return self.cut not in ("whole", "experts")

    def folded(self, folds: bool) -> Weight:
        """Returns the weight as tensor ranks divide it; if it `folds`, they hold whole experts, and each counts the
        loads of its own tokens alone. An indexer reads all tokens on each of them."""
        if not folds:
            return self
        if self.routed:
            return self._replace(cut="experts", unit=1)
        counts = self.gradient == "whole" and self.name.startswith("moe.")
        return self._replace(gradient="partial") if counts else self

    def is_summed(self, sp: bool) -> bool:
        """Returns whether tensor ranks sum their gradients of this weight although each holds the whole of it."""
        return self.dim is None and (self.gradient == "partial" or (sp and self.gradient == "tokens"))

    def part(self, tp: int) -> int:
        """Returns the rows (columns) that each of `tp` ranks holds, padding included."""
        assert self.dim is not None, "only a cut weight has parts"
        whole = self.shape[self.dim]
        return -(-whole // tp) if self.padded else max(whole // tp, self.unit)

    def shape_on(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Returns the shape of the part that one of tp × ep ranks holds, of layout.ep_shard."""
        return _part_of(self, tp, ep)[0]

    def size_on(self, tp: int, ep: int = 1) -> int:
        """Returns the number of elements of that part."""
        return _part_of(self, tp, ep)[1]


@lru_cache(65_536)
def _part_of(weight: Weight, tp: int, ep: int) -> tuple[tuple[int, ...], int]:
    """Returns the shape of the part of a weight that one of tp × ep ranks holds, and its number of elements: a planner
    asks for the same ones hundreds of thousands of times."""
    shape = list(weight.shape)
    if weight.dim is not None and tp > 1:
        shape[weight.dim] = weight.part(tp)
    if weight.routed:
        shape[0] = max(1, shape[0] // ep)
    return tuple(shape), prod(shape)


def is_table(name: str) -> bool:
    """Returns whether the parameter `name` is a layer's own embedding, in which tokens are looked up."""
    return name.endswith("layer_input.table.weight")


def is_expert(name: str) -> bool:
    """Returns whether the parameter `name` belongs to routed experts, stacked along its leading dimension."""
    return "moe.experts." in name


PLAIN = Weight("", ())
"""A weight that every tensor rank holds whole."""


class Product(NamedTuple):
    """`number` products of (m × k) by (k × n) on one rank: rows are tokens, k × n is a weight."""

    m: int
    n: int
    k: int
    number: int = 1
    sixteen: bool = False
    """Whether it stays in 16 bits if the others run in 8 or 4 (router, head and adapters)."""
    frozen: bool = False
    """Whether no gradient of its weights is computed."""
    grouped: bool = False
    """Whether it is that of experts, each with its own rows."""

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.number


class AttentionCore(NamedTuple):
    """Queries by keys, softmax and the product with the values, on one rank, in `steps` blocks of keys."""

    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    """Keys of all steps together."""
    pairs: int
    """(query, key) pairs that the window leaves per head and sequence, without halving for the causal mask. Within
    documents the mean of those of the context rank with most in each micro-batch."""
    head: int
    value_head: int
    steps: float = 1
    """Steps of ring attention, each over one part of the keys; their results are merged (Liu et al. 2023). Within
    documents their mean."""
    chosen: bool = False
    """Whether the pairs are those of chosen keys, half of which no causal mask hides."""

    @property
    def flops(self) -> int:
        """Forward FLOPs without a causal mask."""
        return 2 * self.sequences * self.heads * self.pairs * (self.head + self.value_head)

    @property
    def keys_per_query(self) -> float:
        """Keys per query in each step, without halving for the causal mask."""
        return (1 + self.chosen) * self.pairs / self.queries / self.steps


class FusedProducts(NamedTuple):
    """Multiplications of a kernel beside attention's, on one rank: of a recurrence in chunks, or of an indexer."""

    forward: float
    """FLOPs."""
    backward: float
    causal: bool = False
    """Whether a causal mask leaves half of the forward ones."""
    chunks: bool = False
    """Whether they are small products within and between chunks of a sequence."""


class MemoryBound(NamedTuple):
    """Elementwise work on one rank: elements that it reads and writes."""

    name: str
    forward: float
    backward: float
    kernels: int = 1
    """Forward kernels without fusion."""
    launches: int = 1
    """Forward kernels if everything is fused."""
    cheap: bool = False
    """Whether recompute=products computes it again."""


class SavedTensor(NamedTuple):
    """A tensor that an operator saves for the backward pass."""

    operator: str
    size: float
    """Bytes per token of all tensor ranks together."""
    cut: Literal["whole", "tokens", "gathered", "width"]
    """How tensor ranks share it. whole: each has all. tokens: with sp, its own. gathered: its own if inputs are
    gathered again in the backward pass, otherwise all. width: a part of the heads or of the hidden size."""
    inside: bool = False
    """Whether it lies inside the attention core, which selective recomputation repeats."""
    cheap: float = 0.0
    """The part of `size` that recompute=products computes again without a matrix product, less what stays for that."""
    repeated: bool = False
    """Whether recompute=mlp computes it again, too."""
    across: bool = False
    """Whether later slices of a sequence read it, so that it stays where a block is recomputed in slices."""
    beyond: bool = False
    """Whether other layers read it, so that it stays where a block is recomputed."""

    def released(self, recompute: Recompute) -> float:
        """Returns the part of `size` that recompute=products or mlp computes again."""
        if recompute == "mlp" and self.repeated:
            return self.size
        return self.cheap if recompute in ("products", "mlp") else 0.0


class Message(NamedTuple):
    """A collective of one micro-batch, in elements: bytes and seconds are both derived from it."""

    axis: Literal["tp", "ring", "ulysses", "cp", "ep", "pp"]
    collective: Collective
    elements: float
    """Elements of the whole tensor: an all-gather's output, a reduce-scatter's input, a rank's part of an all-to-all,
    the payload of a send."""
    number: NumberType = "activation"
    forward: float = 0
    """Times per forward pass."""
    full: float = 0
    """Times in the repeated forward pass if the whole block is recomputed."""
    selective: float = 0
    """Times in the repeated forward pass if only attention is recomputed."""
    backward: float = 0
    """Times per backward pass, without recomputation."""
    spared: bool = False
    """Whether full recomputation has already sent it, so that the backward pass does not."""
    beside: Beside = "nothing"
    """The computation that it overlaps."""
    copies: float = 0
    """Rows per token that are sent to experts; 0 for other messages."""

    @property
    def ledger_axis(self) -> str:
        """The axis under which the ledger counts it: rings and Ulysses groups belong to cp."""
        return "cp" if self.axis in ("ring", "ulysses") else self.axis

    def again(self, recompute: Recompute) -> float:
        """Returns how often it is sent in the repeated forward pass."""
        return self.full if recompute == "full" else self.selective if recompute == "selective" else 0

    def back(self, recompute: Recompute) -> float:
        """Returns how often it is sent in the backward pass itself."""
        return 0 if self.spared and recompute == "full" else self.backward

    def times(self, recompute: Recompute) -> float:
        """Returns how often it is sent in all."""
        return self.forward + self.again(recompute) + self.back(recompute)


@lru_cache(4096)
def _product_sizes(
    weights: tuple[Weight, ...], tp: int, ep: int, folds: bool
) -> tuple[int, int, int, bool, bool] | None:
    """Returns the columns, inner dimension and number of a product, and whether it is frozen and grouped."""
    matrices = [weight for weight in weights if weight.is_matrix]
    if not matrices:
        return None
    if folds and matrices[0].routed and matrices[0].shape[0] % (tp * ep) == 0:
        tp, ep = 1, tp * ep
    shapes = [weight.shape_on(tp, ep) for weight in matrices]
    grouped = len(shapes[0]) == 3
    outputs = sum(shape[-2] for shape in shapes)
    frozen = all(weight.frozen for weight in weights)
    return outputs, shapes[0][-1], shapes[0][0] if grouped else 1, frozen, grouped


@dataclass(frozen=True)
class Operator:
    """One operator on one rank, for one micro-batch."""

    name: str
    weights: tuple[Weight, ...] = ()
    rows: int = 0
    """Tokens that are multiplied by the weights; for experts, by each of them."""
    sixteen: bool = False
    repeated: bool = False
    """Whether recompute=mlp repeats it: the first matrices of an MLP."""
    core: AttentionCore | None = None
    fused: FusedProducts | None = None
    """The products of its kernels: they take the longer of these and of what `memory_bound` moves."""
    memory_bound: tuple[MemoryBound, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    results: tuple[SavedTensor, ...] = ()
    """Results that selective recomputation by operator keeps in place of `saved` (torchtitan's `op`): of every two
    matrix products, wq, wk, wv, wo, gate, up, down, the first, attention, and what a reduce-scatter writes."""
    messages: tuple[Message, ...] = ()
    workspace: float = 0.0
    """Bytes that its backward pass needs for a moment besides what blocks save, on this rank."""
    detached: bool = False
    """Whether its input gets no gradient, so that its weights' gradients are never deferred."""

    @cached_property
    def matrices(self) -> list[Weight]:
        """The weights by which tokens are multiplied."""
        return [weight for weight in self.weights if weight.is_matrix]

    def product(self, tp: int, ep: int, *, folds: bool = False) -> Product | None:
        """Returns the product with all matrices that read the same input, as one; None if there is none. `folds`:
        tensor ranks hold whole experts where there are enough, instead of a part of each."""
        sizes = _product_sizes(self.weights, tp, ep, folds) if self.rows else None
        return sizes and Product(self.rows, *sizes[:3], self.sixteen, *sizes[3:])

    def mode(self, recompute: Recompute) -> Recompute:
        """Returns the recomputation of this operator where its block has `recompute`."""
        return "full" if recompute == "mlp" and self.repeated else recompute

    def sending(self, *messages: Message) -> Operator:
        """Returns the operator with more messages."""
        return replace(self, messages=(*self.messages, *messages))


@hashed_once
@dataclass(frozen=True)
class MemoryProfile(Hashed):
    """The buffers, copies and reserves of a framework. The defaults are Phalanx's on a GPU."""

    parameter_bytes: int = 0
    """Bytes per element of a stored parameter; 0: those of the computation. torchtitan stores fp32 shards: 4."""
    gradient_bytes: int = 0
    """Bytes per element of a gradient that accumulates over micro-batches; 0: those of the computation."""
    unbuffered_gradient_bytes: int = 0
    """Bytes per element of a gradient outside of flat buffers, in FSDP's shards and without data ranks, where it has
    the parameter's type whatever type it is reduced in; 0: `gradient_bytes`."""
    passing_gradient_bytes: int = 0
    """Bytes per parameter of the whole stage for the gradients of one micro-batch before they are added to those of
    `gradient_bytes` (DeepSpeed's BF16_Optimizer: 2)."""
    step_gradient_bytes: int = 0
    """Bytes per parameter that a rank updates for the copy of the gradient in the optimizer's precision, which exists
    during the optimizer step, besides that of the optimizer (OptimizerCosts.widened); counts only if the gradient
    itself is narrower."""
    step_is_flat: bool = False
    """Whether that copy is one tensor, which does not fit into the blocks that activations have freed: the allocator
    takes more from the device, as long as there is more."""
    bucket_numbers: float = 0
    """Gradients that are copied to one buffer to be reduced (DeepSpeed: 5e8)."""
    gradients_stay: bool = False
    """Whether gradients are allocated for the whole step (flat buffers), not just from the first backward pass on."""
    scores: Literal["dropout", "always", "never"] = "dropout"
    """When attention saves its probabilities: `dropout`, if the model has dropout, which torch's fused kernel does not
    draw equally in all layouts; `always`, for unfused attention; `never`, for flash attention."""
    masks: Literal["none", "runs"] = "none"
    """The masks that attention within documents makes: `none`, if its kernel gets documents as runs of tokens; `runs`,
    one of some queries at a time. None is kept for a backward pass."""
    rms_copies: bool = False
    """Whether an RMS norm in half precision saves its normalised input for its weight's gradient, and its input in fp32
    in place of the input itself: torch's on CPUs, which has no kernel for it."""
    state_bytes: float | None = None
    """Bytes of optimizer state per parameter; None: the optimizer's own, with moments and master weights in fp32."""
    repeats: tuple[str, ...] = ()
    """Modules that the backward pass computes again besides `layout.recompute`, by Megatron Core's names."""
    inputs_leave: bool = False
    """Whether blocks that are fully recomputed keep their inputs in host memory (MaxText's decoder_layer_input:
    offload)."""
    swiglu_kept: int = 4
    """Tensors of the MLP's hidden size that SwiGLU saves: both inputs, the SiLU's output and the product. A fused
    kernel recomputes the SiLU (3), a compiler may recompute the product, too (2)."""
    regathers: bool = False
    """Whether sequence parallelism always gathers inputs again in the backward pass (Megatron), in every layout."""
    routes_shards: bool = False
    """Whether, with sequence parallelism, routers and the compressions of latent attention work on a rank's own tokens
    (Megatron), not on those of all tensor ranks."""
    weights_inside: bool = False
    """Whether gates multiply inside the experts, before their last matrix, so that their output is not saved (Megatron
    0.12 and later)."""
    values_apart: bool = False
    """Whether latent attention copies its values; views of the matrix's output keep the keys' part alive as well."""
    selective: Literal["core", "products", "layers"] = "core"
    """The meaning of recompute=selective: `core` repeats attention's core (Korthikanti et al. 2022, section 5);
    `products` keeps the block's input, attention's output and every other matrix product (torchtitan's `op`); `layers`
    repeats every other block."""
    loss_tensors: tuple[int, int] = (1, 1)
    """Tensors as large as the logits at the peak of the loss: in fp32, and in the width of the computation. Phalanx:
    probabilities beside the logits, which they replace as their gradient; in torch's eager mode log-probabilities and
    two gradients (3, 0); compiled, the logits and their gradient; fused, with the gradient in place, the logits alone.
    """
    split_loss_tensors: tuple[int, int] = (1, 1)
    """These if tensor ranks share the vocabulary."""
    whole_logits: bool = False
    """Whether each tensor rank has all logits, so that these tensors are as large as the whole vocabulary."""
    saves_slopes: bool = True
    """Whether the loss saves the gradient of the logits, in their place and width, until the backward pass; otherwise
    it saves log-probabilities in fp32, or where it is fused, the logits."""
    keeps_buckets: bool = False
    """Whether buckets of gradients that are reduced whole (DDP, ZeRO-1) keep their memory from step to step."""
    copies_sums: bool = False
    """Whether a reduce-scatter has a copy of all that it sums (over gloo)."""
    keeps_gathered: bool = False
    """Whether FSDP2 keeps what it has gathered in a forward pass until it has copied what comes next: on devices with
    streams, of which it cannot tell when they are done (Phalanx; of others it is not known)."""
    reduces_each: bool = False
    """Whether ZeRO-2 and 3 reduce the gradients of every micro-batch, whatever the layout says."""
    whole_under_pp: bool = False
    """Whether ZeRO-3 in a pipeline keeps parameters gathered from the first micro-batch to the last."""
    keeps_boundaries: bool = False
    """Whether a pipeline's buffers hold the received and sent tensors of a stage for every micro-batch in flight,
    beside the copy that blocks save (deepspeed/runtime/pipe/engine.py: pipe_buffers)."""
    gathers_matrices: bool = False
    """Whether ZeRO-3 gathers one matrix at a time, with the next or the gradient of one, instead of blocks."""
    keeps_narrow: bool = False
    """Whether products in fp8 save the inputs of matrices in fp8, one byte per element."""
    dummy_gradients: bool = False
    """Whether an empty gradient for each shape of a block's matrices stands in for those that kernels have already
    added (Transformer Engine from 2.3 on)."""
    reserve: float = 1.05
    """Memory that torch's allocator reserves over the tensors' at the peak, as a factor, as long as there is room.
    SimuMax's runs on B200 record both: 1.03 to 1.08, median 1.05."""
    context_mib: int = 600
    """MiB of the device's context, kernels and libraries, outside the allocator: 500 to 600 if CUDA loads kernels
    lazily (from 11.7 on), 1,573 if it loads all of them (bigscience, A100)."""
    communicator_mib: int = 150
    """MiB of a communicator's buffers, which NCCL allocates itself: channels × peers × protocols."""
    imbalance: float = 1.0
    """Tokens of the fullest rank's experts over the mean of all; 1 is balanced routing."""
    fp16: MemoryProfile | None = None
    """The profile that replaces this one if products are in fp16."""


PHALANX = MemoryProfile(keeps_buckets=True, keeps_gathered=True)
"""The profile of Phalanx itself."""


INDEX = 8
"""Bytes of a count, an expert's number or an index into a tensor (int64)."""
Half = Literal["attention", "feed_forward"]
"""The halves of a block."""
EXPERT_NUMBER = 4
"""Bytes of the number of a token's expert that is sent with it (int32)."""
WIDE = 4
"""Least bytes per element of losses, routers and sums over attention (fp32)."""


class RingCounts(NamedTuple):
    """The keys per sequence that a position of a ring exchanges with the others in a layer, on average."""

    sent: float = 0.0
    sends: float = 0.0
    """Messages in which it sends them."""
    received: float = 0.0
    receives: float = 0.0


class WindowWork(NamedTuple):
    """Attention within documents in a layer with one window: means over micro-batches."""

    window: int
    pairs: float
    """Pairs of a query and a key up to its own, per head and sequence, on the context and data rank with most of all
    layers, for which the others wait; with Ulysses the mean over all heads."""
    ring: tuple[RingCounts, ...]
    """By position of the ring."""


class DocumentWork(NamedTuple):
    """Attention within documents on the context ranks of a layout (partition/documents.py)."""

    windows: tuple[WindowWork, ...]
    exchanged: float
    """The share of the micro-batches in which context ranks exchange anything."""


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
    work: DocumentWork | None = None
    """What attention within documents computes and sends, where that is known and less than in whole sequences."""
    window: int = 0
    """Keys that a query of this layer sees at most, fewer than the sequence has; 0: all. Set by the kind of block."""
    ring_rank: int | None = None
    """Position in the ring, on which messages depend with a window; None: a position with the most bytes."""
    tiled: frozenset[str] = frozenset()
    """Layers that run in tiles, by the names of `layout.tile`."""
    ep_nodes: int = 1
    """Groups of expert ranks between which rows travel after they did so inside them (layout.ep_nodes)."""
    once: bool = False
    """Whether a token is sent once to each rank with some of its experts (layout.dispatch), not once per expert."""
    overlaps: bool = False
    """Whether both halves of the sequences are sent in turn (layout.ep_overlap)."""
    folds: bool = False
    """Whether tensor ranks hold whole experts, and each routes its own tokens (layout.folds)."""
    redundant: int = 0
    """Copies of other ranks' experts on an expert rank (layout.redundant_experts)."""
    exchange: Literal["both", "enter", "leave"] = "both"
    """Messages between the residual stream and a half of a block: off it and onto it, or in a parallel block off it
    before the first half and onto it after the second. Set by the kind of block."""

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def within(self) -> WindowWork | None:
        """The `work` of this layer's window."""
        return next((each for each in self.work.windows if each.window == self.window), None) if self.work else None

    @property
    def ring_counts(self) -> RingCounts:
        """The keys that `ring_rank` exchanges within documents, or the position that sends most."""
        ring = self.within.ring if self.within else (RingCounts(),)
        return max(ring) if self.ring_rank is None else ring[self.ring_rank]

    @property
    def ep_shard(self) -> int:
        """Expert ranks along dp_shard × cp."""
        return max(1, self.ep // (self.tp if self.folds else 1))

    @property
    def halves(self) -> tuple[int, ...]:
        """Sequences that are sent to experts at a time."""
        there = self.sequences // 2 if self.overlaps else 0
        return (self.sequences - there, there) if there else (self.sequences,)

    @property
    def tokens(self) -> int:
        """Tokens of the sequences on this context rank."""
        return -(-self.sequences * self.model.seq_len // self.cp)

    @property
    def token_share(self) -> int:
        """Number of tensor ranks that share the tokens between the matrices."""
        return self.tp if self.sp else 1

    @property
    def routed_share(self) -> int:
        """Number of tensor ranks that share the tokens of a router, of which each sends its own to experts."""
        return self.token_share if self.profile.routes_shards or self.folds else 1

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
    work: DocumentWork | None = None,
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
        work=work,
        ring_rank=ring_rank,
        tiled=layout.tiled_layers if layout.tiles > 1 else frozenset(),
        ep_nodes=layout.ep_nodes,
        overlaps=layout.ep > 1 and layout.ep_overlap,
        once=layout.ep > 1 and sends_tokens(layout.dispatch),
        folds=layout.folds,
        redundant=layout.redundant_experts if layout.ep > 1 else 0,
    )
