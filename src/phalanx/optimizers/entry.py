"""The facts of an optimizer besides its update rule: all that checking, prediction, planning and checkpoints need.

An optimizer keeps state tensors of a few kinds for each parameter. A kind has the parameter's shape, or one element per
block of a row, such as the scales of 8-bit moments. The update rule itself is a torch optimizer in train/optimizers,
which is imported when a run begins. Tests compare each fact with what a rank really holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from phalanx.config.constraints import Above, AtLeast, Below, Between, HalfOpen
from phalanx.config.optimizer import Optimizer

Shape = tuple[int, ...]
Granularity = Literal["element", "block", "matrix"]
MASTER = "master"
"""The kind of the fp32 copy of a half-precision parameter, which every optimizer keeps."""
COMMON = ("name", "lr", "weight_decay", "clip", "schedule", "warmup_steps", "decay_steps", "decay_fraction")
COMMON = (*COMMON, "min_lr_ratio", "outer_lr", "outer_momentum", "batch_scaling", "base_batch", "options")
"""Fields of `optimizer` that do not belong to one update rule."""
_NAME, _REFERENCE = re.compile("[a-z][a-z0-9_]*"), re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


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
class ExtraOption:
    """A number that an optimizer from an extension reads from `optimizer.options`."""

    default: float
    description: str
    constraint: AtLeast | Above | Below | Between | HalfOpen | None = None


def nothing(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 0: the update computes next to nothing besides what it moves."""
    return 0.0


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer with its facts. Functions get the job's options, and a parameter's name and whole shape; unless
    `by_shape`, their result depends on the options alone, and they are called with "" and ()."""

    title: str
    """One line for lists."""
    source: str
    """Paper and section."""
    torch_class: str
    """The update rule as "module:name", imported when a run begins: a function of parameter groups and the job's
    `optimizer` that returns a torch.optim.Optimizer (train/optimizer.py)."""
    state: Callable[[Optimizer, str, Shape], tuple[StateKind, ...]]
    """The state tensors of a parameter. The fp32 copy of a half-precision parameter is not among them."""
    moved: Callable[[Optimizer, str, Shape], float]
    """Bytes read and written per parameter in a step, with everything in fp32."""
    options: tuple[str, ...] = ()
    """Fields of `optimizer` that it reads, besides those of every optimizer."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Values of fields of `optimizer` that a job does not set, where they are not the usual ones."""
    extra_options: Mapping[str, ExtraOption] = field(default_factory=lambda: MappingProxyType({}))
    """Numbers that it reads from `optimizer.options`, by name."""
    flops: Callable[[Optimizer, str, Shape], float] = nothing
    """FLOPs of matrix products per parameter in a step."""
    transient: Callable[[Optimizer, str, Shape], float] = nothing
    """Bytes per parameter of temporary tensors while that parameter is updated; of the largest one counts."""
    granularity: Granularity = "element"
    """Where shards may be cut: between any elements; between blocks of BLOCK elements (phalanx.optimizers.blocks),
    whose elements are updated together; or between parameters, if the update needs whole matrices."""
    by_shape: bool = False
    """Whether the facts depend on a parameter's name and shape."""

    @property
    def needs_whole_matrices(self) -> bool:
        """Whether a matrix must be whole on the rank that updates it."""
        return self.granularity == "matrix"


def problems(name: str, entry: OptimizerEntry) -> Iterator[str]:
    """Yields what is wrong with the facts of an optimizer that is added."""
    if not isinstance(entry, OptimizerEntry):
        yield f"optimizer {name!r}: expected an OptimizerEntry, found {type(entry).__name__}"
        return
    where = f"optimizer {name!r}:"
    if not _NAME.fullmatch(name):
        yield f"{where} a name has lower-case letters, digits and underscores"
    for fact in ("title", "source", "torch_class"):
        if not isinstance(value := getattr(entry, fact), str) or not value.strip():
            yield f"{where} {fact} is missing"
    if isinstance(entry.torch_class, str) and entry.torch_class and not _REFERENCE.fullmatch(entry.torch_class):
        yield f"{where} torch_class must be module:name, is {entry.torch_class!r}"
    if entry.granularity not in get_args(Granularity):
        yield f"{where} granularity must be one of {', '.join(get_args(Granularity))}, is {entry.granularity!r}"
    known = {each.name for each in fields(Optimizer)} - set(COMMON)
    for option in [*entry.options, *(each for each in entry.defaults if each not in COMMON)]:
        if option not in known:
            yield f"{where} optimizer has no field {option} (has: {', '.join(sorted(known))}); use extra_options"
    missing = [fact for fact in ("state", "moved", "flops", "transient") if not callable(getattr(entry, fact))]
    yield from (f"{where} {fact} must be a function of the options, a name and a shape" for fact in missing)
    if not missing:
        yield from (f"{where} {problem}" for problem in _wrong_facts(entry))


def _wrong_facts(entry: OptimizerEntry) -> Iterator[str]:
    """Yields what is wrong with what an entry's functions return for a matrix."""
    arguments = Optimizer(), "blocks.0.mlp.up.weight" if entry.by_shape else "", (512, 512) if entry.by_shape else ()
    try:
        tensors = entry.state(*arguments)
        numbers = {fact: getattr(entry, fact)(*arguments) for fact in ("moved", "flops", "transient")}
    except Exception as error:
        yield f"its facts cannot be computed: {type(error).__name__}: {error}"
        return
    kinds = [tensor.kind for tensor in tensors]
    if len(set(kinds)) < len(kinds) or MASTER in kinds or not all(map(_NAME.fullmatch, kinds)):
        yield f"kinds of state need names of their own, other than {MASTER}: {', '.join(kinds)}"
    if any(tensor.bytes < 0 or tensor.block < 1 for tensor in tensors):
        yield "state tensors need bytes of at least 0 and blocks of at least 1"
    yield from (f"{fact} must not be negative, is {value}" for fact, value in numbers.items() if value < 0)
    if numbers["moved"] <= 0:
        yield "moved must be above 0: an update reads and writes every parameter"
