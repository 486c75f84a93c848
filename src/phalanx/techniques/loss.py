"""The loss: preference pairs (DPO), and logits of some tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.corpora import PAIR, has_pairs
from phalanx.config.job import DpoOptions, Job
from phalanx.partition import derived as batch
from phalanx.partition.derived import flushes, stashes
from phalanx.techniques.technique import Problem, Technique


def preference_problems(job: Job) -> Iterator[Problem]:
    """Yields what does not suit pairs, and options of pairs where there are none."""
    if not has_pairs(job.data):
        if job.train.dpo.label_smoothing:
            yield (
                "data.corpus",
                "label smoothing is that of preference tuning (nearest legal: corpus=preferences), that of the "
                "cross-entropy is not implemented",
            )
        elif job.train.dpo != DpoOptions():
            changed = next(name for name, value in vars(job.train.dpo).items() if value != getattr(DpoOptions(), name))
            where = f"train.dpo.{changed}"
            yield where, f"is for pairs, corpus {job.data.corpus} has none; nearest legal: corpus=preferences"
        return
    if modules := job.model.mtp:
        yield (
            "model.mtp",
            f"the loss of pairs has no part for further tokens, mtp is {modules}; nearest legal: mtp=0 with "
            f"n_layers={job.model.main.n_layers}, as `phalanx import hf` reads it with --layers",
        )
    layout = job.layout
    if layout.sync != "bsp":
        yield "layout.sync", f"the loss of pairs needs sync=bsp, is {layout.sync}; nearest legal: sync=bsp"
    if layout.data_parallel == "threads":
        yield "layout.data_parallel", "threads would cut pairs; nearest legal: data_parallel=ddp"
    if layout.pp > 1 and (not flushes(layout) or stashes(layout)):
        yield "layout.schedule", f"{layout.schedule} does not end a step's pairs with it; nearest legal: schedule=1f1b"


def pair_batch_problems(job: Job) -> Iterator[Problem]:
    """Yields why the micro-batches of a whole layout would cut pairs."""
    if not has_pairs(job.data):
        return
    try:
        micro = batch.solve(job.train.global_batch, job.layout).micro_batch
    except ValueError:
        return  # reported with the layout
    if micro % PAIR:
        yield (
            "layout.micro_batch",
            f"is {micro} sequences, which cuts a pair of {PAIR}; nearest legal: {micro + 1}"
            + (f" or {micro - 1}" if micro > 1 else ""),
        )


PREFERENCE = Technique(
    "preference tuning of pairs (DPO)",
    "Rafailov et al. 2023",
    is_on=lambda job: has_pairs(job.data),
    fields=("train.dpo.beta", "train.dpo.label_smoothing"),
    problems=preference_problems,
    layout_problems=pair_batch_problems,
)
LOSS_CHUNK = Technique(
    "logits of some tokens at a time",
    "docs/techniques/recompute.md",
    is_on=lambda job: job.layout.loss_chunk != 0,
    fields=("layout.loss_chunk",),
    combined=("loss_chunk=24",),
)
