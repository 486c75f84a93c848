"""One rank of a run, from its place among the ranks to the summary: its terminal, logs, process group and trackers."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.comm.agree import on_rank_zero
from phalanx.config.job import Job
from phalanx.errors import PhalanxError
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks, first_replica, threads_for
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.model.attention_blocks import ordered_kernels
from phalanx.parallel.offload import device_budget
from phalanx.trackers.processes import MetricsEndpoint, Trackers
from phalanx.train import device as devices
from phalanx.train.loop import Trainer
from phalanx.train.requests import StopRequest
from phalanx.train.run_directory import RunDirectory
from phalanx.train.start import watch
from phalanx.train.terminal import RunReport, Terminal, copied_to, error_copied_to, logging_to

log = logging.getLogger(__name__)

REFUSAL_S = 60.0
"""Seconds that rank 0 waits for the others in order to tell them that it cannot start."""


def train(job: Job, ranks: Ranks, log_file: Path | None, store: Store | None = None) -> dict[str, Any]:
    """Trains `job` as one of `ranks`, from the run directory's newest checkpoint if there is one.

    Args:
        job: the resolved job.
        ranks: this rank's place.
        log_file: its log, in its folder of the attempt; None on ranks that another launcher started, but rank 0, which
            tells them.
        store: the store of ranks that have met (launch/meeting.py).

    Returns the summary that `phalanx train --json` prints. Raises NotFiniteError if loss or gradients are no longer
    finite, StoppedError after a signal once a checkpoint is written, and the errors of reading data and checkpoints.
    """
    device, run = devices.choose(job.cluster.device, ranks.local_rank), RunDirectory.of(job).path
    trackers = Trackers(job, run, log_file and log_file.parent, log.warning)
    shows = ranks.rank == 0 and first_replica()
    torch.set_num_threads(threads_for(job.run.threads, ranks.local_world or 1))
    if device.type == "cpu":
        devices.keep_freed_memory()
    if job.train.deterministic != torch.are_deterministic_algorithms_enabled():  # it imports torch's compiler
        torch.use_deterministic_algorithms(job.train.deterministic)
    with (
        Terminal(job if ranks.rank == 0 else None) as terminal,
        logging_to(terminal, job.run.log_level, ranks.rank, log_file, job.run.all_ranks),
        RunReport(run) if shows and job.run.report else nullcontext(),
        # It ends after the process group, so that no rank waits for a tracker.
        trackers if shows and job.run.trackers else nullcontext(),
        process_group(ranks, device=device, timeout_s=job.run.timeout_s, store=store),
        ordered_kernels(device),
        MetricsEndpoint(job, run) as endpoint,
    ):
        if job.run.metrics_port and first_replica():
            on_rank_zero(endpoint.listen)
        logs = on_rank_zero(lambda: str(log_file.parents[1]) if log_file else "")  # or the error of `refuse`
        copy = log_file_of(Path(logs), ranks) if logs and not log_file else None
        with copied_to(copy), error_copied_to(copy), device_budget(job.run.device_budget_mib) as peaks:
            watch(job, ranks, log_file)
            trainer = Trainer(job, ranks, device, StopRequest())
            with trainer.stop, terminal.live(run):  # from here on there is something to save
                summary = trainer.run()
    heartbeat.enter(Phase.DONE)
    return {**summary, **peaks}


def refuse(job: Job, ranks: Ranks, error: PhalanxError, store: Store | None = None) -> None:
    """Makes the other ranks' `train` raise the error for which rank 0 does not call its own: they would wait for it.
    Gives up after REFUSAL_S."""

    def fail() -> None:
        raise error

    with suppress(PhalanxError, RuntimeError):
        device = devices.choose(job.cluster.device, ranks.local_rank)
        with process_group(ranks, device=device, timeout_s=min(REFUSAL_S, job.run.timeout_s), store=store):
            on_rank_zero(fail)


def log_file_of(attempt: Path, ranks: Ranks) -> Path | None:
    """Returns the log of a rank in the folder of an attempt, which rank 0 has made; None if this node does not see it,
    which `require_shared` reports."""
    folder = attempt / f"rank_{ranks.rank}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    return folder / "stderr.log"
