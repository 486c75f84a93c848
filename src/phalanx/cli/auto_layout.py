"""`layout: auto`: verbs use the planner's choice for the available devices. Predictions from measurements of them that
are too noisy are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.check.effect import without_idle
from phalanx.check.job import problems_of
from phalanx.check.load import LoadedJob
from phalanx.checkpoint.inventory import newest_valid
from phalanx.checkpoint.manifest import job_of
from phalanx.config import clusters
from phalanx.config.calibration import Assessment, assess
from phalanx.config.cluster import DEVICE_TYPES, Cluster
from phalanx.config.clusters import LOCAL, cluster_of
from phalanx.config.fields import get, leaves
from phalanx.config.fields import replace as with_value
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.precision import HALF
from phalanx.data.documents import with_documents
from phalanx.data.files import stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch.ranks import Ranks, detect
from phalanx.partition import derived as batch_equation
from phalanx.train.run_directory import RunDirectory
from phalanx.units import duration, seconds

if TYPE_CHECKING:
    from phalanx.plan.space import PlanRequest

BY_HAND = "`phalanx bench compute` and `phalanx bench comm`"
MEASUREMENTS = {"comm": "intra.gbs", "compute": "accelerator.name"}
"""The measurements of `phalanx bench`, each with a field of the machine's file that it writes."""
PLANNED, CHECKPOINT = "planned", "the checkpoint of"
"""Beginnings of the origin of a layout that was left open."""
OPEN_AT_ZERO = ("micro_batch", "accumulation")
"""Layout fields that are derived if they are 0, so that a 0 fixes nothing."""


def assessment_of(cluster: Cluster, world: int) -> Assessment | None:
    """Assesses the measurements that predictions for `world` devices (0: not known yet) of the cluster need; None for a
    cluster that was not measured by `phalanx bench`."""
    is_local = cluster.preset.partition(":")[0] == LOCAL
    if not (is_local or cluster.calibration.is_known):
        return None
    name = cluster.accelerator.name if cluster.device == "cpu" else ""
    return assess(cluster.calibration, ("compute",) if world == 1 else ("compute", "comm"), here=is_local, cpu=name)


def check_calibration(cluster: Cluster, world: int, *, prints: bool = True) -> None:
    """Prints fit error and spread of a measured cluster as one line on standard error.

    Raises JobError where they exceed the bounds above which predictions are refused, unless cluster.allow_unreliable.
    """
    assessment = assessment_of(cluster, world)
    if assessment is None:
        return
    name = f"cluster={cluster.preset}" if cluster.preset else "cluster"
    if assessment.status == "refused" and not cluster.allow_unreliable:
        raise JobError(
            f"predictions on {name} are refused, because its measurements are too noisy ({assessment.problem}): "
            f"{assessment.remedy}, or predict with them anyway: cluster.allow_unreliable=true"
        )
    if prints:
        echo(f"{name}: {assessment.line()}", file=sys.stderr, wrap=True)


def calibration_document(cluster: Cluster, world: int) -> dict[str, Any] | None:
    """Returns the entry `calibration` of `--json`: None for a cluster that was not measured."""
    assessment = assessment_of(cluster, world)
    return assessment.as_dict() if assessment else None


def planned(loaded: LoadedJob, *, measures: bool) -> LoadedJob:
    """Returns the job with the planner's layout, which is reported on standard error. If the job does not describe the
    devices, they are this machine's, as `phalanx bench` measured them: now, if it `measures`.

    Raises JobError if nothing is known about the devices or no layout is legal, DoesNotFitError if none fits.
    """
    loaded = on_known_devices(loaded, measures)
    check_calibration(loaded.job.cluster, loaded.job.cluster.devices)
    return _chosen(loaded, worlds_of(loaded.job), vocabulary_size(loaded.job))


def planned_to_train(loaded: LoadedJob, *, fresh: bool) -> LoadedJob:
    """Returns the job for training: a run resumes in the layout of its newest checkpoint, if that is legal here and the
    run does not start over (`fresh`), and the ranks that another launcher started are the devices."""
    ranks = detect(os.environ)
    loaded = on_known_devices(loaded, measures=ranks is None)
    worlds = worlds_of(loaded.job)
    if ranks is not None:
        loaded, worlds = _on_ranks(loaded, ranks), (ranks.world,)
    prints = ranks is None or ranks.rank == 0
    if not fresh and (kept := _of_checkpoint(loaded, worlds)):
        layout, step = kept
        where = f"{CHECKPOINT} {RunDirectory.of(loaded.job).path} at step {step}"
        if prints:
            echo(f"layout: {layout.line()}  (from {where}; layout=LINE resumes in another)", file=sys.stderr, wrap=True)
        return with_layout(loaded, layout, worlds, where)
    check_calibration(loaded.job.cluster, loaded.job.cluster.devices, prints=prints)
    return _chosen(loaded, worlds, _prepared_vocabulary(loaded.job, ranks), prints)


