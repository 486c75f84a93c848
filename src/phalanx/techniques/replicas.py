"""Replicas: those that train alone and synchronise now and then, that come and go, that are threads of one process, and
how replicas sum gradients in a compressed form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from phalanx.config.cluster import DEVICE_WORDS
from phalanx.config.corpora import CORPORA
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.partition.derived import (
    BLOCK,
    LARGEST,
    gathers_parameters,
    is_offloaded,
    overlaps,
    schedule_of,
    stashes,
)
from phalanx.partition.ramp import ramp_of
from phalanx.techniques.technique import Problem, Technique, above, is_one_of


def sync_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    layout, sync = job.layout, job.layout.sync
    if sync == "bsp":
        return
    if layout.dp_replicate < 2:
        yield (
            "layout.sync",
            f"{sync} synchronises replicas, dp_replicate is {layout.dp_replicate}; nearest legal: "
            "dp_replicate=2, or sync=bsp",
        )
    if layout.data_parallel == "threads":
        yield (
            "layout.sync",
            f"{sync} needs replicas with their own parameters, threads share them; nearest legal: "
            "data_parallel=ddp, or sync=bsp",
        )
    yield from _beside_cuts(layout)
    if sync != "asp":
        for path in ("train.eval_every", "checkpoint.every", "checkpoint.memory_every"):
            every = get(job, path)
            if every % layout.sync_every:
                below = every // layout.sync_every * layout.sync_every
                legal = f"{below} or {below + layout.sync_every}" if below else f"{layout.sync_every}"
                yield (
                    path,
                    f"replicas synchronise every sync_every {layout.sync_every} steps and differ in between; {every} "
                    f"is not a multiple of it, nearest: {legal}",
                )


def _beside_cuts(layout: Layout) -> Iterator[Problem]:
    """Yields what cuts models or sequences that replicas need whole, or leaves no end of a step to meet at."""
    if layout.sync == "asp":
        if layout.cp > 1 or layout.ep > 1:
            axis = "cp" if layout.cp > 1 else "ep"
            yield (
                "layout.sync",
                f"asp needs replicas with whole models and whole sequences, {axis} {getattr(layout, axis)} cuts them; "
                f"nearest legal: sync=bsp, or {axis}=1",
            )
        if layout.pp > 1:
            yield (
                "layout.sync",
                f"asp needs replicas with whole models, pp {layout.pp} cuts them; nearest legal: sync=bsp, or pp=1",
            )
    elif overlaps(layout):
        yield (
            "layout.sync",
            f"{layout.schedule} has no flush between steps at which replicas could synchronise by {layout.sync}; "
            "nearest legal: sync=bsp, or schedule=1f1b",
        )


def _thread_problems(job: Job) -> Iterator[Problem]:
    layout = job.layout
    if layout.data_parallel == "threads" and layout.world != layout.dp_replicate:
        yield "layout.data_parallel", f"threads works with dp_replicate alone, not with {layout.line()}"


_UNEQUAL = {
    "asp": "asynchronous SGD computes each share of a step at whatever parameters its replica has just read, so the "
    "result depends on the order in which replicas come",
    "local_sgd": "replicas of local SGD step alone and then average their parameters, which one process does not",
    "diloco": "replicas of DiLoCo step alone and an outer optimizer joins their changes, which one process does not",
}
"""Why a way to synchronise does not compute what one process computes."""


def _differs(job: Job) -> Iterator[Problem]:
    if (sync := job.layout.sync) != "bsp":
        yield "layout.sync", f"{sync} is not compared: {_UNEQUAL[sync]}; nearest legal: sync=bsp"


def _threads_differ(job: Job) -> Iterator[Problem]:
    if job.layout.data_parallel == "threads" and job.cluster.device in DEVICE_WORDS:
        yield "layout.data_parallel", "threads is for CPUs; nearest legal: data_parallel=ddp, or cluster.device=cpu"


def _compression_problems(job: Job) -> Iterator[Problem]:
    """Yields the sums that cannot be compressed."""
    layout, form = job.layout, job.layout.compression
    if form == "none":
        return
    if layout.dp_replicate < 2 or layout.sync != "bsp":
        yield (
            "layout.compression",
            f"{form} is for gradients that replicas sum in every step, dp_replicate is {layout.dp_replicate} and sync "
            f"{layout.sync}; nearest legal: compression=none, or dp_replicate=2 with sync=bsp",
        )
    if layout.data_parallel == "threads":
        yield (
            "layout.compression",
            f"{form} shortens messages, and threads send none; nearest legal: compression=none, or data_parallel=ddp",
        )
    if gathers_parameters(layout) and (is_offloaded(layout, "optimizer") or is_offloaded(layout, "parameters")):
        yield (
            "layout.compression",
            f"{form} follows the last reduce-scatter of zero=3, from which offload={layout.offload} takes gradients to "
            "the host at once; nearest legal: compression=none, or offload=none",
        )
    if form != "powersgd":
        return
    if layout.shard_ranks > 1 and layout.zero < 3:
        yield (
            "layout.compression",
            f"powersgd needs whole rows of matrices, zero {layout.zero} cuts them anywhere for dp_shard "
            f"{layout.dp_shard} × cp {layout.cp} = {layout.shard_ranks} ranks; nearest legal: zero=3, or "
            "compression=int8",
        )
    if stashes(layout) or overlaps(layout):
        yield (
            "layout.compression",
            f"powersgd feeds the error of a step back in the next one, and steps of {layout.schedule} overlap; nearest "
            "legal: schedule=1f1b, or compression=int8",
        )
    if job.train.precision == "fp16":
        yield (
            "layout.compression",
            "powersgd keeps errors over steps whose loss scale differs in fp16; nearest legal: train.precision=bf16, "
            "or compression=int8",
        )


def _compression_differs(job: Job) -> Iterator[Problem]:
    if (form := job.layout.compression) == "none":
        return
    lost = "sums only their part in a space of compression_rank dimensions, and the rest in later steps"
    if form != "powersgd":
        lost = f"rounds gradients and their sum by at most 1/{2 * LARGEST[form]} of the largest of {BLOCK}"
    yield (
        "layout.compression",
        f"{form} {lost}, so it does not equal one process to verify's tolerance; nearest legal: compression=none",
    )


def _refused_shares(job: Job) -> list[int]:
    """Returns the numbers of micro-batches that a replica that comes and goes may get, and its schedule refuses."""
    layout, shares = job.layout, set[int]()
    with suppress(ValueError):  # an equation that has its own message
        for phase in ramp_of(job).phases:
            every = phase.batch.accumulation * layout.dp_replicate
            for there in range(max(1, job.run.min_replicas), layout.dp_replicate + 1):
                shares |= {every // there, -(-every // there)}
    return [n for n in sorted(shares) if layout.pp > 1 and not _has_schedule(layout, n)]


def _has_schedule(layout: Layout, micro_batches: int) -> bool:
    try:
        return bool(schedule_of(layout, micro_batches))
    except JobError:
        return False


def _elastic_problems(job: Job) -> Iterator[Problem]:
    """Yields what cannot be where replicas come and go."""
    least, layout = job.run.min_replicas, job.layout
    if not least:
        return
    if not 2 <= layout.dp_replicate >= least:
        yield (
            "run.min_replicas",
            f"asks for {least} replicas, and dp_replicate is {layout.dp_replicate}; nearest legal: "
            f"{max(1, min(least, layout.dp_replicate))} with layout.dp_replicate={max(2, layout.dp_replicate)}",
        )
    shares = _refused_shares(job)
    refused = {
        "layout.schedule": (
            overlaps(layout) or stashes(layout) or bool(shares),
            f"a replica may get {' or '.join(map(str, shares))} of the micro-batches, which {layout.schedule} refuses"
            if shares
            else f"a step is taken again, and those of {layout.schedule} are not apart",
            "schedule=1f1b",
        ),
        "layout.sync": (
            layout.sync in ("asp", "local_sgd"),
            f"{layout.sync} has no outer step that those who have come could take",
            "sync=diloco, or sync=bsp",
        ),
        "layout.compression": (
            layout.compression == "powersgd",
            "error feedback takes the gradients of a step once, also of one that is given up",
            "compression=int8",
        ),
        "layout.data_parallel": (layout.data_parallel == "threads", "replicas are processes", "data_parallel=ddp"),
        "layout.axes": (bool(layout.axes.sizes), "axes of packages join their ranks once", "none of them"),
        "layout.offload": (
            layout.offload != "none" and gathers_parameters(layout),
            "sums follow the last reduce-scatter of zero=3, from which gradients leave for the host at once",
            "zero=2, or offload=none",
        ),
        "data.corpus": (
            CORPORA[job.data.corpus].rows is not None,
            "only the loss of texts is summed",
            "a corpus of texts",
        ),
        "data.readers": (bool(job.data.readers), "a replica reads for itself", "readers=0"),
        "checkpoint.memory_every": (bool(job.checkpoint.memory_every), "replicas are the copies", "memory_every=0"),
        "run.nnodes": (
            ":" in job.run.nnodes or layout.dp_replicate % job.run.most_nodes > 0,
            "all nodes have equally many replicas, and min_replicas says how many are enough",
            f"nnodes={job.run.most_nodes}, and a dp_replicate that is a multiple of it",
        ),
        "run.max_restarts": (not job.run.max_restarts, "a replica comes back by a restart", "max_restarts=3"),
        **{
            f"guard.{name}": (
                getattr(job.guard, name) == "rewind",
                "each replica would look for the newest checkpoint at another moment",
                f"{name}=skip",
            )
            for name in ("on_spike", "on_nan")
        },
    }
    for path, (wrong, why, legal) in refused.items():
        if wrong:
            yield path, f"with run.min_replicas={least} {why}; nearest legal: {legal}, or run.min_replicas=0"


_DILOCO = is_one_of("layout.sync", "diloco")
INDEPENDENT_REPLICAS = Technique(
    "replicas that train alone and synchronise now and then",
    "Dean et al. 2012; McMahan et al. 2017; Douillard et al. 2023",
    is_on=lambda job: job.layout.sync != "bsp",
    fields=("layout.sync", "layout.sync_every", "optimizer.outer_lr", "optimizer.outer_momentum"),
    layout_problems=sync_problems,
    conditions={
        "layout.sync_every": is_one_of("layout.sync", "local_sgd", "diloco"),
        "optimizer.outer_lr": _DILOCO,
        "optimizer.outer_momentum": _DILOCO,
    },
    differs=_differs,
)
ELASTIC = Technique(
    "replicas that come and go",
    "torchft (Meta 2025), fault-tolerant HSDP",
    is_on=lambda job: job.run.min_replicas > 0,
    fields=("run.min_replicas", "run.sync_grace_s"),
    layout_problems=_elastic_problems,
    conditions={
        "run.sync_grace_s": (
            lambda job: job.run.min_replicas and job.layout.sync == "diloco",
            "is for run.min_replicas above 0 with layout.sync=diloco",
        ),
    },
)
THREADS = Technique(
    "replicas as threads of one process",
    "torch's DataParallel",
    is_on=lambda job: job.layout.data_parallel == "threads",
    fields=("layout.data_parallel",),
    layout_problems=_thread_problems,
    conditions={"layout.data_parallel": above("layout.dp_replicate", 1, "replicas: ", auto=True)},
    layouts=("dp_replicate=2,accumulation=2,data_parallel=threads",),
    differs=_threads_differ,
)
COMPRESSION = Technique(
    "gradients summed over replicas in a compressed form (codes, PowerSGD)",
    "Vogels et al. 2019; Wang et al. 2023, section 3.3",
    is_on=lambda job: job.layout.compression != "none",
    fields=("layout.compression", "layout.compression_rank", "layout.compression_start"),
    layout_problems=_compression_problems,
    conditions={
        "layout.compression_rank": is_one_of("layout.compression", "powersgd"),
        "layout.compression_start": is_one_of("layout.compression", "int8", "int4", "powersgd"),
    },
    differs=_compression_differs,
    compared_without=True,
)
