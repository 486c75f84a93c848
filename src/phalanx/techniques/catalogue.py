"""The table of techniques: the project's own in the order in which they compose, and those of packages after them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

from phalanx.config.added import TECHNIQUE_OPTIONS, OptionsTable, Techniques
from phalanx.config.job import Job
from phalanx.errors import JobError
from phalanx.optimizers.entry import UpdateCosts
from phalanx.partition.derived import is_offloaded, modes, written
from phalanx.registry import package_code
from phalanx.techniques.adapters import ADAPTERS
from phalanx.techniques.compiling import COMPILE
from phalanx.techniques.loss import LOSS_CHUNK, NOISE, POLICY, PREFERENCE, REWARD, SMOOTHING
from phalanx.techniques.offload import OFFLOAD
from phalanx.techniques.precision import PRECISION
from phalanx.techniques.replicas import COMPRESSION, ELASTIC, INDEPENDENT_REPLICAS, THREADS
from phalanx.techniques.technique import Condition, Problem, Technique, problems
from phalanx.techniques.tiling import TILING
from phalanx.techniques.zeropp import QUANTISATION, SECOND_COPY


def _recompute_problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of recomputation that is stated per layer."""
    layout = job.layout
    if layout.tiles > 1 and "mlp" in (layout.recompute, *re.findall(r"[a-z]+", layout.recompute_cut)):
        yield (
            "layout.recompute_cut" if layout.recompute_cut else "layout.recompute",
            f"mlp would gather the {layout.tiles} tiles of MLPs again and keep them whole; nearest legal: "
            "recompute=products, recompute=full, or tiles=1",
        )
    if not layout.recompute_cut:
        return
    if layout.recompute != "none":
        yield (
            "layout.recompute_cut",
            f"sets recomputation per layer, recompute={layout.recompute} for all layers; nearest legal: "
            "recompute=none, or no recompute_cut",
        )
    try:
        modes(layout.recompute_cut, job.model.n_layers)
    except JobError as error:
        yield from (("layout.recompute_cut", problem) for problem in error.problems)


RECOMPUTE = Technique(
    "activations recomputed in the backward pass",
    "Chen et al. 2016; Korthikanti et al. 2022, section 5",
    is_on=lambda job: written(job.layout) != "none",
    fields=("layout.recompute", "layout.recompute_cut"),
    layout_problems=_recompute_problems,
    apply="phalanx.parallel.apply:apply_recompute",
    layouts=(
        "accumulation=2,recompute=full,loss_chunk=24",
        "recompute_cut=1*full+1*selective+1*products+1*none",
        "recompute=0.4,tp=2,sp=true",
    ),
    combined=("recompute=products", "recompute=mlp", "recompute=selective", "recompute=full"),
)


OWN: Mapping[str, Technique] = MappingProxyType(
    {
        "tiles": TILING,
        "hpz": SECOND_COPY,
        "quantisation": QUANTISATION,
        "precision": PRECISION,
        "recompute": RECOMPUTE,
        "compile": COMPILE,
        "offload": OFFLOAD,
        "sync": INDEPENDENT_REPLICAS,
        "elastic": ELASTIC,
        "threads": THREADS,
        "compression": COMPRESSION,
        "lora": ADAPTERS,
        "loss_chunk": LOSS_CHUNK,
        "preference": PREFERENCE,
        "policy": POLICY,
        "reward": REWARD,
        "label_smoothing": SMOOTHING,
        "neftune": NOISE,
    }
)
"""The project's own techniques, in the order in which they compose."""


TECHNIQUES = OptionsTable("technique", dict(OWN), problems, TECHNIQUE_OPTIONS)


def techniques_of(job: Job) -> Mapping[str, Technique]:
    """Returns the techniques that a job may have by name: the project's own, and the packages' whose options it sets.
    Packages that it does not name are not loaded."""
    return _known(job.techniques)


@lru_cache(256)
def _known(chosen: Techniques) -> Mapping[str, Technique]:
    return OWN if not chosen.chosen else {**OWN, **{name: TECHNIQUES[name] for name, _ in chosen.chosen}}


def technique_problems(job: Job) -> Iterator[Problem]:
    """Yields what techniques cannot be combined with, whatever the planner chooses."""
    for name, technique in techniques_of(job).items():
        yield from technique.problems(job)
        if technique.update is not None and technique.is_on(job):
            yield from _beside_update(name, job)


def _beside_update(name: str, job: Job) -> Iterator[Problem]:
    """Yields the updates after which a technique does not come."""
    layout = job.layout
    if is_offloaded(layout, "optimizer"):
        yield (
            "layout.offload",
            f"technique {name} changes parameters on the device after each update, and an offloaded optimizer updates "
            f"them on the host; nearest legal: offload=none, or techniques without {name}",
        )
    if layout.sync == "asp":
        yield (
            "layout.sync",
            f"technique {name} changes parameters after each update, which a parameter server makes for asp; nearest "
            f"legal: sync=bsp, or techniques without {name}",
        )


def updates_of(job: Job) -> list[Callable[..., None]]:
    """Returns what the techniques of a job do to a parameter's shard after each update, in their order. Raises
    ExtensionError, naming the package, if one fails."""
    found = []
    for name, technique in techniques_of(job).items():
        if technique.update is not None and technique.is_on(job):
            with package_code(f"technique {name!r} of {TECHNIQUES.owner(name)} failed"):
                found.append(TECHNIQUES.code(name, "update")(job))
    return found


def conditions_of(job: Job) -> Mapping[str, Condition]:
    """Returns the fields of packages' techniques that have an effect only sometimes, with their conditions."""
    chosen = (technique for name, technique in techniques_of(job).items() if name not in OWN)
    return {path: each for technique in chosen for path, each in technique.conditions.items()}


def update_costs(job: Job) -> UpdateCosts:
    """Returns what techniques add to the optimizer's step."""
    each = [technique.effect(job).update for technique in techniques_of(job).values()]
    return UpdateCosts(
        sum(costs.moved for costs in each),
        sum(costs.flops for costs in each),
        max(costs.transient for costs in each),
    )