def worlds_of(job: Job) -> tuple[int, ...]:
    """Returns the numbers of devices that the planner may use: all, and on a CPU, which starts any number of processes,
    also fewer."""
    cluster = job.cluster
    least = 1 if cluster.device == "cpu" and cluster.nodes == 1 else cluster.devices
    return tuple(range(least, cluster.devices + 1))


def _chosen(loaded: LoadedJob, worlds: tuple[int, ...], vocab: int, prints: bool = True) -> LoadedJob:
    # Here, because numpy is a third of the time that --help takes.
    from phalanx.plan.notes import NO_HEADROOM
    from phalanx.plan.planner import choose

    with stderr_progress() as progress:
        plan = choose(request_of(loaded, vocab, worlds), progress if prints else None)
    best = plan.best[0]
    if prints:
        echo(
            f"layout: {best.layout.line()}  (planned: {plan.searched:,} layouts searched in {seconds(plan.seconds)}; "
            f"predicted {duration(best.seconds)} per step)",
            file=sys.stderr,
            wrap=True,
        )
        for note in (note for note in plan.notes if note.startswith(NO_HEADROOM)):
            echo(note, file=sys.stderr, wrap=True)
    return with_layout(loaded, best.layout, worlds, PLANNED)


def request_of(loaded: LoadedJob, vocab: int, worlds: tuple[int, ...]) -> PlanRequest:
    """Returns what the planner is asked for: the layout's fields that the user did not set, on one of the `worlds`, for
    the documents of the job's data."""
    from phalanx.plan.space import plan_request

    fixed = {name: getattr(loaded.job.layout, name) for name in fixed_of(loaded)}
    return with_documents(replace(plan_request(loaded.job, vocab, fixed), worlds=worlds), loaded.job)


def fixed_of(loaded: LoadedJob) -> list[str]:
    """Returns the layout fields that the user set, which the planner keeps."""
    layout = loaded.job.layout
    stated = [name for name in leaves(Layout) if loaded.origins[f"layout.{name}"] != "default"]
    return [name for name in stated if name != "auto" and (name not in OPEN_AT_ZERO or getattr(layout, name))]


def with_layout(loaded: LoadedJob, layout: Layout, worlds: tuple[int, ...], origin: str) -> LoadedJob:
    """Returns the job with a whole layout. Raises JobError if it is not legal after all."""
    job = _job_with(loaded.job, layout, worlds)
    if problems := problems_of(job):
        raise JobError([f"layout {layout.line()}, {origin}: {path}: {message}" for path, message in problems])
    fixed = fixed_of(loaded)
    origins = {**loaded.origins, **{f"layout.{name}": origin for name in leaves(Layout) if name not in fixed}}
    if job.cluster != loaded.job.cluster:
        origins["cluster.devices_per_node"] = origin
    return LoadedJob(job, origins)


