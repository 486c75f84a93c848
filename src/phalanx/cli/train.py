"""`phalanx train JOB`: starts the job's processes, or is one of them, and trains."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.check.load import LoadedJob
from phalanx.checkpoint.manifest import job_of
from phalanx.cli.rank import run_on_ranks
from phalanx.cli.verb import Words, job_verb
from phalanx.config.cluster import DEVICE_WORDS
from phalanx.config.corpora import CORPORA
from phalanx.config.job import Job
from phalanx.echo import echo
from phalanx.errors import JobError, PhalanxError
from phalanx.gc import gc_paused
from phalanx.launch.accelerators import accelerators
from phalanx.launch.output import unblocked
from phalanx.launch.ranks import LOG_DIR, SINGLE, Ranks, first_replica, threads_for
from phalanx.partition.derived import gathers_parameters
from phalanx.partition.ramp import ramp_of
from phalanx.techniques.memory import compiles
from phalanx.train.learning_rate import end_of, resumed_end
from phalanx.train.run_directory import AppendedFile, RunDirectory
from phalanx.units import counted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from phalanx.launch.nodes import Nodes

log = logging.getLogger(__name__)

VERB = job_verb(
    "train",
    "Trains a job: starts its processes on this machine (unless torchrun, srun or mpiexec already did), trains, "
    "validates, saves checkpoints and prints a sample of text. A stopped run resumes where it was.",
    (
        ("train examples/main.yaml", "two processes on this machine, a few minutes"),
        ("train job.yaml layout=auto --steps 50", "in the layout that the planner chooses"),
    ),
    {
        "fresh": "Start over; the existing run is renamed.",
        "oversubscribe": "Start more ranks than this machine's cores and memory bear.",
        "rehearse": "First run the fullest ranks without hardware, and stop with 3 if the job does not fit.",
    },
    exits={
        3: "--rehearse: the job does not fit in memory",
        4: "checkpoint or state corrupt",
        5: "stopped on NaN or a spike",
        75: "stopped cleanly, resumes",
    },
    auto="train",
)

NO_JOB = """\
phalanx train needs a job: a file, or fields
  phalanx init                        writes a job file for this machine
  phalanx train examples/main.yaml    an example, a few minutes
  phalanx train model=tiny steps=50   fields alone
  phalanx train --help                options and sections of a job"""


@VERB.starts
@unblocked()
def run(argv: Sequence[str]) -> int:
    if not set(argv) - {"--json", "--fresh", "--oversubscribe", "--rehearse"}:
        raise JobError(NO_JOB)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is imported, or its profiler prints lines of its own
    return run_on_ranks(partial(_read, argv), _start, _work, lambda words: words.job.run.timeout_s)


def _read(argv: Sequence[str], ranks: Ranks | None) -> Words | None:
    """Returns the job. Raises JobError if it needs other ranks than those that another launcher started."""
    words = VERB.parse(argv)
    if words is None or ranks is None or LOG_DIR in os.environ:  # our own launcher has everything in place
        return words
    if "fresh" in words.switches:
        raise JobError("--fresh is for one launcher; under torchrun, srun or mpiexec choose another run.name")
    if words.job.checkpoint.memory_every:
        raise JobError(
            f"checkpoint.memory_every: ranks of {ranks.source} end with their launcher, and nothing holds memory for "
            "them; set 0, or start `phalanx train` once per node with run.nnodes"
        )
    if words.job.run.min_replicas:
        raise JobError(
            f"run.min_replicas: {ranks.source} ends all ranks with the first that is lost; set 0, or start `phalanx "
            "train` alone"
        )
    if "rehearse" in words.switches:
        raise JobError("--rehearse is for one launcher; before torchrun, srun or mpiexec run `phalanx dryrun`")
    if (processes := words.job.layout.processes) != ranks.world:
        raise JobError(
            f"layout {words.job.layout.line()} needs {processes} processes, but {ranks.source} started {ranks.world}; "
            f"start {processes}, or set layout.dp_replicate so that the product of the axes is {ranks.world}"
        )
    _require_room(words.job, ranks, oversubscribe="oversubscribe" in words.switches)
    if ranks.rank == 0:
        _require_trackers(words.job)
    return words


def _work(words: Words, ranks: Ranks, store: Store | None) -> int:
    """Trains as one of the ranks of our own launcher, or of another one. Of those, which have met, rank 0 manages the
    directory and the data; its failures reach the others through the process group."""
    loaded, as_json = words.loaded, words.as_json
    if LOG_DIR in os.environ:
        return _be_a_rank(loaded.job, ranks, Path(os.environ[LOG_DIR]) / "stderr.log", as_json)
    from phalanx.train.rank import refuse
    from phalanx.train.terminal import error_copied_to

    if ranks.rank:
        return _be_a_rank(loaded.job, ranks, None, as_json, store)
    directory = RunDirectory.of(loaded.job)
    with ExitStack() as held:
        try:
            held.enter_context(directory.lock())
            directory.start(loaded)
            log_file = directory.next_log_dir() / "stderr.log"
        except PhalanxError as error:
            refuse(loaded.job, ranks, error, store)
            raise
        with error_copied_to(log_file):
            return _be_a_rank(loaded.job, ranks, log_file, as_json, store)


def _start(words: Words) -> int:
    """Trains where no launcher has started this process: starts the ranks, or is the only one."""
    loaded, job, as_json = words.loaded, words.job, words.as_json
    from phalanx.data.files import stderr_progress
    from phalanx.data.mixture import open_split
    from phalanx.data.prepare import prepare
    from phalanx.launch.hosts import is_this_machine

    _require_room(job, oversubscribe="oversubscribe" in words.switches)
    directory = RunDirectory.of(job)
    if "fresh" in words.switches and job.checkpoint.remote:
        _require_no_copies(job)
    if job.run.nnodes and not is_this_machine(job.run.endpoint[0]):
        return 0 if _is_finished(directory, job, as_json) else _launch(loaded, directory, as_json)
    _require_trackers(job)
    with directory.lock(fresh="fresh" in words.switches) as renamed:
        if renamed:
            echo(f"{directory.path} was renamed to {renamed}", file=sys.stderr)
        if _is_finished(directory, job, as_json):
            _send_the_rest(directory, job)
            return 0
        with stderr_progress() as progress:
            folder = prepare(job.data, progress=progress)
        train = open_split(folder, "train", job.model.seq_len, job.data)  # says before ranks start that it is too short
        if problems := train.epoch_problems(ramp_of(job).samples(job.train.steps)):
            raise JobError(problems)
        if job.train.eval_samples:
            open_split(folder, "val", job.model.seq_len, job.data)
        if "rehearse" in words.switches:
            from phalanx.cli.dryrun import rehearse_first

            rehearse_first(job)
        directory.start(loaded)
        plain = not job.run.nnodes and not job.checkpoint.memory_every and not job.run.min_replicas
        if job.layout.processes == 1 and plain and loaded.origins["run.max_restarts"] == "default":
            return _be_a_rank(job, SINGLE, directory.next_log_dir() / "stderr.log", as_json)
        return _launch(loaded, directory, as_json)


def _require_room(job: Job, ranks: Ranks | None = None, *, oversubscribe: bool) -> None:
    """Raises JobError if this machine cannot bear the ranks that would start on it, or that another launcher has
    started (`ranks`). Such a rank may see only its own share of cores and accelerators: all cores of the host count,
    and accelerators are not counted."""
    from phalanx.launch import grid

    device, devices = job.cluster.device, 0
    if device != "cpu":
        devices = accelerators(device)[1]
        if ranks is not None and (devices or device in DEVICE_WORDS):
            return
    machine, here = grid.this_machine(devices), job.layout.processes // job.run.most_nodes
    if ranks is not None:
        device, machine = "cpu", replace(machine, cores=os.cpu_count() or 1)
        here = ranks.local_world or grid.tasks_per_node(os.environ)
    if found := [*grid.problems(here, device, machine, oversubscribe=oversubscribe, precision=job.train.precision)]:
        raise JobError(found)


def _launch(loaded: LoadedJob, directory: RunDirectory, as_json: bool) -> int:
    """Starts this machine's ranks: all of them, or those of one node of `run.nnodes`."""
    job = loaded.job
    if job.run.nnodes:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or every lost peer prints the stack of torch's C++
    from phalanx.launch.local import launch_local
    from phalanx.launch.replicas import ReplicaTerms
    from phalanx.launch.verdict import Restarts
    from phalanx.launch.watchdog.diagnosis import Limits
    from phalanx.train.run_directory import newest_step

    processes = job.layout.processes // job.run.most_nodes
    least, grace_s = job.run.min_replicas, None if job.layout.sync == "bsp" else job.run.sync_grace_s
    replicas = ReplicaTerms(job.layout.dp_replicate, least, grace_s) if least else None
    if job.cluster.nodes > 1 and not job.run.nnodes:
        nodes = job.cluster.nodes
        raise JobError(
            f"cluster.nodes is {nodes}, but no launcher started processes: run this command on every node, with "
            f"run.nnodes={nodes} run.rdzv_endpoint=HOST:PORT, or with torchrun, srun or mpiexec, "
            f"{processes // nodes} processes each"
        )
    nodes = _nodes(loaded, directory) if job.run.nnodes else None
    argv = ["train", str(directory.config), *(["--json"] if as_json else [])]
    return launch_local(
        argv,
        processes=job.layout.processes // replicas.replicas if replicas else processes,
        log_dir=directory.logs,
        threads=threads_for(job.run.threads, processes),
        all_ranks=job.run.all_ranks,
        limits=Limits(job.run.hang_limit_s, job.run.timeout_s, follows=not job.run.hang_s),
        metrics=directory.metrics if nodes is None or nodes.is_host else None,
        grace_s=job.run.grace_s,
        restarts=Restarts(
            job.run.max_restarts,
            job.run.restart_window_s,
            lambda: newest_step(directory.metrics),
            None if nodes else directory.path,
            preload(job),
        ),
        nodes=nodes,
        memory=job.checkpoint.memory_every > 0,
        replicas=replicas,
    )


