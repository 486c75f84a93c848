"""The facts of an optimizer besides its update rule: all that checking, prediction, planning and checkpoints need.

An optimizer keeps state tensors of a few kinds for each parameter. A kind has the parameter's shape, or one element per
block of a row, such as the scales of 8-bit moments. The update rule itself is a torch optimizer in train/optimizers,
which is imported when a run begins. Tests compare each fact with what a rank really holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from phalanx.blocks.operator import is_expert, is_table
from phalanx.config.constraints import Interval
from phalanx.config.job import Optimizer
from phalanx.facts import Lazy, stated
from phalanx.registry import package_code

# Blocks over which 8-bit states share a scale. Dettmers et al. 2022 (section 2.1) quantise blocks of consecutive
# elements of the flattened tensor, which shards would cut anywhere, so that each layout would train differently. Here
# blocks lie within rows (the last dimension), and a row has a multiple of ROW_PARTS blocks: so tensor parallelism may
# cut rows and columns, FSDP rows, and flat buckets are cut at multiples of BLOCK elements.
BLOCK = 256
"""Most elements of a block; a power of two, as every block's length is."""
LEAST_BLOCK = 16
"""Fewest elements: with fewer the scales take more memory than the 8 bits save."""
ROW_PARTS = 8
"""Largest power of two into which a layout may cut rows; odd factors do not matter, as blocks are powers of two."""
LEAST_ELEMENTS = 4096
"""Fewest elements of a parameter that is quantised (Dettmers et al. 2022, section 2; bitsandbytes' min_8bit_size)."""


def block_of(shape: tuple[int, ...]) -> int:
    """Returns the elements per block of a parameter of this whole shape; 0 if it is not quantised: a norm or a bias, a
    small one, or one whose rows do not divide."""
    if len(shape) < 2 or prod(shape) < LEAST_ELEMENTS:
        return 0
    block = BLOCK
    while block >= LEAST_BLOCK and shape[-1] % (block * ROW_PARTS):
        block //= 2
    return block if block >= LEAST_BLOCK else 0


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of an iteration X ← a X + (b A + c A²) X with A = X Xᵀ (Jordan et al. 2024): singular values
come near 1 fast, and stay between 0.7 and 1.2."""
ITERATIONS = 5


def is_hidden_matrix(name: str, whole: Sequence[int]) -> bool:
    """Returns whether a parameter of this whole shape is a matrix inside a block, or the matrices of its experts: those
    that Muon (Jordan et al. 2024) orthogonalises; AdamW updates embeddings, the head, norms and biases."""
    inside = name.startswith("blocks.") and name.endswith(".weight") and not is_table(name)
    return inside and (len(whole) == 2 or (len(whole) == 3 and is_expert(name)))


def matrix_elements(name: str, whole: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the elements that a rank computes with of one matrix of a parameter, of which it has a part of this
    `shape`; 0 if the parameter is none of the hidden matrices."""
    return prod(shape[-2:]) if is_hidden_matrix(name, whole) else 0


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Returns the FLOPs of orthogonalising one matrix: in each iteration A, A² and the product with X, the narrow side
    first."""
    return ITERATIONS * sum(2 * m * n * k for m, n, k in newton_schulz_products(rows, columns))


def newton_schulz_products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the three products of an iteration, (m × k) by (k × n) each, as (m, n, k)."""
    narrow, wide = sorted((rows, columns))
    return (narrow, narrow, wide), (narrow, narrow, narrow), (narrow, wide, narrow)


