"""The data types of the model description: operators with weights, products, memory traffic, saved tensors, messages.

A block, the embedding, the head and the loss are lists of operators (attention.py, feed_forward.py, experts.py,
ends.py). Parameter counts, tensor slices, FLOPs, memory, traffic, seconds, roofline and the planner's bounds are views
of these lists: each formula is written once, here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from phalanx.config.layout import Recompute

Cut = Literal["whole", "rows", "columns"]
"""How tensor parallelism cuts a weight: rows are outputs, columns are inputs (Shoeybi et al. 2019, section 3)."""
Gradient = Literal["tokens", "partial", "whole"]
"""The part of a replicated weight's gradient that one tensor rank computes. tokens: that of its own tokens, which are
all of them without sequence parallelism. partial: that of its part of the layer. whole: all of it in every layout."""
Initial = Literal["by name", "zeros", "ones", "normal", "residual", "adapter"]
"""Initial values. normal: with standard deviation `model.init_std`; residual: smaller, for a matrix that writes to the
residual stream; adapter: with variance 1 / (3 inputs), as Hu et al. 2022's code."""
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
    """Whether `layout.tiles` may cut it, along the dimension that tp cuts (partition/tiles.py)."""
    initial: Initial = "by name"
    """Its initial value (model/seeding.py), if its name does not say it."""
    frozen: bool = False
    """Whether training leaves it as it is: it has no gradient and no optimizer state."""

    @property
    def routed(self) -> bool:
        """Whether it belongs to routed experts, which expert parallelism distributes."""
        return is_expert(self.name)

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied by it."""
        return len(self.shape) > 1 and self.name.endswith(".weight")

    @property
    def dim(self) -> int | None:
        """The dimension that tp cuts; None if every tensor rank holds the whole."""
        if self.cut == "whole":
            return None
        return (self.cut == "columns") + self.routed

    def is_summed(self, sp: bool) -> bool:
        """Returns whether tensor ranks sum their gradients of this weight although each holds the whole of it."""
        return self.dim is None and (self.gradient == "partial" or (sp and self.gradient == "tokens"))

    def part(self, tp: int) -> int:
        """Returns the rows (columns) that each of `tp` ranks holds, padding included."""
        assert self.dim is not None, "only a cut weight has parts"
        whole = self.shape[self.dim]
        return -(-whole // tp) if self.padded else max(whole // tp, self.unit)

    def shape_on(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Returns the shape of the part that one of tp × ep ranks holds."""
        shape = list(self.shape)
        if self.dim is not None and tp > 1:
            shape[self.dim] = self.part(tp)
        if self.routed:
            shape[0] = max(1, shape[0] // ep)
        return tuple(shape)

    def size_on(self, tp: int, ep: int = 1) -> int:
        """Returns the number of elements that one of tp × ep ranks holds."""
        return prod(self.shape_on(tp, ep))


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
    """(query, key) pairs that the window leaves per head and sequence, without halving for the causal mask."""
    head: int
    value_head: int
    steps: int = 1
    """Steps of ring attention, each over one part of the keys; their results are merged (Liu et al. 2023)."""

    @property
    def flops(self) -> int:
        """Forward FLOPs without a causal mask."""
        return 2 * self.sequences * self.heads * self.pairs * (self.head + self.value_head)

    @property
    def keys_per_query(self) -> float:
        """Keys per query in each step, without halving for the causal mask."""
        return self.pairs / self.queries / self.steps


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
    """The part of `size` that recompute=products computes again without a matrix product."""
    across: bool = False
    """Whether later slices of a sequence read it, so that it stays where a block is recomputed in slices."""


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


@dataclass(frozen=True)
class Operator:
    """One operator on one rank, for one micro-batch."""

    name: str
    weights: tuple[Weight, ...] = ()
    rows: int = 0
    """Tokens that are multiplied by the weights; for experts, by each of them."""
    sixteen: bool = False
    core: AttentionCore | None = None
    memory_bound: tuple[MemoryBound, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    results: tuple[SavedTensor, ...] = ()
    """Results that selective recomputation by operator keeps in place of `saved` (torchtitan's `op`): of every two
    matrix products, wq, wk, wv, wo, gate, up, down, the first, attention, and what a reduce-scatter writes."""
    messages: tuple[Message, ...] = ()
    workspace: float = 0.0
    """Bytes that its backward pass needs for a moment besides what blocks save, on this rank."""

    def product(self, tp: int, ep: int) -> Product | None:
        """Returns the product with all matrices that read the same input, as one; None if there is none."""
        matrices = [weight.shape_on(tp, ep) for weight in self.weights if weight.is_matrix]
        if not matrices or not self.rows:
            return None
        grouped = len(matrices[0]) == 3
        number = matrices[0][0] if grouped else 1
        outputs = sum(shape[-2] for shape in matrices)
        frozen = all(weight.frozen for weight in self.weights)
        return Product(self.rows, outputs, matrices[0][-1], number, self.sixteen, frozen, grouped)

    def sending(self, *messages: Message) -> Operator:
        """Returns the operator with more messages."""
        return replace(self, messages=(*self.messages, *messages))
