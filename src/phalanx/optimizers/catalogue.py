"""The catalogue of optimizers: their facts by name. docs/techniques/optimizers.md compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from math import isfinite, prod

from phalanx.blocks.parameters import trained_shapes
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean
from phalanx.optimizers.entry import (
    COMMON,
    COMPENSATION,
    NARROW,
    NOTHING_MORE,
    POSITIVE,
    Granularity,
    OptimizerEntry,
    Shape,
    StateKind,
    UpdateCosts,
    block_of,
    is_hidden_matrix,
    newton_schulz_flops,
    problems,
    scale_of,
)
from phalanx.registry import Registry

ADAM_MOMENTS = (StateKind("exp_avg"), StateKind("exp_avg_sq"))


def _adamw_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return ADAM_MOMENTS


def _adamw_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 28: it reads the weight, two moments and the gradient, and writes the first three, all in one pass. In
    bf16 the gradient has two bytes less, and the weight's copy in bf16 is written."""
    return 28


def _sgd_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return (StateKind("momentum_buffer"),) if config.momentum else ()


def _sgd_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns the bytes of reading weight, momentum and gradient, and writing the first two."""
    return 20 if config.momentum else 12


def _lion_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return (StateKind("exp_avg"),)


def _lion_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns the bytes of reading weight, momentum and gradient, and writing the first two."""
    return 20


