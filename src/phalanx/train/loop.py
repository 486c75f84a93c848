"""The training loop: from a job and this rank's place to a trained model in a run directory."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.blocks.parameters import count, train_flops_per_step, trained_text
from phalanx.check.guard import unguarded
from phalanx.comm.agree import on_rank_zero
from phalanx.comm.same_calls import require_same_calls
from phalanx.config.job import Job
from phalanx.data.conversations import ConversationData
from phalanx.errors import NotFiniteError, PhalanxError, StoppedError
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.layout import Phase
from phalanx.model.attention_blocks import kernels_text, ordered_kernels
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.offload.budget import device_budget
from phalanx.parallel.precision import DTYPES
from phalanx.partition import derived as batch_equation
from phalanx.trackers.processes import Trackers
from phalanx.train import device as devices
from phalanx.train import learning_rate, metrics, start
from phalanx.train.agreement import agree_on_job
from phalanx.train.drivers import UNKNOWN, StepDriver, driver_of
from phalanx.train.evaluate import validate
from phalanx.train.expert_load import ExpertLoads
from phalanx.train.feed import Feed
from phalanx.train.guard.guard import Guard, Rewind
from phalanx.train.milestones import Milestones
from phalanx.train.open_data import open_data
from phalanx.train.peak import peak_flops
from phalanx.train.profile.window import StepProfile
from phalanx.train.recorder import Recorder
from phalanx.train.reference import refer
from phalanx.train.reports import RunReport
from phalanx.train.requests import Requests, SaveTimer
from phalanx.train.restarted import report_restart
from phalanx.train.resume import Resume
from phalanx.train.run_directory import RunDirectory
from phalanx.train.saving import Saving
from phalanx.train.state import TrainState
from phalanx.train.step import Step, Stepper
from phalanx.train.stop import StopRequest
from phalanx.train.terminal import Terminal, copied_to, error_copied_to, logging_to
from phalanx.train.watched import watch
from phalanx.units import counted

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
        store: the store of ranks that have met (launch/meet).

    Returns the summary that `phalanx train --json` prints. Raises NotFiniteError if loss or gradients are no longer
    finite, StoppedError after a signal once a checkpoint is written, and the errors of reading data and checkpoints.
    """
    device = devices.choose(job.cluster.device, ranks.local_rank)
    torch.set_num_threads(devices.threads_for(job.run.threads, ranks.local_world or 1))
    if device.type == "cpu":
        devices.keep_freed_memory()
    torch.use_deterministic_algorithms(job.train.deterministic)
    with (
        Terminal(job if ranks.rank == 0 else None) as terminal,
        logging_to(terminal, job.run.log_level, ranks.rank, log_file, job.run.all_ranks),
        nullcontext() if ranks.rank or not job.run.report else RunReport(RunDirectory.of(job).path),
        _tracked(job, ranks, log_file),
        process_group(ranks, device=device, timeout_s=job.run.timeout_s, store=store),
        ordered_kernels(device),
    ):
        logs = on_rank_zero(lambda: str(log_file.parents[1]) if log_file else "")  # or the error of `refuse`
        copy = log_file_of(Path(logs), ranks) if logs and not log_file else None
        with copied_to(copy), error_copied_to(copy), device_budget(job.run.device_budget_mib) as peaks:
            watch(job, ranks, log_file)
            trainer = Trainer(job, ranks, device, StopRequest())
            with trainer.stop, terminal.live(RunDirectory.of(job).path):  # from here on there is something to save
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


def _tracked(job: Job, ranks: Ranks, log_file: Path | None) -> AbstractContextManager[object]:
    """Returns what sends the run's metrics to its trackers, on rank 0. It ends after the process group, so that no rank
    waits for a tracker."""
    if ranks.rank or not job.run.trackers:
        return nullcontext()
    return Trackers(job, RunDirectory.of(job).path, log_file and log_file.parent, log.warning)


def log_file_of(attempt: Path, ranks: Ranks) -> Path | None:
    """Returns the log of a rank in the folder of an attempt, which rank 0 has made; None if this node does not see it,
    which `require_shared` reports."""
    folder = attempt / f"rank_{ranks.rank}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    return folder / "stderr.log"


