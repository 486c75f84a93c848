"""Low-rank adapters (LoRA): weights stay frozen, two narrow factors beside each are trained."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.kinds import HALVES, TABLES, block_kinds
from phalanx.blocks.operator import Half, Place
from phalanx.blocks.residual import EVERY, can_adapt, is_target, layer_of, names_of
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig
from phalanx.nearest import did_you_mean
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.partition.derived import flushes, stashes
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.techniques.technique import Problem, Technique, above


def adapter_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yields targets that are no layer of the model, and kinds of layers without any. The model is legal otherwise."""
    if not model.lora.rank:
        return
    known: dict[str, None] = dict.fromkeys((EVERY, *HALVES))
    more = dict[str, None]()
    without = dict[str, list[str]]()
    for kind in dict.fromkeys(kind._replace(window=0) for kind in block_kinds(model)):
        layers: dict[str, Half] = {
            layer_of(weight.name): half
            for half in HALVES
            for operator in TABLES[half][getattr(kind, half)].operators(Place(model))
            for weight in operator.weights
            if can_adapt(weight)
        }
        for layer in layers:
            *longer, shortest = names_of(layer)
            known[shortest] = None
            more |= dict.fromkeys(longer)
        if not any(is_target(model.lora, half, layer) for layer, half in layers.items()):
            without[f"{kind.attention}, {kind.feed_forward}"] = list(layers)
    unknown = [name for name in model.lora.names if name not in known | more]
    for name in unknown:
        hint = did_you_mean(name, known | more)
        yield (
            "model.lora.targets",
            f"no matrix {name!r}{hint} (this model's: {', '.join(known)}, or longer, such as {next(iter(more))})",
        )
    for kinds, legal in without.items() if not unknown else ():
        yield (
            "model.lora.targets",
            f"{model.lora.targets} leaves blocks of {kinds} without an adapter, so that nothing in them is trained; "
            f"nearest legal: {model.lora.targets},{legal[0]}, or all",
        )


def freezing(model: ModelConfig) -> tuple[str, str]:
    """Returns the field by which a model's weights are frozen, and the value with which they are not."""
    if model.lora.rank:
        return "model.lora.rank", "lora.rank=0"
    return "model.sparse.dense_warmup", "sparse.dense_warmup=false"


def lora_problems(job: Job) -> Iterator[Problem]:
    """Yields what cannot leave weights frozen."""
    if not job.model.freezes:
        return
    path, legal = freezing(job.model)
    why = f"with {path.removeprefix('model.')} {str(get(job, path)).lower()} most are frozen"
    layout, name = job.layout, job.optimizer.name
    if layout.sync != "bsp":
        yield (
            "layout.sync",
            f"{layout.sync} averages all parameters between replicas, and {why}; nearest legal: sync=bsp, or {legal}",
        )
    if layout.pp > 1 and layout.schedule in SCHEDULES and (not flushes(layout) or stashes(layout)):
        yield (
            "layout.schedule",
            f"{layout.schedule} keeps several versions of all weights, and {why}; nearest legal: schedule=1f1b, or "
            f"{legal}",
        )
    if job.model.lora.rank and name in OPTIMIZERS and OPTIMIZERS[name].needs_whole_matrices:
        yield (
            "optimizer.name",
            f"{name} makes a matrix's update orthogonal, which is meant for whole weights, not for the two factors of "
            f"an adapter (lora.rank {job.model.lora.rank}); nearest legal: optimizer=adamw, or lora.rank=0",
        )


_LORA, _FIELDS = (
    above("model.lora.rank", what="adapters: "),
    [path for path in leaves() if path.startswith("model.lora.")],
)
ADAPTERS = Technique(
    "low-rank adapters",
    "Hu et al. 2022",
    is_on=lambda job: job.model.lora.rank > 0,
    fields=tuple(_FIELDS),
    problems=lora_problems,
    conditions={path: _LORA for path in _FIELDS if path != "model.lora.rank"},
)
