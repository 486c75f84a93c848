"""The Python API: `import phalanx` offers functions that do what the verbs do and return objects.

A job is the same as on the command line, and so are its errors: each is a PhalanxError whose text is the verb's
message. `import phalanx` takes milliseconds, because a function imports what it needs when it is called. Only
`rehearse_job`, `verify_layouts`, `open_checkpoint` and `plan_layout(check=True)` import torch. In a notebook a plan, a
prediction, a simulated step, a verification and a run show themselves as a page.

Example:
    >>> import dataclasses
    >>> from phalanx import load_job, plan_layout, predict_step
    >>> job = load_job("model=llama3-8b", "cluster=dgx-h100:2", "precision=bf16", "global_batch=64", "layout=auto")
    >>> best = plan_layout(job).best[0]
    >>> job = dataclasses.replace(job, layout=best.layout)
    >>> predict_step(job).fits
    True
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import JobError, RunError

if TYPE_CHECKING:
    from phalanx.checkpoint.shard_file import Reader
    from phalanx.config.job import Job
    from phalanx.cost.prediction import Prediction
    from phalanx.cost.spec import StepSpec
    from phalanx.dryrun.check import JobRehearsal
    from phalanx.plan.plan import Plan
    from phalanx.report.run import RunRecord
    from phalanx.simulate.timeline import Timeline
    from phalanx.verify.run import VerifyReport

__all__ = [
    "load_job",
    "open_checkpoint",
    "plan_layout",
    "predict_step",
    "predict_traffic",
    "read_run",
    "read_traffic",
    "rehearse_job",
    "simulate_step",
    "train_job",
    "verify_layouts",
]


def load_job(*words: str | os.PathLike[str]) -> Job:
    """Returns the checked job of job files and settings, in the words of the command line.

    Args:
        words: paths of job files and `key=value` settings; later ones win, and settings win over files.

    Raises:
        JobError: with every problem of the files, settings and values; `problems` lists them.

    Example:
        >>> job = load_job("model=llama3-8b", "cluster=dgx-h100", "layout=dp_shard=4,tp=2", "global_batch=64")
        >>> job.model.n_layers, job.layout.line(), job.train.global_batch
        (32, 'dp_shard=4,tp=2', 64)
    """
    from phalanx.check.load import load_words
    from phalanx.config import overrides

    return load_words(overrides.parse([os.fspath(word) for word in words])).job


def plan_layout(job: Job, *, fixed: Mapping[str, Any] | None = None, top: int = 10, check: bool = False) -> Plan:
    """Returns the fastest layouts of a job that fit in memory, fastest first, and the reasons.

    Args:
        job: what to train, on which cluster; its layout plays no part.
        fixed: fields of the layout that stay as they are, such as {"tp": 2}.
        top: most layouts in `best`.
        check: rehearse the best three on this machine, as `phalanx plan --check` does. Those that do not fit are
            `struck`, with the reasons; the others have the bytes that their fullest rank needs in `rehearsed`.

    Raises:
        JobError: no layout is legal, or something about the devices is not known. That none fits in memory is no
            error: `best` is then empty, and `nearest` needs the least memory.
        DoesNotFitError: with `check`, every layout that is predicted to fit was struck.

    Example:
        >>> job = load_job("model=llama3-8b", "cluster=dgx-h100", "global_batch=64", "layout=auto")
        >>> plan = plan_layout(job, fixed={"pp": 1})
        >>> best = plan.best[0]
        >>> best.layout.world, best.layout.pp, best.prediction.fits
        (8, 1, True)
        >>> plan.fastest.seconds <= best.seconds
        True
    """
    from phalanx.data.documents import with_documents
    from phalanx.data.settings import vocabulary_size
    from phalanx.plan.planner import search
    from phalanx.plan.space import plan_request

    plan = search(with_documents(plan_request(job, vocabulary_size(job), dict(fixed or {})), job))
    if check:
        from phalanx.dryrun.check import check_plan

        plan = check_plan(plan, job)
    return replace(plan, best=plan.best[:top])


def predict_step(job: Job) -> Prediction:
    """Returns the predicted time, memory and FLOPs of one step of a job, from formulas.

    Args:
        job: a job with a layout, on a cluster that is known.

    Raises:
        JobError: the layout is open, or something about the devices is not known. That the step does not fit in memory
            is no error: `fits` is then false.

    Example:
        >>> words = ["model=llama3-8b", "cluster=dgx-h100", "precision=bf16", "layout=dp_shard=8,recompute=full"]
        >>> step = predict_step(load_job(*words, "global_batch=16"))
        >>> f"{step.step_time_s:.0f} s, MFU {step.mfu:.1f}, peak {step.fullest.peak / 2**30:.0f} GiB, fits: {step.fits}"
        '3 s, MFU 0.4, peak 30 GiB, fits: True'
    """
    from phalanx.cost.prediction import predict

    return predict(_spec(job))


def predict_traffic(job: Job) -> dict[str, dict[str, float]]:
    """Returns the bytes that rank 0 sends in one step, by axis of the mesh and collective: exactly those that the run
    counts (`read_traffic`); with `sync=asp` those of replicas of equal speed.

    Args:
        job: a job with a layout.

    Raises:
        JobError: the layout is open.

    Example:
        >>> predict_traffic(load_job("model=tiny", "data.corpus=random", "dp_replicate=2", "global_batch=2"))
        {'dp_replicate': {'all_reduce': 482304.0}, 'world': {'all_reduce': 24.0}}
    """
    from phalanx.cost.job_spec import rank_spec
    from phalanx.data.documents import with_documents
    from phalanx.data.settings import vocabulary_size
    from phalanx.report.figures import rank_traffic

    _require_layout(job)
    return rank_traffic(job, with_documents(rank_spec(job, vocabulary_size(job)), job))


def rehearse_job(job: Job, *, ranks: Sequence[int] = (), steps: int = 2) -> JobRehearsal:
    """Runs the real program of ranks of a job without hardware, as `phalanx dryrun` does, and returns their memory,
    bytes sent, FLOPs and calls beside the prediction.

    Args:
        job: a job with a layout.
        ranks: the ranks to run, one after the other; empty: those that may be fullest, as `phalanx plan --check` does.
        steps: optimizer steps to take; ignored without `ranks`.

    Raises:
        JobError: the layout is open, there is no such rank, or the job cannot be rehearsed. That it does not fit in
            memory is no error: `fits` is then false.

    Example:
        >>> job = load_job("model=tiny", "data.corpus=random", "dp_shard=4,tp=2", "global_batch=4")
        >>> found = rehearse_job(job)
        >>> found.fits, found.fullest.rank, found.fullest.traffic_bytes == predict_traffic(job)
        (True, 0, True)
    """
    from phalanx.data.settings import vocabulary_size
    from phalanx.dryrun.check import check, rehearse_ranks

    _require_layout(job)
    vocab = vocabulary_size(job)
    return rehearse_ranks(job, vocab, ranks, steps) if ranks else check(job, vocab)


def simulate_step(
    job: Job,
    *,
    stragglers: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None,
    slow_axes: Mapping[str, float] | None = None,
) -> Timeline:
    """Returns one step of a job event by event: every pass, message and collective of each pipeline rank, in seconds.

    Args:
        job: a job with a layout, on a cluster that is known.
        stragglers: factors on the time of the passes of pipeline ranks, such as {2: 1.2}.
        slow_links: factors on messages between two pipeline ranks, such as {(0, 1): 2.0}.
        slow_axes: factors on the collectives of an axis (tp, cp, ep, dp), such as {"dp": 1.5}.

    Raises:
        JobError: as `predict_step`; or there is no such rank or axis; or the layout has no such step.

    Example:
        >>> job = load_job("model=llama3-8b", "cluster=dgx-h100", "layout=pp=4,tp=2,accumulation=8", "global_batch=8")
        >>> even, slow = simulate_step(job), simulate_step(job, stragglers={1: 1.5})
        >>> even.schedule.ranks, slow.seconds > even.seconds
        (4, True)
        >>> slow.shares(0).idle > even.shares(0).idle  # rank 0 waits for rank 1
        True
    """
    from phalanx.simulate.step import Disturbance, check, simulate

    spec = _spec(job)
    slow = tuple((stragglers or {}).items()), tuple((slow_links or {}).items()), tuple((slow_axes or {}).items())
    disturbance = Disturbance(*slow)
    check(disturbance, spec)
    return simulate(spec, disturbance)


def verify_layouts(job: Job, layouts: Sequence[str] = (), *, steps: int = 2, max_ranks: int = 8) -> VerifyReport:
    """Returns the comparison of layouts with one process: a few steps in float64, on processes of this machine. A
    program that calls it needs `if __name__ == "__main__":`, as every program that starts processes.

    Args:
        job: the job whose model is compared; a large one as a small one of the same kind.
        layouts: layouts such as "tp=2,sp=true"; empty: the job's own, and a set in which every two techniques meet.
        steps: optimizer steps to compare.
        max_ranks: most processes at once.

    Raises:
        JobError: a layout is not legal for the job.
        NotFiniteError: the job diverges on one process already. An error on the ranks of a layout is no error: its case
            has it as `error`.

    Example:
        >>> report = verify_layouts(load_job("model=tiny", "data.corpus=random"), ["tp=2"])
        >>> [(case.layout, case.world, case.ok) for case in report.cases]
        [('tp=2', 2, True)]
    """
    from phalanx.verify import run
    from phalanx.verify.select import select

    selection = select(job, lines=layouts, max_ranks=max_ranks)
    run.refuse_missing_device(selection)
    return run.run(selection, steps, on_case=lambda case: None, on_start=lambda layout: None)


def train_job(job: Job, *, fresh: bool = False) -> Path:
    """Trains a job as `phalanx train` does, in processes of its own, and returns the run's directory. A run that exists
    is resumed. The log goes to this program's standard error.

    Args:
        job: a job with a layout, or with `layout=auto`.
        fresh: start over; an existing run is renamed.

    Raises:
        RunError: the run did not finish; `exit_code` says why, as that of the verb: 2 the job is wrong, 4 data or a
            checkpoint is corrupt, 5 stopped on NaN, 75 stopped with a checkpoint, and the same call resumes.

    Example:
        >>> words = ["model=tiny", "data.corpus=random", "data.random_tokens=2000", "train.steps=2", "global_batch=2"]
        >>> run = train_job(load_job(*words, "run.name=first", "run.sample_tokens=0"))
        >>> read_run(run).state, read_run(run).metrics.last_step
        ('finished', 2)
    """
    from phalanx.check.load import LoadedJob, as_yaml, origins_of
    from phalanx.train.run_directory import RunDirectory

    with tempfile.TemporaryDirectory(prefix="phalanx_job_") as folder:
        file = Path(folder, "job.yaml")
        file.write_text(as_yaml(LoadedJob(job, origins_of(job, "Python"))), encoding="utf-8")
        command = [sys.executable, "-m", "phalanx", "train", str(file), *(["--fresh"] if fresh else [])]
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    path = RunDirectory.of(job).path
    if code:
        error = RunError(f"training ended with exit code {code}: its message is above, its logs are in {path / 'logs'}")
        error.exit_code = code
        raise error
    return path


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Returns everything that the files of a run say: its state, job, metrics, checkpoints, attempts and environment.

    Args:
        path: the run's directory; the run may be under way, or on a machine that writes there.

    Raises:
        DataError: the directory is no run's. A file of it that cannot be read is no error: `notes` says so.

    Example:
        >>> run = read_run("runs/main")
        >>> run.state, run.total, [checkpoint.step for checkpoint in run.checkpoints]
        ('finished', 40, [40])
        >>> [(step, round(loss, 3)) for step, loss in run.metrics.points("loss")][-2:]
        [(39, 3.02), (40, 3.018)]
    """
    from phalanx.report.run import read_run as read

    return read(Path(path))