def preload(job: Job) -> list[str]:
    """Returns the modules that every rank imports until its first step, some of them at their first use, and functions
    whose results all ranks share."""
    modules = ["phalanx.cli.train", "phalanx.train.rank", "safetensors.torch", "numpy.ma"]
    modules += ["phalanx.comm.calls:record", "phalanx.train.run_directory:source_digest"]
    if gathers_parameters(job.layout):
        modules += ["phalanx.parallel.fsdp", "torch._dynamo"]
    elif job.layout.recompute != "none" or compiles(job, accelerators(job.cluster.device)[0]):
        modules.append("torch._dynamo")
    return modules


def _nodes(loaded: LoadedJob, directory: RunDirectory) -> Nodes:
    from phalanx.cli.auto_layout import words_for
    from phalanx.launch.nodes import Nodes, Terms

    run = loaded.job.run
    terms = Terms(run.least_nodes, run.most_nodes, loaded.job.layout.processes // run.most_nodes, run.timeout_s)
    return Nodes(run.endpoint, terms, run.node_lost_s, lambda nodes: words_for(loaded, nodes), directory.path)


def _be_a_rank(job: Job, ranks: Ranks, log_file: Path | None, as_json: bool, store: Store | None = None) -> int:
    with gc_paused():
        from phalanx.train.rank import train

    summary = train(job, ranks, log_file, store)
    if ranks.rank == 0 and first_replica():
        summary["sample"] = _sample(job)
        text = json.dumps(summary, indent=1) if as_json else _text(summary)
        if log_file:
            with AppendedFile(log_file.with_name("stdout.log"), log.warning) as copy:
                copy.append(text)
        echo(text)
    return 0


def _sample(job: Job) -> str:
    """Returns text from the checkpoint just written, as `phalanx generate` would make it."""
    if not job.run.sample_tokens or CORPORA[job.data.corpus].tokens is not None:
        return ""
    from phalanx.generate.load import load_run

    loaded = load_run(RunDirectory.of(job).path, device=job.cluster.device)
    return loaded.text(
        job.run.sample_prompt, max_new_tokens=job.run.sample_tokens, temperature=0.8, top_k=50, seed=job.train.seed
    )


def _require_trackers(job: Job) -> None:
    """Raises JobError, with what to install, unless every tracker of the job is installed on the host of rank 0."""
    from phalanx.config.trackers import missing

    if problems := [*missing(job.run.trackers)]:
        raise JobError(problems)


def _send_the_rest(directory: RunDirectory, job: Job) -> None:
    """Sends to trackers what a finished run could not: they were dropped, had no time left, or are new."""
    from phalanx.trackers.processes import Trackers
    from phalanx.trackers.tracker import is_behind

    if behind := tuple(name for name in job.run.trackers if is_behind(directory.path, name)):
        echo(f"sending the rest of metrics.jsonl to {', '.join(behind)}", file=sys.stderr)
        job = replace(job, run=replace(job.run, trackers=behind))
        with Trackers(job, directory.path, None, lambda warning: echo(warning, file=sys.stderr)):
            pass  # they end when everything is sent


def _require_no_copies(job: Job) -> None:
    """Raises JobError if the store holds checkpoints of this run: objects cannot be renamed, and the run would resume
    from them."""
    from phalanx.checkpoint.remote import RemoteCheckpoints, with_patience

    remote, timeout_s = job.checkpoint.remote, job.checkpoint.timeout_s
    if steps := with_patience(timeout_s, remote, lambda _: RemoteCheckpoints.of(remote, job.run.name).steps()):
        raise JobError(
            f"--fresh renames the existing run, but not its copies on the store: {remote}/{job.run.name} holds "
            f"{len(steps)} checkpoints, the newest of step {steps[0]}; choose another run.name, or delete them first"
        )


def _is_finished(directory: RunDirectory, job: Job, as_json: bool) -> bool:
    manifest = directory.resume_from(job)
    if manifest is not None and manifest.step >= job.train.steps:
        manifest = directory.resume_from(job, verify=True)  # a damaged last checkpoint is no end
    if manifest is None or manifest.step < job.train.steps:
        return False
    loss = manifest.meta.get("val_loss")
    if as_json:
        echo(json.dumps({"run": str(directory.path), "step": manifest.step, "val_loss": loss}))
        return True
    done, steps = manifest.step, job.train.steps
    past = f"is {counted(done - steps, 'step')} past train.steps={steps}: step {done}"
    longer = replace(job, train=replace(job.train, steps=2 * done))
    end = resumed_end(longer, job_of(manifest), done, manifest.meta.get("schedule_end")).step
    stretch = f"  (at the schedule's lowest learning rate; optimizer.decay_steps={2 * done} stretches it)"
    echo(
        f"{directory.path} {f'is finished: step {done} of {steps}' if done == steps else past}"
        + (f", validation loss {loss:.4f}" if isinstance(loss, float) else "")
        + f".\n  continue:    train.steps={2 * done}{'' if end == end_of(longer) else stretch}\n"
        "  start over:  --fresh (the existing run is renamed)\n"
        f"  text:        phalanx generate {directory.path} --prompt ...",
        wrap=True,
    )
    return True


def _text(summary: dict[str, Any]) -> str:
    steps = summary["step"]
    loss = "" if summary["loss"] is None else f"; training loss {summary['loss']:.4f}"
    tokens, positions = summary["tokens"], summary["positions"]
    padded = f" ({1 - tokens / positions:.1%} of {positions:,} positions are padding)" if tokens < positions else ""
    lines = [f"trained {tokens:,} tokens{padded} in {steps:,} step{'s' * (steps != 1)}{loss}"]
    if "val_reward" in summary:
        lines.append(f"validation reward: {summary['val_reward']:.4f}")
    elif summary["val_loss"] is not None:
        lines.append(f"validation loss: {summary['val_loss']:.4f}")
    if summary["sample"]:
        lines.append(f"sample:\n{summary['sample']}")
    lines.append(f"run directory: {summary['run']}")
    return "\n".join(lines)