class Trainer:
    """One rank's part in a run: the constructor sets everything up, `run` is the loop."""

    def __init__(self, job: Job, ranks: Ranks, device: torch.device, stop: StopRequest):
        self.job, self.ranks, self.device, self.stop = job, ranks, device, stop
        agree_on_job(job, device)
        self.directory = RunDirectory.of(job)
        self.batch = batch_equation.solve(job.train.global_batch, job.layout)
        self.mesh: Mesh = meshes.build(job.layout, device.type)
        self.train_data, self.val_data = open_data(job, self.directory, ranks)
        index = self.train_data.index
        on_rank_zero(lambda: start.keep_tokenizer(job, self.train_data, self.directory))
        vocab_size = on_rank_zero(lambda: start.vocabulary_of(job, self.directory, index.vocab_size))
        self._log_start(vocab_size)
        self.stepper = Stepper(job, self.mesh, device, vocab_size)
        self.state = TrainState(self.stepper, index.fingerprint, vocab_size)
        self.milestones = Milestones.of(job)
        self.save_timer = SaveTimer(0 if ranks.rank else job.checkpoint.every_minutes)
        self.saving = Saving(self.state, self.directory.checkpoints, stop)
        self.resume = Resume(job, ranks, self.directory)
        splits = [self.train_data, self.val_data]
        started = refer(self.stepper, self.directory, index.fingerprint, splits, stop, self._start)
        if not self._resume() and not started:
            self._start()
        self.profile = StepProfile(self.stepper, self.directory, ranks.rank, self.state.step)
        self.first_step = self.state.step
        self.per_node = max(1, job.layout.processes // job.cluster.nodes)
        products = torch.float8_e4m3fn if job.train.precision == "fp8" else DTYPES[job.train.precision]
        self.peak = peak_flops(job.cluster, device, products, self.per_node)
        if self.peak.flops:
            log.info("peak: %.3g TFLOP/s per rank (%s), for mfu", self.peak.flops / 1e12, self.peak.source)
        else:
            log.warning("peak: %s", self.peak.source)

    def run(self) -> dict[str, Any]:
        """Trains until the job's last step or a request to stop. Returns the summary; raises the errors of `train`."""
        state, milestones, began = self.state, self.milestones, time.perf_counter()
        self.save_timer.restart()
        self.mesh.ledger.clear()
        experts = ExpertLoads(self.job, self.mesh, self.stepper.routing, self.device, state.step)
        with self._recorder() as recorder, self.saving:
            peak = {"peak_flops": self.peak.flops, "peak_source": self.peak.source, "peak_spread": self.peak.spread}
            layout = self.job.layout
            facts: dict[str, Any] = {"devices": layout.world, "device": self.device.type}
            facts |= {"vocab_size": self.state.vocab_size}
            facts |= {"conversations": most} if (most := self.train_data.most_conversations) else {}
            facts |= {"sources": sources} if (sources := self.train_data.source_facts()) else {}
            recorder.rows.write("start", step=state.step, layout=layout.line(), **facts, **peak)
            self.saving.written = recorder.checkpoint
            self.guard = self._guard(recorder)
            while True:
                try:
                    step, driver, stops = self._train(recorder, experts)
                    break
                except Rewind as rewind:
                    self._rewind(rewind, experts)
            self._report(recorder, driver, experts)
            require_same_calls()
            with heartbeat.within(Phase.SAVE):
                self.saving.finish_uploads()
            stopped = stops and state.step < milestones.last
            recorder.end(state.step, *(("stopped", self.stop.reason) if stopped else ("finished",)))
        if stopped:
            reason = on_rank_zero(lambda: self.stop.reason)
            raise StoppedError(
                f"stopped {reason} at step {state.step} of {milestones.last}, with a checkpoint in "
                f"{self.directory.checkpoints}; run the same command again to resume"
            )
        return {**self._summary(step.loss, time.perf_counter() - began), **driver.report()}

    def _train(self, recorder: Recorder, experts: ExpertLoads) -> tuple[Step, StepDriver, bool]:
        """Trains from the current state. Returns the last step, its driver, and whether the run was asked to stop."""
        state, milestones, step, stops = self.state, self.milestones, UNKNOWN, False
        with self._feed(recorder.meter) as feed:
            driver = driver_of(self.stepper)(
                stepper=self.stepper,
                feed=feed,
                milestones=milestones,
                requests=self.requests,
                lr=self._lr,
                record=recorder.step,
                first=state.step,
                guard=self.guard,
            )
            limit = devices.memory_limit(self.device, self.per_node)
            heartbeat.training(state.step, work=self.mesh.coordinates["pp"], memory_limit=limit)
            steps = self.profile.around(self._with_advice(driver.steps()), state.step, recorder.meter)
            for number, step in steps:
                state.advance(number, self.batch.global_batch)
                heartbeat.steps_done(number)
                self.saving.poll()
                report_restart(recorder, self.first_step)
                stops = step.requests.stop
                ends = stops or number == milestones.last
                if not step.requests.void:
                    experts.after(number, recorder.rows, shown=milestones.shows(number), ends=ends)
                if milestones.validates(number) and not stops:
                    with heartbeat.within(Phase.VALIDATION):
                        stops = self._validate(recorder)
                if stops or step.requests.save or milestones.saves(number):
                    with heartbeat.within(Phase.SAVE):
                        stops = self._save(recorder, stops or number == milestones.last) or stops
                if stops or number == milestones.last:
                    break
        heartbeat.enter(Phase.END)
        return step, driver, stops

    def _guard(self, recorder: Recorder) -> Guard | None:
        """Returns what judges the run's steps, where they can be judged."""
        if reason := unguarded(self.job):
            log.info("guard: off: %s", reason)
            return None
        guard = Guard(self.stepper, self.state.history, recorder.guard)
        if self.job.guard.every and guard.replicas.exist:
            log.info(
                "guard: replicas compared every %s; %.0f%% of this rank's state has one",
                counted(self.job.guard.every, "step"),
                100 * guard.replicas.share,
            )
        return guard

    def _rewind(self, rewind: Rewind, experts: ExpertLoads) -> None:
        """Goes back to the newest checkpoint, or without one to the beginning."""
        if not self._resume():
            self.state.restart()
            self._start()
            log.warning("no checkpoint: starting again from the initial weights")
        if rewind.samples is not None:
            self.state.samples = rewind.samples
        experts.restart(self.state.step)
        self.mesh.ledger.clear()
        self.first_step = self.state.step

    def requests(self) -> Requests:
        """Returns what this rank asks of all ranks after the step that begins."""
        return Requests(stop=self.stop.requested, save=self.save_timer.due)

    def _recorder(self) -> Recorder:
        """Returns the rank's recorder: it writes metrics.jsonl on rank 0, nothing on the others."""
        job = self.job
        flops = train_flops_per_step(job.model, self.batch.global_batch, self.state.vocab_size)
        positions = self.batch.global_batch * job.model.seq_len
        devices = job.layout.processes  # replicas of data_parallel=threads share one, and its peak
        meter = metrics.Meter(positions, flops / devices, self.peak.flops, devices)
        path = self.directory.metrics if self.ranks.rank == 0 else None
        return Recorder(path, meter, self.milestones, self.device, self._source_tokens)

    def _source_tokens(self, step: int) -> dict[str, int]:
        """Returns the tokens of each source of a mixture that `step` steps have trained on."""
        later = (step - self.state.step) * self.batch.global_batch
        return self.train_data.source_tokens(self.state.samples + later, self.job.train.seed)

    def _feed(self, meter: metrics.Meter) -> Feed:
        first_step, first_sample = self.state.step, self.state.samples
        return Feed(
            self.job, self.train_data, self.batch, self.mesh, meter, first_step=first_step, first_sample=first_sample
        )

    def _with_advice(self, steps: Iterator[tuple[int, Step]]) -> Iterator[tuple[int, Step]]:
        """Yields the same steps. Adds advice to an error about a loss or gradient that is not finite."""
        try:
            yield from steps
        except NotFiniteError as error:
            raise self._not_finite(error) from None

    def _not_finite(self, error: NotFiniteError) -> NotFiniteError:
        first = self.state.samples
        samples = (
            f" (samples {first} to {first + self.batch.global_batch - 1})" if self.job.layout.sync == "bsp" else ""
        )
        return NotFiniteError(
            f"{error}{samples}. The optimizer did not apply it, and checkpoints in {self.directory.checkpoints} "
            "are older; a lower optimizer.lr, a longer optimizer.warmup_steps or train.precision=fp32 usually helps"
        )

    def _lr(self, step: int) -> float:
        return learning_rate.at_step(step, self.job.optimizer, self.state.schedule_end.step, self.batch.global_batch)

    def _resume(self) -> bool:
        """Loads the newest checkpoint that is whole. Returns whether there is one."""
        self.saving.forget()
        path = self.resume.load(self.state)
        if path is None:
            return False
        self.saving.resumed(path)
        log.info("resumed at step %d from %s", self.state.step, path)
        if message := self.state.schedule_end.message:
            log.warning("%s", message)
        return True

    def _start(self) -> None:
        """Takes over the weights that the job names, if it does."""
        start.begin(self.job, self.state, self.train_data.tokenizer, reports=self.ranks.rank == 0)

    def _log_start(self, vocab: int) -> None:
        job, model = self.job, self.job.model
        log.info("run: %s  layout: %s  precision: %s", self.directory.path, job.layout.line(), job.train.precision)
        layers = counted(model.n_layers, "layer")
        log.info("model: %s parameters, %s, vocabulary %d", f"{count(model, vocab):,}", layers, vocab)
        if lora := model.lora.rank:
            log.info("adapters: rank %d beside %s, training %s", lora, model.lora.targets, trained_text(model, vocab))
        if self.device.type == "cuda":
            log.info("attention: %s", kernels_text(self.device))
        log.info("batch: %s; %s training samples", self.batch.equation(), f"{self.train_data.sample_count:,}")
        if isinstance(self.train_data, ConversationData):
            log.info("data: %s", self.train_data.facts.line())

    def _validate(self, recorder: Recorder) -> bool:
        """Validates. Returns whether a request to stop came meanwhile, which ends the validation without a result."""
        if self.val_data is None:
            return False
        began = time.perf_counter()
        with self.mesh.ledger.untracked():
            found = validate(self.stepper, self.val_data, self.state.step, lambda: self.stop.requested)
        if found is None:
            return True
        self.state.validated(found.loss)
        recorder.validation(self.state.step, found, time.perf_counter() - began)
        return False

    def _save(self, recorder: Recorder, last: bool) -> bool:
        """Saves the state. Returns whether a request to stop came meanwhile, to any rank: another step and another
        checkpoint might take longer than the time that is left."""
        if self.guard is not None:
            self.guard.check_state(self.state.step)
        require_same_calls()
        stopping = torch.zeros(1, device=self.device)
        with self.mesh.ledger.untracked():
            blocked = self.saving.save(last)
            stopping += self.stop.requested
            self.mesh.axis("world").all_reduce(stopping).wait()
            if stopping.item():
                self.saving.finish()
        self.save_timer.restart()
        recorder.meter.pause(blocked)  # it is not training
        return bool(stopping.item())

    def _report(self, recorder: Recorder, driver: StepDriver, experts: ExpertLoads) -> None:
        """Records the traffic of this attempt and the driver's measurements, and draws its experts, if it took a
        step."""
        if self.state.step == self.first_step:
            return
        recorder.traffic(self.state.step, self.mesh.ledger, self.state.step - self.first_step)
        recorder.offload(self.state.step, self.stepper.offloaded, self.state.step - self.first_step)
        if staleness := driver.report().get("staleness"):
            recorder.staleness(self.state.step, staleness)
        experts.draw(self.directory)

    def _summary(self, loss: float, elapsed: float) -> dict[str, Any]:
        steps = self.state.step - self.first_step  # none if the checkpoint was that of the last step
        return {
            "run": str(self.directory.path),
            "step": self.state.step,
            "loss": None if math.isnan(loss) else loss,  # a run that ended with its last checkpoint may take no step
            "val_loss": self.state.val_loss,
            "tokens": self.train_data.used_positions(0, self.state.samples, self.job.train.seed),
            "positions": self.state.samples * self.job.model.seq_len,
            "seconds": elapsed,
            "traffic_bytes": self.mesh.ledger.traffic(steps) if steps else {},
        }
