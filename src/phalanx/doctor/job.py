"""Checks of a job on this machine: processes, data, memory, checkpoints and the run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from phalanx.checkpoint.retention import space_for
from phalanx.config.corpora import CORPORA
from phalanx.config.fields import replace
from phalanx.config.tokenizers import TOKENIZERS
from phalanx.config.trackers import missing
from phalanx.cost.exact_state import checkpoint_bytes
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.data.vocabulary import vocabulary_size
from phalanx.doctor.findings import CheckResult, DoctorCheck, error, ok, warn
from phalanx.doctor.limits import memory_bytes
from phalanx.doctor.machine import CheckedMachine
from phalanx.doctor.storage import nearest_folder
from phalanx.errors import CheckpointError, DataError, JobError, RunError
from phalanx.units import counted, gib

_UNKNOWN_VOCABULARY = 256
"""Vocabulary for an estimate before the data is prepared; that of the bytes."""


def checks(machine: CheckedMachine) -> list[DoctorCheck]:
    """Returns the checks of this group; the job itself is legal."""
    hangs = "the file system of the data or of the run does not answer"
    layout = DoctorCheck("job", "layout", lambda: layout_here(machine))
    data = DoctorCheck("job", "data", lambda: data_here(machine), hangs, 3.0)
    if machine.job.layout.auto:
        return [layout, data]
    return [
        layout,
        data,
        DoctorCheck("job", "memory", lambda: memory(machine), hangs, 6.0),
        DoctorCheck("job", "checkpoints", lambda: checkpoints(machine), hangs),
        DoctorCheck("job", "run directory", lambda: run_directory(machine), hangs, 3.0),
        DoctorCheck("job", "trackers", lambda: trackers(machine)),
    ]


def trackers(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields whether the job's trackers are installed here, if it has any."""
    names = machine.job.run.trackers
    for name in names:
        if problem := next(missing([name]), ""):
            text, _, remedy = problem.partition(": pip")
            yield error(text, f"pip{remedy}")
        else:
            yield ok(f"{name} is installed")


def layout_here(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields the layout, and whether this machine alone has enough for it."""
    job = machine.job
    if job.layout.auto:
        yield ok("the planner chooses the layout when training starts")
        return
    text = f"{job.layout.line()}: {counted(job.layout.processes, 'process')}".replace("processs", "processes")
    if job.cluster.nodes > 1 and machine.ranks is None and not job.run.nnodes:
        yield error(
            f"{text} on {job.cluster.nodes} nodes, but no launcher started this command",
            f"start it with torchrun, srun or mpiexec, or on every node with run.nnodes={job.cluster.nodes} "
            "run.rdzv_endpoint=HOST:PORT",
        )
    else:
        yield ok(text)


def data_here(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields whether the token shards are there and whole, or can be made here."""
    from phalanx.data.formats import pair_of
    from phalanx.data.index import INDEX
    from phalanx.data.settings import prepared_path, tokenizer_path
    from phalanx.data.shards import open_shards

    data = machine.job.data
    prepare = "prepare the data: phalanx data prepare JOB, with the same settings"
    try:
        folder = prepared_path(data)
        if os.path.exists(folder / INDEX):
            index = open_shards(folder)
            tokens = ", ".join(f"{index.tokens(split):,} {split}" for split in ("train", "val"))
            yield ok(f"{folder}: {tokens} tokens, vocabulary {index.vocab_size}")
            return
        if data.tokenizer not in TOKENIZERS:
            tokenizer_path(data)
    except DataError as problem:
        text, _, advice = str(problem).partition(". ")
        yield error(text, advice or prepare)
        return
    own = {"data.path": data.path} if data.path and "path" in CORPORA[data.corpus].settings else {}
    paths = own | {f"data.mix: {source.path}": source.path for source in data.mix}
    files = {name: (pair_of(path) or (Path(path).expanduser(),))[0] for name, path in paths.items()}
    if unread := [name for name, file in files.items() if not os.access(file, os.R_OK)]:
        yield error(f"{', '.join(unread)}{f'={data.path}' if own else ''} cannot be read", "correct the path")
    elif not os.access(nearest_folder(Path(data.dir).expanduser()), os.W_OK):
        yield error(f"{folder} is not prepared, and {data.dir} cannot be written", "set data.dir to another folder")
    elif machine.several_nodes:
        yield warn(f"{folder} is not prepared: rank 0 prepares it while the others wait", prepare)
    else:
        yield ok(f"{folder} is not prepared yet: training begins with it")


def _vocabulary(machine: CheckedMachine) -> int:
    try:
        return vocabulary_size(machine.job)
    except (JobError, DataError):
        return _UNKNOWN_VOCABULARY


def memory(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields the predicted peak memory of the fullest rank against its device, or of all ranks of this node against
    the host."""
    sizes = machine.torch.facts().get("memory") if machine.may_use_gpus else None
    job = machine.job if sizes else replace(machine.job, "cluster.device", "cpu")
    peak = max(rank.peak for rank in step_memory(rank_spec(job, _vocabulary(machine))))
    if sizes:
        text = f"a rank needs {gib(peak)} at its peak, as predicted; its GPU has {gib(min(sizes))}"
        if peak > min(sizes):
            yield error(text, "phalanx predict JOB lists changes that make it fit")
        else:
            yield ok(text)
        return
    ranks, (most, free) = machine.local_ranks, memory_bytes(machine)
    need = peak * ranks
    text = f"{counted(ranks, 'rank')} × {gib(peak)} at the peak, as predicted; {gib(free)} are free of {gib(most)}"
    if most and need > most:
        yield error(text, "use fewer ranks per node, a smaller micro-batch, recompute=full, or ask for more memory")
    elif most and need > free:
        yield warn(text, "end other programs, or ask for more memory")
    else:
        yield ok(text)


def checkpoints(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields whether the checkpoints that the job keeps fit on the file system of the run directory."""
    job, folder = machine.job, machine.run_directory.path
    size = checkpoint_bytes(job.model, job.train.precision, _vocabulary(machine), job.optimizer)
    found = os.statvfs(nearest_folder(folder))
    free = found.f_bavail * found.f_frsize
    kept = (job.checkpoint.keep or 1) + 1
    text = f"{gib(size)} each; {gib(free)} free"
    remedy = "free some space, lower checkpoint.keep, or choose another run.dir"
    if free < space_for(size):
        yield error(f"{text}: not even one fits", remedy)
    elif free < space_for(size, kept):
        yield warn(f"{text}; {kept} are there at a time, which takes {gib(space_for(size, kept))}", remedy)
    else:
        yield ok(f"{text}, {kept} at a time")


def run_directory(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields whether the job resumes, begins, or is refused in its run directory."""
    directory = machine.run_directory
    try:
        newest = directory.resume_from(machine.job)
    except (JobError, CheckpointError, RunError) as problem:
        text, _, rest = str(problem).partition("; ")
        yield error(" ".join(text.split()), " ".join(rest.split())[:500] or "choose another run.name")
        return
    except OSError as problem:
        yield error(f"{directory.path}: {problem.strerror}", "choose another run.dir")
        return
    if newest is None:
        yield ok(f"{directory.path}: training begins at step 0")
    elif newest.step >= machine.job.train.steps:
        yield ok(f"{directory.path}: finished at step {newest.step}")
    else:
        yield ok(f"{directory.path}: training resumes at step {newest.step} of {machine.job.train.steps}")