def _job_with(job: Job, layout: Layout, worlds: tuple[int, ...]) -> Job:
    """Returns the job with a whole layout, and with its devices if it may use fewer than there are."""
    if layout.world in worlds:
        job = with_value(job, "cluster.devices_per_node", layout.world // job.cluster.nodes)
    return replace(job, layout=replace(layout, auto=False))


def _of_checkpoint(loaded: LoadedJob, worlds: tuple[int, ...]) -> tuple[Layout, int] | None:
    """Returns layout and step of the run's newest checkpoint if its layout has the fields that the job fixes and is
    legal for the job on its devices. Whether the rest of the job is that of the run, train checks."""
    directory = RunDirectory.of(loaded.job)
    if not os.path.isdir(directory.checkpoints):
        return None
    manifest = newest_valid(directory.checkpoints, verify=False, report=lambda _: None)
    if manifest is None:
        return None
    layout = job_of(manifest).layout
    changed = any(getattr(layout, name) != getattr(loaded.job.layout, name) for name in fixed_of(loaded))
    return None if changed or problems_of(_job_with(loaded.job, layout, worlds)) else (layout, manifest.step)


def _prepared_vocabulary(job: Job, ranks: Ranks | None) -> int:
    """Returns the size of the vocabulary. Prepares the data first if necessary; not on ranks that another launcher
    started, which would all do so."""
    try:
        return vocabulary_size(job)
    except JobError:
        if ranks is not None:
            raise
    from phalanx.data.prepare import prepare

    with stderr_progress() as progress:
        prepare(job.data, progress=progress)
    return vocabulary_size(job)


def _on_ranks(loaded: LoadedJob, ranks: Ranks) -> LoadedJob:
    per_node = ranks.local_world or ranks.world
    nodes, rest = divmod(ranks.world, per_node)
    if rest:
        nodes, per_node = 1, ranks.world
    return _with_cluster(
        loaded, {"cluster.nodes": nodes, "cluster.devices_per_node": per_node}, f"started by {ranks.source}"
    )


def on_known_devices(loaded: LoadedJob, measures: bool) -> LoadedJob:
    """Returns the job as it is if it describes its devices, otherwise on this machine. Its other cluster fields (nodes,
    devices per node) stay."""
    if loaded.job.cluster.accelerator.name:
        return loaded
    wanted = loaded.job.cluster
    if measures:
        _measure_what_is_missing(wanted, loaded.job.train.precision)
    try:
        machine = cluster_of(LOCAL)
    except JobError as error:
        raise JobError(
            [
                "layout auto: the planner needs the devices; name a machine, such as cluster=dgx-h100:8, or "
                f"measure this one with {BY_HAND}",
                *error.problems,
            ]
        ) from None
    if DEVICE_TYPES[wanted.device] not in ("", machine.device):
        raise JobError(
            f"cluster.device is {wanted.device}, but {clusters.default_path()} describes {machine.device}: name a "
            f"machine, or measure with `phalanx bench compute --device {wanted.device}` and the same for comm"
        )
    stated = {path for path in leaves() if path.startswith("cluster.") and loaded.origins[path] != "default"}
    found = {f"cluster.{path}": get(machine, path) for path in leaves(type(machine))}
    return _with_cluster(
        loaded,
        {path: value for path, value in found.items() if path not in stated},
        f"measured: {clusters.default_path()}",
    )


def _with_cluster(loaded: LoadedJob, values: dict[str, Any], origin: str) -> LoadedJob:
    job, origins = loaded.job, dict(loaded.origins)
    for path, value in values.items():
        if get(job, path) != value:
            job = with_value(job, path, value)
            origins[path] = origin
    return LoadedJob(job, origins)


def _measure_what_is_missing(wanted: Cluster, precision: str) -> None:
    """Runs `phalanx bench` quickly for values missing in the machine's file. Raises RunError if that fails."""
    path = clusters.default_path()
    known = clusters.local_fields(path) if path.exists() else {}
    for command, field in MEASUREMENTS.items():
        if field in known:
            continue
        if command == "comm":
            from phalanx.launch.accelerators import accelerators  # torch: an already measured machine needs none

            if 1 in (accelerators(wanted.device)[1], wanted.devices_per_node):  # a CPU has any number of devices
                continue
        words = ["bench", command, "--quick"]
        words += ["--device", wanted.device] if wanted.device != "auto" else []
        words += ["--precision", precision] if command == "compute" and precision in HALF else []
        echo(f"layout auto: measuring this machine for {path}: phalanx {' '.join(words)}", file=sys.stderr, flush=True)
        process = [sys.executable, "-P", "-m", "phalanx", *words]  # -P: without modules of the current directory
        done = subprocess.run(process, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise RunError(
                f"this machine could not be measured (exit code {done.returncode}): run {BY_HAND} to see why, or name "
                "a machine, such as cluster=dgx-h100:8, or a layout"
            )


def words_for(loaded: LoadedJob, nodes: int) -> tuple[str, ...]:
    """Returns the words of the command line that adapt a job of `run.nnodes` nodes to `nodes` of them.

    A layout that the user has chosen keeps its tensor, context and pipeline ranks and loses data ranks, if that is
    legal. Otherwise the planner chooses. Raises JobError or DoesNotFitError if there is no layout."""
    job = loaded.job
    most = job.run.most_nodes
    per_node = job.layout.processes // most
    words = [f"run.nnodes={nodes}", f"cluster.nodes={nodes}"]
    if job.cluster.devices_per_node:
        words.append(f"cluster.devices_per_node={per_node}")
    if nodes == most:
        return tuple(words)
    batch = batch_equation.solve(job.train.global_batch, job.layout).global_batch
    cluster = replace(job.cluster, nodes=nodes, devices_per_node=job.cluster.devices_per_node and per_node)
    train, run = replace(job.train, global_batch=batch), replace(job.run, nnodes=str(nodes))
    smaller = replace(job, cluster=cluster, train=train, run=run)
    was_planned = loaded.origins["layout.auto"].startswith((PLANNED, CHECKPOINT))
    layout = None if was_planned else _with_fewer_data_ranks(smaller, nodes, most)
    if layout is None:
        cluster = replace(cluster, devices_per_node=per_node)
        left_open = replace(smaller, layout=Layout(auto=True), cluster=cluster)
        origins = {path: "default" if path.startswith("layout.") else each for path, each in loaded.origins.items()}
        layout = planned(LoadedJob(left_open, origins), measures=False).job.layout
    layout = without_idle(replace(smaller, layout=layout))
    words += [f"train.global_batch={batch}", f"layout={layout.line()}"]
    if layout.bucket_mb != Layout().bucket_mb:
        words.append(f"layout.bucket_mb={layout.bucket_mb}")
    return tuple(words)


def _with_fewer_data_ranks(job: Job, nodes: int, most: int) -> Layout | None:
    """Returns the layout on a fraction of the data ranks, or None if none is legal."""
    layout = job.layout
    for axis in ("dp_replicate", "dp_shard"):
        ranks, rest = divmod(getattr(layout, axis) * nodes, most)
        if not rest and ranks:
            # More micro-batches make up for the ranks.
            fewer = replace(layout, **{axis: ranks}, accumulation=0)
            if not problems_of(replace(job, layout=fewer)):
                return fewer
    return None