Shape = tuple[int, ...]
Granularity = Literal["element", "block", "matrix"]
MASTER = "master"
"""The kind of the fp32 copy of a half-precision parameter, which every optimizer keeps unless optimizer.master=none."""
COMPENSATION = "compensation"
"""The kind of what rounding to bf16 has cut off a parameter (optimizer.rounding=kahan)."""
POSITIVE = "exp_avg_sq"
"""The kind of moments that are never negative, whose codes of 8 bits have no sign."""
NARROW = ("state", "master", "rounding")
"""Fields of `optimizer` that an elementwise rule reads, whose moments and parameters may have fewer bits than fp32."""
COMMON = ("name", "lr", "weight_decay", "clip", "schedule", "warmup_steps", "decay_steps", "decay_fraction")
COMMON = (*COMMON, "min_lr_ratio", "outer_lr", "outer_momentum", "batch_scaling", "base_batch", "options")
"""Fields of `optimizer` that do not belong to one update rule."""
_KIND = re.compile("[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class StateKind:
    """A kind of state: one tensor for each parameter."""

    kind: str
    """The name under which torch's optimizer keeps it and checkpoints have it: exp_avg/NAME."""
    bytes: int = 0
    """Bytes per element; 0: those of the optimizer's precision, which is fp32, or fp64 with fp64."""
    block: int = 1
    """Elements of a row (last dimension) for which it has one element; 1: it has the parameter's shape."""


@dataclass(frozen=True)
class UpdateCosts:
    """Costs that a technique adds to an optimizer's step, per updated parameter."""

    moved: float = 0.0
    """Bytes read and written."""
    flops: float = 0.0
    transient: float = 0.0
    """Bytes of temporary tensors."""


NOTHING_MORE = UpdateCosts()


@dataclass(frozen=True)
class ExtraOption:
    """A number that an optimizer from an extension reads from `optimizer.options`."""

    default: float
    description: str
    constraint: Interval | None = None


def scale_of(kind: str) -> str:
    """Returns the kind of the scales of a kind in 8 bits."""
    return f"{kind}_scale"


def nothing(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 0: the update computes next to nothing besides what it moves."""
    return 0.0


@stated
@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer with its facts. Functions get the job's options, and a parameter's name and whole shape; unless
    `by_shape`, their result depends on the options alone, and they are called with "" and ()."""

    title: str
    """One line for lists."""
    source: str
    """Paper and section."""
    rule: Lazy
    """The update rule: a function of parameter groups (train/optimizers/rule.py) and the job's `optimizer` that returns
    a torch.optim.Optimizer."""
    state: Callable[[Optimizer, str, Shape], tuple[StateKind, ...]]
    """The state tensors of a parameter. The fp32 copy of a half-precision parameter is not among them."""
    moved: Callable[[Optimizer, str, Shape], float]
    """Bytes read and written per parameter in a step, with everything in fp32. In half precision a gradient and the
    parameter's own copy together have the bytes of a gradient in fp32."""
    moved_on_cpu: Callable[[Optimizer, str, Shape], float] | None = None
    """The same on a CPU, by all kernels together, where no compiler makes one of them; None: as `moved` says."""
    options: tuple[str, ...] = ()
    """Fields of `optimizer` that it reads, besides those of every optimizer."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Values of fields of `optimizer` that a job does not set, where they are not the usual ones."""
    extra_options: Mapping[str, ExtraOption] = field(default_factory=lambda: MappingProxyType({}))
    """Numbers that it reads from `optimizer.options`, by name."""
    flops: Callable[[Optimizer, str, Shape], float] = nothing
    """FLOPs of matrix products per parameter in a step."""
    transient: Callable[[Optimizer, str, Shape], float] = nothing
    """Bytes per parameter of temporary tensors during the step; 0 if it updates a few elements at a time."""
    widened: Callable[[Optimizer, str, Shape], float] = nothing
    """Bytes per parameter of a gradient's copy in fp32 that a step makes of gradients in half precision; 0 if the rule
    is an UpdateRule (train/optimizers/rule.py), which reads them as they are, 4 if it is a torch optimizer."""
    granularity: Granularity = "element"
    """Where shards may be cut: between any elements; between blocks of BLOCK elements (phalanx.optimizers.entry),
    whose elements are updated together; or between parameters, if the update needs whole matrices."""
    by_shape: bool = False
    """Whether the facts depend on a parameter's name and shape."""

    @property
    def needs_whole_matrices(self) -> bool:
        """Whether a matrix must be whole on the rank that updates it."""
        return self.granularity == "matrix"


def problems(name: str, entry: OptimizerEntry) -> Iterator[str]:
    """Yields what contradicts the facts of an optimizer that is added."""
    known = {each.name for each in fields(Optimizer)}
    for option in (*entry.options, *entry.defaults):
        if option not in known:
            own = ", ".join(sorted(known - set(COMMON)))
            yield f"optimizer has no field {option} (has: {own}); an option of your own belongs to extra_options"
    yield from _wrong_facts(entry)


def _wrong_facts(entry: OptimizerEntry) -> Iterator[str]:
    """Yields what is wrong with what an entry's functions return for a matrix."""
    arguments = Optimizer(), "blocks.0.mlp.up.weight" if entry.by_shape else "", (512, 512) if entry.by_shape else ()
    with package_code("its facts cannot be computed"):
        tensors = entry.state(*arguments)
        facts = "moved", "moved_on_cpu", "flops", "transient", "widened"
        numbers = {name: fact(*arguments) for name in facts if (fact := getattr(entry, name))}
    kinds = [tensor.kind for tensor in tensors]
    if len(set(kinds)) < len(kinds) or MASTER in kinds or not all(map(_KIND.fullmatch, kinds)):
        yield f"kinds of state need names of their own, other than {MASTER}, are: {', '.join(kinds)}"
    if any(tensor.bytes < 0 or tensor.block < 1 for tensor in tensors):
        yield "state tensors need bytes of at least 0 and blocks of at least 1"
    yield from (f"{fact} must not be negative, is {value}" for fact, value in numbers.items() if value < 0)
    if numbers["moved"] <= 0:
        yield "moved must be above 0: an update reads and writes every parameter"
