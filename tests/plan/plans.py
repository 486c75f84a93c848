"""Plans made by hand from real predictions, for the tests of what is shown of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.job_spec import stages
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.partition import derived as batch
from phalanx.plan.plan import Alternative, Candidate, Plan, SpacePoint

GIB = 2**30


def candidate(layout: Layout, sequences: int, model: str = "llama3-70b", cluster: str = "dgx-h100:8") -> Candidate:
    """A layout with its prediction; its simulated time is made up."""
    shape = replace(PRESETS[model], vocab_size=PRESETS[model].vocab_size or 256)
    solved = batch.solve(sequences, layout)
    complete = replace(layout, micro_batch=solved.micro_batch, accumulation=solved.accumulation)
    spec = StepSpec(shape, cluster_of(cluster), complete, solved, "bf16", 2, PHALANX, stages(shape, layout))
    return Candidate(spec, 0.97 * predict(spec).step_time_s)


@cache
def plan() -> Plan:
    """Llama 3 70B on eight nodes: five layouts that fit, and many points."""
    layouts = [
        Layout(tp=8, pp=2, dp_shard=4, sp=True, recompute="full", zero=1, schedule="interleaved_1f1b", micro_batch=1),
        Layout(tp=4, pp=4, dp_shard=4, sp=True, recompute="full", zero=1, micro_batch=1),
        Layout(tp=8, dp_shard=8, sp=True, recompute="full", micro_batch=1),
        Layout(tp=4, dp_shard=16, sp=True, recompute="full", micro_batch=1),
        Layout(dp_shard=64, recompute="full", micro_batch=1),
        Layout(tp=2, dp_shard=32, sp=True, recompute="full", micro_batch=1, loss_chunk=1024),
    ]
    best = sorted((candidate(layout, 64) for layout in layouts), key=lambda each: each.seconds)
    best = [each for each in best if each.prediction.fits]
    narrow = candidate(Layout(dp_replicate=8, dp_shard=8, tp=1, recompute="full", micro_batch=1), 64)
    ddp = candidate(Layout(dp_replicate=64, recompute="full", micro_batch=1), 64)
    rule = best[-1]
    alternatives = (
        Alternative("rule of thumb: tensor parallel in a node, pipeline between", rule, "its bubble is longer."),
        Alternative("FSDP in a node, DDP between", narrow, "an eighth of the state is too much for a device."),
        Alternative("DDP", ddp, f"every device holds everything: {ddp.prediction.fullest.needed / GIB:.0f} GiB."),
        Alternative("tensor parallel alone", None, "tp 64 does not divide the 8 key-value heads."),
    )
    rejected = {"does not fit": 811, "tp=16 leaves the node": 96, "global_batch 64 is not a multiple": 40}
    notes = ("tp=8 stays inside the node, where links are 9 times as fast.", "recompute=full: without it, no room.")
    return Plan(best[0].spec, tuple(best), None, alternatives, points(), rejected, 1208, 0.84, notes)


def points() -> tuple[SpacePoint, ...]:
    """Layouts of five families on a grid of what they shard."""
    found = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            for recompute in ("none", "full"):
                ranks = 64 // tp // pp
                layout = Layout(tp=tp, pp=pp, dp_shard=ranks, recompute=recompute, zero=3 if pp == 1 else 1)
                try:
                    each = candidate(replace(layout, micro_batch=1, sp=tp > 1), 64)
                except (JobError, ValueError):
                    continue
                kind = [name for name, degree in (("tensor", tp), ("pipeline", pp)) if degree > 1]
                peak, fits = each.prediction.fullest.peak, each.prediction.fits
                found.append(SpacePoint(" + ".join(kind) or "FSDP", each.seconds, peak, fits, each.layout.line()))
    return tuple(found)


@cache
def hopeless() -> Plan:
    """A model that no layout fits on one node."""
    least = candidate(Layout(dp_shard=8, recompute="full", micro_batch=1), 8, "llama3-405b", "dgx-a100-40gb:1")
    peak = least.prediction.fullest.peak
    point = SpacePoint("FSDP", least.seconds, peak, False, least.layout.line())
    return Plan(least.spec, (), least, (), (point,), {"does not fit": 120}, 120, 0.2, ())