def _lion_moved_on_cpu(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns the bytes of its kernels over chunks in the cache, in fp32: the direction (12), its threshold and its
    sign (8 each), the weights' decay (8) and step (12), and the momentum (12)."""
    return 60


ELEMENTWISE_BYTES = 32
"""Bytes that count for an element that a kernel handles alone, as in a look-up in a table: a processor then loads one
element instead of a vector of 32 bytes, and a GPU's memory a sector of 32 bytes."""
SHORT_ROW = 32
"""Rows with fewer elements are reduced element by element: torch reduces four vectors of eight at a time."""


HASH_BYTES, ROUND_BYTES = 112, 36
"""Bytes of the kernels over chunks per element: of random bits, and of rounding one number with them."""


def _coded_bytes(kinds: Sequence[StateKind], block: int) -> float:
    """Returns the bytes of the kernels of moments in 8 bits. Of each: reading codes: index (5), look-up, scale (8); and
    finding new ones: largest (4), scale (8), cell (16), look-up, sum with the bits (12), shift (8), as a byte (5). The
    largest of a signed moment needs magnitudes (8)."""
    largest = ELEMENTWISE_BYTES if block < SHORT_ROW else 4
    read = 5 + ELEMENTWISE_BYTES + 8
    written = largest + 8 + 16 + ELEMENTWISE_BYTES + 12 + 8 + 5
    return sum(read + written + 8 * (kind.kind != POSITIVE) for kind in kinds)


def _muon_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return (StateKind("momentum_buffer"),) if is_hidden_matrix(name, shape) else ADAM_MOMENTS


def _muon_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 60 for a matrix: weight, momentum and update are read and written, the gradient and later the update
    read; pieces are copied before and after messages, both ways."""
    return 60 if is_hidden_matrix(name, shape) else _adamw_moved(config, name, shape)


def _muon_widened(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 4 for a matrix, whose direction takes the gradient's memory in fp32."""
    return 4 if is_hidden_matrix(name, shape) else 0


def _muon_flops(config: Optimizer, name: str, shape: Shape) -> float:
    if not is_hidden_matrix(name, shape):
        return 0.0
    rows, columns = shape[-2:]
    return newton_schulz_flops(rows, columns) / (rows * columns)


OPTIMIZERS: Registry[OptimizerEntry] = Registry(
    "optimizer",
    {
        "adamw": OptimizerEntry(
            "Adam with decoupled weight decay",
            "Loshchilov & Hutter 2019, algorithm 2",
            rule="phalanx.train.optimizers.rule:adamw",
            state=_adamw_state,
            moved=_adamw_moved,
            options=("betas", "eps", *NARROW),
        ),
        "sgd": OptimizerEntry(
            "stochastic gradient descent with momentum, also Nesterov's",
            "Sutskever et al. 2013, section 2",
            rule="phalanx.train.optimizers.rule:sgd",
            state=_sgd_state,
            moved=_sgd_moved,
            options=("momentum", "nesterov", *NARROW),
            defaults={"weight_decay": 1e-4},
        ),
        "lion": OptimizerEntry(
            "the sign of an interpolated momentum, with decoupled weight decay",
            "Chen et al. 2023, algorithm 2",
            rule="phalanx.train.optimizers.rule:lion",
            state=_lion_state,
            moved=_lion_moved,
            moved_on_cpu=_lion_moved_on_cpu,
            options=("betas", "eps", *NARROW),
            defaults={"betas": (0.9, 0.99), "lr": 1e-4, "weight_decay": 1.0},
        ),
        "muon": OptimizerEntry(
            "orthogonalised momentum for the matrices of blocks, AdamW for the rest",
            "Jordan et al. 2024; Liu et al. 2025, section 2.2",
            rule="phalanx.train.optimizers.muon:muon",
            state=_muon_state,
            moved=_muon_moved,
            flops=_muon_flops,
            widened=_muon_widened,
            options=("momentum", "nesterov", "newton_schulz", "betas", "eps"),
            defaults={"momentum": 0.95, "nesterov": True},
            granularity="matrix",
            by_shape=True,
        ),
    },
    problems,
)
"""The optimizers by their names in `optimizer.name`."""


RENAMED = {"adamw8bit": "optimizer=adamw optimizer.state=8bit"}
"""What optimizers of other names are called here."""


def entry_of(name: str) -> OptimizerEntry:
    """Returns the facts of an optimizer. Raises JobError with the nearest name if it is unknown."""
    if name not in OPTIMIZERS:
        meant = f"; did you mean {RENAMED[name]}?" if name in RENAMED else did_you_mean(name, OPTIMIZERS)
        raise JobError(f"no optimizer {name!r}{meant} (known: {', '.join(OPTIMIZERS)})")
    return OPTIMIZERS[name]


def granularity_of(config: Optimizer) -> Granularity:
    """Returns where shards may be cut."""
    return "block" if config.state == "8bit" else entry_of(config.name).granularity


def depends_on_shape(config: Optimizer) -> bool:
    """Returns whether an optimizer's facts depend on a parameter's name and shape."""
    return entry_of(config.name).by_shape or config.state == "8bit"


def moments(config: Optimizer, name: str, whole: Shape) -> tuple[StateKind, ...]:
    """Returns the kinds of state of the update rule itself, in whatever format they are kept."""
    entry = entry_of(config.name)
    return entry.state(config, name, whole) if entry.by_shape else entry.state(config, "", ())


def state_tensors(config: Optimizer, name: str, whole: Shape) -> tuple[StateKind, ...]:
    """Returns the state tensors of the parameter `name`, whose whole shape is `whole`."""
    found = moments(config, name, whole)
    if config.state == "bf16":
        found = tuple(replace(each, bytes=2) for each in found)
    elif config.state == "8bit" and (block := block_of(whole)):
        scales = (StateKind(scale_of(each.kind), block=block) for each in found)
        found = (*(replace(each, bytes=1) for each in found), *scales)
    return (*found, StateKind(COMPENSATION, bytes=2)) if config.compensates else found


def kinds(config: Optimizer, shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    """Returns every kind of state of a model's parameters, in a stable order."""
    if not depends_on_shape(config):
        return tuple(tensor.kind for tensor in state_tensors(config, "", ()))
    found = {tensor.kind: None for name, whole in shapes.items() for tensor in state_tensors(config, name, whole)}
    return tuple(found)


def state_bytes_of(config: Optimizer, name: str, whole: Shape, elements: int, width: int) -> int:
    """Returns the bytes of the state of `elements` elements of a parameter, whose numbers have `width` bytes: of whole
    blocks, as the optimizer's granularity cuts shards."""
    tensors, own = state_tensors(config, name, whole), own_width(width)
    kept = sum((tensor.bytes or own) * (elements // tensor.block) for tensor in tensors)
    return kept + elements * (4 if keeps_masters(config, width) else 0)


def outer_bytes(layout: Layout, width: int) -> int:
    """Returns the bytes per updated parameter of the outer optimizer of replicas that train by themselves: DiLoCo's
    anchor and momentum. They count as optimizer state."""
    return 2 * own_width(width) if layout.sync == "diloco" and layout.independent_replicas > 1 else 0


def own_width(width: int) -> int:
    """Returns the bytes of a number of the optimizer itself, such as its copy of a parameter: fp32 at least."""
    return max(4, width)


def keeps_masters(config: Optimizer, width: int) -> bool:
    """Returns whether parameters of `width` bytes have a copy in fp32, which is a part of the state."""
    return width < 4 and config.master != "none"


@dataclass(frozen=True)
class OptimizerCosts:
    """An optimizer's costs per trained parameter. Where parameters differ, they are the mean over a model's."""

    state: float
    """Bytes of state."""
    moved: float
    """Bytes read and written in a step."""
    moved_on_cpu: float
    """The same where a CPU updates."""
    flops: float
    """FLOPs of matrix products in a step."""
    transient: float
    """Bytes of temporary tensors during the step."""
    widened: float
    """Bytes of a copy in fp32 of a gradient in half precision."""
    copied: float
    """Bytes of the copy that an offloaded optimizer has of a parameter without a master."""


@lru_cache(256)
def optimizer_costs(
    config: Optimizer, model: ModelConfig, width: int, more: UpdateCosts = NOTHING_MORE
) -> OptimizerCosts:
    """Returns the costs for numbers of `width` bytes, and what techniques add to them. The model's vocabulary size is
    set where facts depend on shapes. Raises JobError for an unknown optimizer."""
    if more != NOTHING_MORE:
        own = optimizer_costs(config, model, width)
        moved, on_cpu = own.moved + more.moved, own.moved_on_cpu + more.moved
        sums = {"flops": own.flops + more.flops, "transient": max(own.transient, more.transient)}
        return replace(own, moved=moved, moved_on_cpu=on_cpu, **sums)
    if not depends_on_shape(config):
        return _costs_of_one(config, "", (), width)
    sizes, sums = 0, [0.0] * len(fields(OptimizerCosts))
    for name, whole in trained_shapes(model, model.vocab_size).items():
        size = prod(whole)
        each = astuple(_costs_of_one(config, name, whole, width))
        sizes, sums = sizes + size, [total + size * one for total, one in zip(sums, each, strict=True)]
    return OptimizerCosts(*(total / sizes for total in sums))


def _costs_of_one(config: Optimizer, name: str, whole: Shape, width: int) -> OptimizerCosts:
    """Returns the costs per element of one parameter; with "" and () of any."""
    entry, size = entry_of(config.name), prod(whole)
    state = state_bytes_of(config, name, whole, size, width)
    moved = entry.moved, entry.moved_on_cpu or entry.moved
    facts = (fact(config, name, whole) for fact in (*moved, entry.flops, entry.transient, entry.widened))
    copied = 0 if keeps_masters(config, width) else width
    costs = OptimizerCosts(state if size == 1 else state / size, *facts, copied=copied)
    return _narrow(config, costs, moments(config, name, whole), block_of(whole)) if config.is_narrow else costs


def _narrow(config: Optimizer, costs: OptimizerCosts, kinds: Sequence[StateKind], block: int) -> OptimizerCosts:
    """Returns the costs of an update with narrow moments or parameters, of which a rule has some `kinds`."""
    has_masters, random = config.master != "none", config.rounding != "nearest"
    narrow = len(kinds) * (config.state == "bf16") + (not has_masters)
    # In one kernel: two bytes less for a narrow number, read and written; a parameter's gradient, and no copy of it.
    spared = 4 * narrow + 2 * (not has_masters) - 4 * config.compensates
    # In kernels over chunks: numbers are widened and written back (6 each), with random bits (HASH, ROUND) for some.
    rounds = random * (len(kinds) * (config.state == "bf16") + (not has_masters and not config.compensates))
    more = 12 * narrow + (HASH_BYTES * (rounds > 0) + ROUND_BYTES * rounds) + 28 * config.compensates
    chunks = costs.moved_on_cpu + more
    if config.state == "8bit" and block:
        chunks += _coded_bytes(kinds, block)
        return replace(costs, moved=chunks, moved_on_cpu=chunks)
    return replace(costs, moved=costs.moved - spared, moved_on_cpu=chunks)


def extra_options(config: Optimizer) -> dict[str, float]:
    """Returns the numbers of `optimizer.options`, and the defaults of those that it leaves out. Raises ValueError with
    everything that is wrong."""
    entry = entry_of(config.name)
    found = {name: option.default for name, option in entry.extra_options.items()}
    wrong = []
    for part in filter(None, (part.strip() for part in config.options.split(","))):
        name, _, text = (word.strip() for word in part.partition("="))
        value = _number(text)
        if value is None:
            wrong.append(f"{part!r} is not name=number")
            continue
        if name not in found:
            known = ", ".join(found) or "none"
            wrong.append(f"{config.name} has no option {name}{did_you_mean(name, found)} (known: {known})")
            continue
        found[name] = value
        constraint = entry.extra_options[name].constraint
        if constraint and (problem := constraint.problem(value)):
            wrong.append(f"{name} {problem}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def unread(config: Optimizer) -> list[str]:
    """Returns the fields that have another value than the usual one, although the optimizer does not read them."""
    usual, read = Optimizer(), {*COMMON, *entry_of(config.name).options}
    own = [each.name for each in fields(Optimizer) if each.name not in read]
    return [name for name in own if getattr(config, name) != getattr(usual, name)]
