"""Changes that make a layout fit in memory: every change of one setting, tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.check.layout import CHEAPEST_FIRST, can_offload
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import MOMENTS
from phalanx.cost.job_spec import stages
from phalanx.cost.predict import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.partition import batch
from phalanx.partition.recompute import MODES
from phalanx.partition.tiers import PARTS, tier_of
from phalanx.units import gib

MOST_CHANGES = 5
"""Most settings that are changed together if none alone suffices, before parts leave the device."""
OFFLOAD = "layout.offload="
MICRO_BATCH = "layout.micro_batch="

FOLDER = "DIR"
"""Stands for a folder that the user chooses."""


@dataclass(frozen=True)
class Advice:
    """One change and its effect."""

    change: str
    peak: int
    """Bytes on the fullest rank, as a prediction of the changed layout shows them."""
    fits: bool
    step_time_s: float


def advice(spec: StepSpec) -> list[Advice]:
    """Returns single changes that make the layout fit, fastest first. If there is none, combines several: each time the
    one that needs the least memory, until it fits or nothing helps. World size and global batch stay the same."""
    found = list(_tried(spec))
    fitting = sorted((change for change, _ in found if change.fits), key=lambda change: change.step_time_s)
    smaller = _smaller_micro_batch(spec)
    if smaller:  # the nearest change: the same devices compute the same, in more pieces
        fitting = [smaller, *(change for change in fitting if not change.change.startswith(MICRO_BATCH))]
    if fitting or not found:
        return fitting
    changes: dict[str, str] = {}
    while True:
        tried = list(_tried(spec))
        # Leaving the device costs more time than sharding or recomputing: it comes last.
        stays = [each for each in tried if not each[0].change.startswith(OFFLOAD) and len(changes) < MOST_CHANGES]
        best, after = min(stays or tried, key=lambda each: each[0].peak, default=(None, spec))
        if best is None or len(changes) >= MOST_CHANGES + len(PARTS):
            break
        changes |= dict(word.split("=", 1) for word in best.change.split())
        spec = after
        found = [(replace(best, change=" ".join(map("=".join, changes.items()))), after)]
        if best.fits:
            break
    return [change for change, _ in found[:1]]


def _smaller_micro_batch(spec: StepSpec) -> Advice | None:
    """Returns the largest smaller micro-batch with which the layout fits, or None."""
    size = spec.batch.micro_batch
    while (size := size // 2) >= 1:
        layout = replace(spec.layout, micro_batch=size, accumulation=0)
        try:
            changed = replace(spec, layout=layout, batch=batch.solve(spec.batch.global_batch, layout))
            after = predict(changed)
        except (JobError, ValueError):
            continue
        if after.fits:
            return Advice(f"{MICRO_BATCH}{size}", after.fullest.peak, after.fits, after.step_time_s)
    return None


def _tried(spec: StepSpec) -> Iterator[tuple[Advice, StepSpec]]:
    """Yields every single change that reduces memory."""
    now = predict(spec).fullest.needed
    for change, layout in _changes(spec):
        try:
            solved = batch.solve(spec.batch.global_batch, layout)
            changed = replace(spec, layout=layout, batch=solved, stages=stages(spec.model, layout))
            after = predict(changed)
        except (JobError, ValueError):
            continue
        if after.fullest.needed < now:
            yield Advice(change, after.fullest.peak, after.fits, after.step_time_s), changed


def _changes(spec: StepSpec) -> Iterator[tuple[str, Layout]]:
    layout, model = spec.layout, spec.model
    for recompute in MODES[1:]:
        if MODES.index(layout.recompute) < MODES.index(recompute):
            yield f"layout.recompute={recompute}", replace(layout, recompute=recompute)
    if spec.batch.micro_batch > 1:
        half = spec.batch.micro_batch // 2
        yield f"{MICRO_BATCH}{half}", replace(layout, micro_batch=half, accumulation=0)
    for zero in (1, 2, 3):
        if layout.dp_shard > 1 and zero > layout.zero and layout.pp == 1:
            yield f"layout.zero={zero}", replace(layout, zero=zero)
    if layout.zero > 1 and layout.shard_ranks > 1 and spec.batch.accumulation > 1 and layout.accumulate == "local":
        yield "layout.accumulate=sharded", replace(layout, accumulate="sharded")
    if layout.dp_replicate > 1:
        ranks = layout.dp_replicate * layout.dp_shard
        change = f"layout.dp_replicate=1 layout.dp_shard={ranks}"
        yield change, replace(layout, dp_replicate=1, dp_shard=ranks)
    for part in CHEAPEST_FIRST:
        offloaded = can_offload(part, layout, spec.optimizer, spec.cluster)
        if not offloaded:
            continue
        files = _in_files(spec, offloaded)
        if files and "host" in predict(replace(spec, layout=offloaded)).short_tiers:
            yield f"layout.offload={files.offload} layout.offload_to={FOLDER}", files
        else:
            yield f"layout.offload={offloaded.offload}", offloaded
    if layout.tp > 1 and not layout.sp:
        yield "layout.sp=true", replace(layout, sp=True)
    if not layout.loss_chunk:
        yield "layout.loss_chunk=auto", replace(layout, loss_chunk="auto")
    open_micro = {"micro_batch": min(1, layout.micro_batch), "accumulation": 0}
    for axis, legal in (("tp", model.n_heads % (2 * layout.tp) == 0), ("pp", model.n_layers >= 2 * layout.pp)):
        for data in ("dp_shard", "dp_replicate"):
            ranks = getattr(layout, data)
            if legal and ranks % 2 == 0:
                wider, fewer = 2 * getattr(layout, axis), ranks // 2
                moved = replace(layout, **{axis: wider, data: fewer}, **open_micro)
                zero = replace(moved, zero=min(moved.zero, 2)) if axis == "pp" else moved
                yield f"layout.{axis}={wider} layout.{data}={fewer}", zero
                break


def _in_files(spec: StepSpec, layout: Layout) -> Layout | None:
    """Returns a layout whose offloaded optimizer has its state in files instead of host memory; None if it has already,
    or if nothing is known about the disks."""
    if tier_of(layout, "optimizer") != "host" or not spec.cluster.host.disk_gbs:
        return None
    return replace(layout, offload_to=FOLDER)


def shortfall(spec: StepSpec) -> str:
    """Describes a layout that does not fit: the excess, the moment, the largest part, and changes that help."""
    prediction = predict(spec)
    fullest = prediction.fullest
    if prediction.short_tiers:
        tier = prediction.short_tiers[0]
        most, limit = prediction.tiers[tier]
        text = (
            f"does not fit: offloaded state of {gib(most)} per device exceeds {gib(limit)} of the {tier}; shard it "
            "over more devices (layout.dp_shard), or offload less"
        )
        if files := tier == "host" and _in_files(spec, spec.layout):
            after = predict(replace(spec, layout=files))
            if after.fits:
                host, disk = (gib(after.tiers[tier][0]) for tier in ("host", "disk"))
                text += (
                    f"\n  fits with layout.offload_to={FOLDER}, a folder on a local disk: {host} of host memory and "
                    f"{disk} of disk, {after.step_time_s:.3g} s per step"
                )
        return text
    over = fullest.needed - prediction.memory_limit
    largest, size = max(fullest.parts(), key=lambda part: part[1])
    rank = prediction.memory.index(fullest)
    where = f", pipeline rank {rank}" if spec.layout.pp > 1 else ""
    text = (
        f"does not fit: peak memory {gib(fullest.needed)} ({MOMENTS[fullest.moment]}{where}) exceeds the "
        f"{gib(prediction.memory_limit)} of {spec.cluster.accelerator.name} by {gib(over)}; the largest part is "
        f"{largest}, {gib(size)}"
    )
    lines = []
    for change in advice(spec)[:4]:
        verdict = "fits with" if change.fits else "still does not fit; the least memory has"
        lines.append(f"  {verdict} {change.change}: {gib(change.peak)}, {change.step_time_s:.3g} s per step")
    return "\n".join([text, *(lines or ["  no change of the settings helps: use more devices, or a smaller model"])])
