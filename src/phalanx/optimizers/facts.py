"""The costs of a job's optimizer. Memory, time, checkpoints and the planner take its numbers from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from math import isfinite, prod

from phalanx.blocks.parameters import trained_shapes
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.nearest import did_you_mean
from phalanx.optimizers.catalogue import entry_of
from phalanx.optimizers.entry import COMMON, Shape, StateKind


def state_tensors(config: Optimizer, name: str, whole: Shape) -> tuple[StateKind, ...]:
    """Returns the state tensors of the parameter `name`, whose whole shape is `whole`."""
    entry = entry_of(config.name)
    return entry.state(config, name, whole) if entry.by_shape else entry.state(config, "", ())


def kinds(config: Optimizer, shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    """Returns every kind of state of a model's parameters, in a stable order."""
    if not entry_of(config.name).by_shape:
        return tuple(tensor.kind for tensor in state_tensors(config, "", ()))
    found = {tensor.kind: None for name, whole in shapes.items() for tensor in state_tensors(config, name, whole)}
    return tuple(found)


def state_bytes_of(config: Optimizer, name: str, whole: Shape, elements: int, width: int) -> int:
    """Returns the bytes of the state of `elements` elements of a parameter, whose numbers have `width` bytes: of whole
    blocks, as the optimizer's granularity cuts shards."""
    tensors, own = state_tensors(config, name, whole), own_width(width)
    kept = sum((tensor.bytes or own) * (elements // tensor.block) for tensor in tensors)
    return kept + elements * _master_width(width)


def outer_bytes(layout: Layout, width: int) -> int:
    """Returns the bytes per updated parameter of the outer optimizer of replicas that train by themselves: DiLoCo's
    anchor and momentum. They count as optimizer state."""
    return 2 * own_width(width) if layout.sync == "diloco" and layout.independent_replicas > 1 else 0


def own_width(width: int) -> int:
    """Returns the bytes of a number of the optimizer itself, such as its copy of a parameter: fp32 at least."""
    return max(4, width)


def _master_width(width: int) -> int:
    """Returns the bytes per parameter of the fp32 copy: half precisions have one."""
    return 4 if width < 4 else 0


def offloaded_bytes(state: float, stored: int) -> float:
    """Returns the bytes per parameter of an offloaded optimizer, whose `state` has copies of half-precision parameters,
    with the copy that it also has of others: those stored in `stored` bytes."""
    return state + (stored if stored >= 4 else 0)


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


@lru_cache(256)
def optimizer_costs(config: Optimizer, model: ModelConfig, width: int) -> OptimizerCosts:
    """Returns the costs for numbers of `width` bytes. The model's vocabulary size is set where facts depend on shapes.
    Raises JobError for an unknown optimizer."""
    entry = entry_of(config.name)
    if not entry.by_shape:
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
    return OptimizerCosts(state if size == 1 else state / size, *facts)


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
