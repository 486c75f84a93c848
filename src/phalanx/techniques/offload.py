"""Offloading: optimizer state, parameters and activations that leave the device between their uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.config.cluster import Cluster
from phalanx.config.job import Job, Optimizer
from phalanx.config.layout import Layout
from phalanx.nearest import did_you_mean
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.partition.derived import PARTS, Part, figures, is_offloaded, named, overlaps
from phalanx.techniques.technique import Problem, Technique

CHEAPEST_FIRST: tuple[Part, ...] = ("optimizer", "activations", "parameters")
"""Parts in the order in which they are offloaded where nothing fits otherwise."""


_NO_FOLDERS: dict[str, str] = {
    **dict.fromkeys(("", "host", "ram", "memory", "none"), "offload_to=cpu"),
    **dict.fromkeys(("disk", "nvme", "ssd", "file", "files"), "offload_to=/a/folder/on/the/disk"),
}
"""Words that `layout.offload_to` may get by mistake, each with its nearest legal choice."""


def offload_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    words = named(job.layout)
    known = ["none", "all", *PARTS]
    for word in words:
        if word not in PARTS:
            yield (
                "layout.offload",
                f"knows no {word!r}{did_you_mean(word, known)} (known: {', '.join(known)}; several with +)",
            )
    if len(set(words)) < len(words):
        yield "layout.offload", f"names a part twice; nearest legal: offload={'+'.join(dict.fromkeys(words))}"
    place = job.layout.offload_to
    if place.lower() in _NO_FOLDERS:
        legal = _NO_FOLDERS[place.lower()]
        yield "layout.offload_to", f"{place!r} is neither cpu nor a folder of files; nearest legal: {legal}"
    if job.layout.data_parallel == "threads" and words:
        yield "layout.offload", "threads of one process share its device; nearest legal: offload=none, or ddp"
    if is_offloaded(job.layout, "optimizer"):
        yield from _optimizer(job)
    if is_offloaded(job.layout, "parameters"):
        yield from _parameters(job.layout)
    yield from _activations(job)


def with_offload(part: Part, layout: Layout) -> Layout:
    """Returns the layout that also offloads a part; parameters with their optimizer."""
    wanted = {*named(layout), part, *(["optimizer"] if part == "parameters" else [])}
    parts = [each for each in PARTS if each in wanted]
    return replace(layout, offload="all" if len(parts) == len(PARTS) else "+".join(parts))


def can_offload(part: Part, layout: Layout, optimizer: Optimizer, cluster: Cluster) -> Layout | None:
    """Returns `with_offload`; None if the layout does it already, if it cannot, or if too little is known about the
    host to predict it."""
    more = with_offload(part, layout)
    if part in named(layout) or any(not getattr(cluster.host, name) for name in figures(more)):
        return None
    return None if any(True for _ in offload_problems(Job(layout=more, optimizer=optimizer))) else more


def offloads(layout: Layout, optimizer: Optimizer, cluster: Cluster) -> Iterator[Layout]:
    """Yields layouts that offload ever more, the parts first that cost least time."""
    for part in CHEAPEST_FIRST:
        if more := can_offload(part, layout, optimizer, cluster):
            layout = more
            yield layout


def _optimizer(job: Job) -> Iterator[Problem]:
    """Yields what cannot be combined with an optimizer on the host."""
    layout, name = job.layout, job.optimizer.name
    if layout.sync != "bsp":
        yield (
            "layout.offload",
            f"sync={layout.sync} averages parameters on the devices, which state on the host would miss; nearest "
            "legal: offload=none, or sync=bsp",
        )
    if name in OPTIMIZERS and OPTIMIZERS[name].needs_whole_matrices:
        legal = ", ".join(each for each, entry in OPTIMIZERS.items() if not entry.needs_whole_matrices)
        yield (
            "optimizer.name",
            f"{name} makes whole matrices orthogonal, which devices exchange and multiply, and an offloaded update "
            "runs on the host, element by element; nearest legal: offload=none, or "
            f"optimizer={legal.split(', ')[0]} (or {legal})",
        )
    if overlaps(layout):
        yield (
            "layout.offload",
            f"schedule {layout.schedule} computes with older versions of weights, which stay on the device; nearest "
            "legal: offload=none, or schedule=1f1b",
        )


def _parameters(layout: Layout) -> Iterator[Problem]:
    """Yields what cannot be combined with parameters on the host."""
    rest = "+".join(part for part in named(layout) if part != "parameters") or "none"
    if not is_offloaded(layout, "optimizer"):
        legal = "+".join(part for part in PARTS if part == "optimizer" or part in named(layout))
        yield (
            "layout.offload",
            f"parameters on the host are updated there, so their optimizer has to be there; nearest legal: "
            f"offload={'all' if legal == '+'.join(PARTS) else legal}, or offload={rest}",
        )
    if layout.zero != 3:
        yield (
            "layout.offload",
            f"parameters come from the host block by block, which is zero=3, and zero is {layout.zero}; nearest legal: "
            f"zero=3, or offload={rest}",
        )
    if layout.hpz > 1:
        yield (
            "layout.hpz",
            f"hpz {layout.hpz} keeps a second copy of the parameters on the devices, which offload={layout.offload} "
            "is to spare; nearest legal: hpz=1",
        )


def _activations(job: Job) -> Iterator[Problem]:
    """Yields what cannot be combined with activations on the host, and layers that there are not."""
    layout, layers = job.layout, job.model.n_layers
    if not is_offloaded(layout, "activations"):
        if layout.offload_blocks:
            yield (
                "layout.offload_blocks",
                f"counts layers whose activations leave the device, offload={layout.offload} keeps them; nearest "
                "legal: offload_blocks=0, or offload=activations",
            )
        return
    if layout.offload_blocks > layers:
        yield (
            "layout.offload_blocks",
            f"{layout.offload_blocks} layers of a model with n_layers {layers}; nearest legal: {layers}",
        )


OFFLOAD = Technique(
    "state and activations in host memory or in files",
    "Ren et al. 2021 (ZeRO-Offload); Rajbhandari et al. 2021 (ZeRO-Infinity)",
    is_on=lambda job: bool(named(job.layout)),
    fields=("layout.offload", "layout.offload_blocks", "layout.offload_to"),
    problems=offload_problems,
    conditions={
        "layout.offload_blocks": (
            lambda job: is_offloaded(job.layout, "activations") or job.layout.auto,
            "is for layout.offload=activations",
        ),
        "layout.offload_to": (
            lambda job: "optimizer" in named(job.layout) or job.layout.auto,
            "is for layout.offload=optimizer",
        ),
    },
    apply="phalanx.parallel.apply:apply_offload",
    layouts=(
        "accumulation=2,offload=optimizer+activations",
        "dp_shard=2,zero=3,offload=all,accumulation=2",
    ),
)