def read_traffic(path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """Returns the bytes that rank 0 of a run sent per step, by axis of the mesh and collective, as its ledger counted
    them: exactly those of `predict_traffic`. Empty before the run has counted any, and for one device.

    Args:
        path: the run's directory.

    Raises:
        DataError: the directory is no run's.

    Example:
        >>> read_traffic("runs/main")
        {'pp': {'send': 24576.0}}
    """
    from phalanx.report.run import traffic_of

    return traffic_of(read_run(path).metrics.last("traffic"))


def open_checkpoint(path: str | os.PathLike[str], *, step: int = 0) -> Reader:
    """Returns the tensors of a checkpoint of any layout, whole, to be read one by one.

    Args:
        path: a run's directory, a checkpoint, a safetensors file, or a folder of them.
        step: the step of a run's checkpoint; 0: the newest whole one.

    Raises:
        CheckpointError: there is none, or it is damaged; also when a tensor is read.
        JobError: a step is asked for where there is only one state.

    Example:
        >>> with open_checkpoint("runs/small") as checkpoint:
        ...     names = checkpoint.names()
        ...     weight = checkpoint.read("embed.weight")
        >>> checkpoint.manifest.step, names[:2], weight.shape, weight.dtype
        (1, ['embed.weight', 'blocks.0.attn_norm.weight'], torch.Size([37, 24]), torch.float64)
    """
    from phalanx.checkpoint.consolidated import open_source

    return open_source(Path(path), step)


def _spec(job: Job) -> StepSpec:
    """Returns the spec of a job's step. Raises JobError if its layout is open."""
    from phalanx.cost.job_spec import step_spec
    from phalanx.data.documents import with_documents
    from phalanx.data.settings import vocabulary_size

    _require_layout(job)
    return with_documents(step_spec(job, vocabulary_size(job)), job)


def _require_layout(job: Job) -> None:
    if job.layout.auto:
        raise JobError("layout: auto leaves the layout open: give one, or take that of plan_layout(job).best[0].layout")
