"""What a job's optimizer costs: every number that memory, time, checkpoints and the planner have about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod

from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.model import ModelConfig
from phalanx.config.optimizer import Optimizer
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
    """Returns the bytes of the state of `elements` elements of a parameter, whose numbers have `width` bytes: whole
    blocks of it, as shards are cut."""
    tensors, own = state_tensors(config, name, whole), _own_width(width)
    kept = sum((tensor.bytes or own) * (elements // tensor.block) for tensor in tensors)
    return kept + elements * _master_width(width)


def _own_width(width: int) -> int:
    """Returns the bytes of a number of the optimizer itself: fp32 at least."""
    return max(4, width)


def _master_width(width: int) -> int:
    """Returns the bytes per parameter of the fp32 copy: half precisions have one."""
    return 4 if width < 4 else 0


@dataclass(frozen=True)
class OptimizerCosts:
    """What an optimizer takes per parameter: the mean over a model's, where they differ."""

    state: float
    """Bytes of state."""
    moved: float
    """Bytes read and written in a step."""
    flops: float
    """FLOPs of matrix products in a step."""


@lru_cache(256)
def optimizer_costs(config: Optimizer, model: ModelConfig, width: int) -> OptimizerCosts:
    """Returns the costs for numbers of `width` bytes. The model's vocabulary size is set where facts depend on shapes.
    Raises JobError for an unknown optimizer."""
    entry = entry_of(config.name)
    if not entry.by_shape:
        return OptimizerCosts(
            state_bytes_of(config, "", (), 1, width), entry.moved(config, "", ()), entry.flops(config, "", ())
        )
    shapes = parameter_shapes(model, model.vocab_size)
    total, sums = 0, [0.0, 0.0, 0.0]
    for name, whole in shapes.items():
        size = prod(whole)
        own = state_bytes_of(config, name, whole, size, width), entry.moved(config, name, whole) * size
        each = *own, entry.flops(config, name, whole) * size
        total, sums = total + size, [a + b for a, b in zip(sums, each, strict=True)]
    return OptimizerCosts(*(value / total for value in sums))


def extra_options(config: Optimizer) -> dict[str, float]:
    """Returns the numbers of `optimizer.options`, and the defaults of those that it leaves out. Raises ValueError with
    everything that is wrong."""
    entry = entry_of(config.name)
    found = {name: option.default for name, option in entry.extra_options.items()}
    wrong = []
    for part in filter(None, (part.strip() for part in config.options.split(","))):
        name, _, text = (word.strip() for word in part.partition("="))
        try:
            value = float(text)
        except ValueError:
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


def unread(config: Optimizer) -> list[str]:
    """Returns the fields that have another value than the usual one, although the optimizer does not read them."""
    usual, read = Optimizer(), {*COMMON, *entry_of(config.name).options}
    own = [each.name for each in fields(Optimizer) if each.name not in read]
    return [name for name in own if getattr(config, name) != getattr(usual, name)]
