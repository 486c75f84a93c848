"""The training loop: from a job and this rank's place to a trained model in a run directory."""

from __future__ import annotations

import logging
import math
import os
import time
from functools import partial
from typing import Any

import torch

from phalanx.comm.agree import on_rank_zero, require_same_calls
from phalanx.config.job import Job
from phalanx.errors import StoppedError
from phalanx.launch.ranks import REPLICA, Ranks
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel import mesh as meshes
from phalanx.partition.ramp import ramp_of
from phalanx.techniques.catalogue import TECHNIQUES, techniques_of
from phalanx.train import device as devices
from phalanx.train import learning_rate, start
from phalanx.train.agreement import agree_on_job, open_data
from phalanx.train.callbacks import Callback, Done, NotFiniteAdvice
from phalanx.train.drivers import UNKNOWN, StepDriver, driver_of
from phalanx.train.elastic import ElasticReplicas
from phalanx.train.evaluate import Validator, refer, validate
from phalanx.train.feed import Feed, readers_of
from phalanx.train.guard import Guard, Rewind, guard_of
from phalanx.train.metrics import ExpertLoads, Meter, Recorder
from phalanx.train.profile.window import StepProfile
from phalanx.train.requests import Milestones, Requests, SaveTimer, StopRequest
from phalanx.train.run_directory import RunDirectory
from phalanx.train.saving import Checkpoints, Saving
from phalanx.train.state import TrainState
from phalanx.train.step import Stepper
from phalanx.train.telemetry import GpuTelemetry

log = logging.getLogger(__name__)


class Trainer:
    """One rank's part in a run: the constructor sets everything up, `run` is the loop."""

    def __init__(self, job: Job, ranks: Ranks, device: torch.device, stop: StopRequest):
        self.job, self.ranks, self.device, self.stop = job, ranks, device, stop
        agree_on_job(job, device)
        self.replicas = ElasticReplicas(job, ranks, device) if REPLICA in os.environ else None
        self.directory = RunDirectory.of(job)
        self.ramp = ramp_of(job)
        own = self.replicas.job if self.replicas else job  # the layout and batch of this rank's world
        self.mesh = meshes.build(own.layout, device.type)
        if self.replicas:
            self.mesh.sum_over(self.replicas.axis)
        self.train_data, self.val_data = open_data(job, self.directory, ranks)
        index = self.train_data.index
        on_rank_zero(lambda: start.keep_tokenizer(job, self.train_data, self.directory))
        vocab_size = on_rank_zero(lambda: start.vocabulary_of(job, self.directory, index.vocab_size))
        start.log_start(job, device, self.ramp.phases[-1].batch, self.train_data, vocab_size, self.val_data)
        self.stepper = Stepper(own, self.mesh, device, vocab_size, elastic=self.replicas)
        self.state = TrainState(self.stepper, index.fingerprint, vocab_size)
        self.state.job = job
        self.milestones = Milestones.of(job)
        self.save_timer = SaveTimer(0 if ranks.rank else job.checkpoint.every_minutes)
        self.saving = Saving(self.state, self.directory.checkpoints, stop)
        self.resume = start.Resume(job, ranks, self.directory)
        splits = [self.train_data, self.val_data]
        makes = [name for name, each in techniques_of(job).items() if each.samples and each.is_on(job)]
        self.rollouts = None
        if makes:  # samples of its own instead of the data's
            self.rollouts = TECHNIQUES.code(makes[0], "samples")(self.stepper, self.train_data, self.directory)
        started = refer(self.stepper, self.directory, index.fingerprint, splits, stop, self._start)
        started |= bool(self.rollouts and self.rollouts.refer(self._start))
        if not (self.replicas and self.replicas.link.copies) and not self._resume() and not started:
            self._start()
        self.over = False
        if self.replicas:
            self.over = not self.replicas.enter(self.state)
        self.profile = StepProfile(self.stepper, self.directory, ranks.rank, self.state.step)
        self.first_step = self.state.step
        self.readers, self.reading = readers_of(
            *(job, self.train_data, self.ramp, self.mesh, device),
            first_step=self.first_step,
            first_sample=self.state.samples,
        )
        if self.reading:
            log.info("data.readers=auto: %s", self.reading)
        self.per_node = max(1, job.layout.processes // job.cluster.nodes)
        self.peak = devices.peak_of(job, device, self.per_node)

    def run(self) -> dict[str, Any]:
        """Trains until the job's last step or a request to stop. Returns the summary; raises the errors of `train`."""
        state, last, began = self.state, self.milestones.last, time.perf_counter()
        if self.over:
            log.info("the other replicas have finished the run")
            return self._summary(math.nan, 0.0)
        self.save_timer.restart()
        self.mesh.ledger.clear()
        with self._recorder() as recorder, self._telemetry(recorder) as telemetry, self.saving:
            self._record_start(recorder)
            self.profile.pause = recorder.meter.pause
            validates = self.rollouts.validate if self.rollouts else validate
            guard = guard_of(self.stepper, state.history, recorder.guard)
            callbacks: list[Callback] = [
                self.saving,
                recorder,
                ExpertLoads(self.stepper, recorder, self.directory),
                Validator(state, self.val_data, self.milestones, self.stop, recorder.validation, validates),
                Checkpoints(self.saving, self.milestones, self.save_timer, recorder, guard),
                NotFiniteAdvice(state, self.ramp, self.directory.checkpoints),
                self.profile,
                telemetry,
            ]
            while True:
                for callback in callbacks:
                    callback.begin(state.step)
                try:
                    done, driver = self._train(recorder, guard, callbacks)
                    break
                except Rewind as rewind:
                    self._rewind(rewind)
            if state.step > self.first_step:
                for callback in callbacks:
                    callback.conclude(state.step, driver.report())
            require_same_calls()
            with heartbeat.within(Phase.SAVE):
                self.saving.finish_uploads()
            stopped = done.stops and state.step < last
            recorder.end(state.step, *(("stopped", self.stop.reason) if stopped else ("finished",)))
        if self.replicas:
            self.replicas.finish()
        if stopped:
            reason = on_rank_zero(lambda: self.stop.reason)
            raise StoppedError(
                f"stopped {reason} at step {state.step} of {last}, with a checkpoint in {self.directory.checkpoints}; "
                "run the same command again to resume"
            )
        return {**self._summary(done.step.loss, time.perf_counter() - began), **driver.report()}

    def _train(self, recorder: Recorder, guard: Guard | None, callbacks: list[Callback]) -> tuple[Done, StepDriver]:
        """Trains from the current state. Returns the last step and its driver."""
        state, last = self.state, self.milestones.last
        done = Done(state.step, UNKNOWN, last=True, stops=False)
        rollouts, requests, record = self.rollouts, self.requests, recorder.step
        if self.replicas:
            record = partial(self._record, self.replicas, recorder)
        if rollouts:
            requests = partial(rollouts.requests, self.requests, lambda: state.step)
            record = partial(rollouts.record, recorder.step)
        with (rollouts.feed if rollouts else Feed)(
            *(self.replicas.job if self.replicas else self.job, self.train_data, self.ramp, self.mesh, recorder.meter),
            first_step=state.step,
            first_sample=state.samples,
            readers=self.readers,
        ) as feed:
            driver = driver_of(self.stepper)(
                stepper=self.stepper,
                feed=feed,
                milestones=self.milestones,
                requests=requests,
                lr=self._lr,
                record=record,
                first=state.step,
                guard=guard,
            )
            limit = devices.memory_limit(self.device, self.per_node)
            heartbeat.training(state.step, work=self.mesh.coordinates["pp"], memory_limit=limit)
            steps = driver.steps()
            for callback in callbacks:
                steps = callback.around(steps, state.step)
            for number, step in steps:
                state.advance(number, self.ramp)
                heartbeat.steps_done(number)
                done = Done(number, step, last=number == last, stops=step.requests.stop)
                for callback in callbacks:
                    callback.after_step(done)
                if done.ends:
                    break
        heartbeat.enter(Phase.END)
        return done, driver

    def requests(self) -> Requests:
        """Returns what this rank asks of all ranks after the step that begins."""
        leads = self.replicas is None or self.replicas.leads
        return Requests(stop=self.stop.requested, save=self.save_timer.due and leads)

    def _lr(self, step: int) -> float:
        size = self.ramp.at(step).batch.global_batch
        return learning_rate.at_step(step, self.job.optimizer, self.state.schedule_end.step, size)

    def _rewind(self, rewind: Rewind) -> None:
        """Goes back to the newest checkpoint, or without one to the beginning."""
        self.saving.forget()
        if not self._resume():
            self.state.restart()
            self._start()
            log.warning("no checkpoint: starting again from the initial weights")
        if rewind.samples is not None:
            self.state.samples = rewind.samples
        self.mesh.ledger.clear()
        self.first_step = self.state.step

    def _resume(self) -> bool:
        """Loads the newest checkpoint that is whole. Returns whether there is one."""
        found = self.resume.load(self.state)
        if found is None:
            return False
        self.saving.resumed(*found)
        path, kept = found
        memory = self.resume.memory
        log.info("resumed at step %d from %s", self.state.step, memory.line if kept and memory else path)
        if message := self.state.schedule_end.message:
            log.warning("%s", message)
        return True

    def _start(self) -> None:
        start.begin(self.job, self.state, self.train_data.tokenizer, reports=self.ranks.rank == 0)

    def _recorder(self) -> Recorder:
        """Returns the rank's recorder: it writes metrics.jsonl on rank 0, nothing on the others."""
        meter = Meter.of(self.job, self.state.vocab_size, self.peak.flops)
        path = None if self.ranks.rank or (self.replicas and not self.replicas.leads) else self.directory.metrics
        return Recorder(path, meter, self.milestones, self.stepper, self._source_tokens)

    def _record(self, replicas: ElasticReplicas, recorder: Recorder, number: int, values: dict[str, float]) -> None:
        """Records a step, and before it the changes of the replicas that it was taken by."""
        recorder.replicas(self.directory.metrics if replicas.leads and self.ranks.rank == 0 else None, replicas.rows)
        replicas.rows.clear()
        recorder.step(number, values)

    def _telemetry(self, recorder: Recorder) -> GpuTelemetry:
        return GpuTelemetry.of(recorder, self.device, self.ranks.rank, self.ranks.local_world or 1)

    def _source_tokens(self, step: int) -> dict[str, int]:
        """Returns the tokens of each source of a mixture that `step` steps have trained on."""
        later = self.ramp.samples(step) - self.ramp.samples(self.state.step)
        return self.train_data.source_tokens(self.state.samples + later, self.job.train.seed)

    def _record_start(self, recorder: Recorder) -> None:
        layout, peak = self.job.layout, self.peak
        facts: dict[str, Any] = {"devices": layout.world, "device": self.device.type}
        facts |= {"vocab_size": self.state.vocab_size}
        facts |= {"readers": self.reading} if self.reading else {}
        facts |= {"conversations": most} if (most := self.train_data.most_conversations) else {}
        facts |= {"sources": sources} if (sources := self.train_data.source_facts()) else {}
        facts |= {"peak_flops": peak.flops, "peak_source": peak.source, "peak_spread": peak.spread}
        recorder.rows.write("start", step=self.state.step, layout=layout.line(), **facts)

    def _summary(self, loss: float, elapsed: float) -> dict[str, Any]:
        val_loss = self.state.val_loss
        rewarded = {} if self.rollouts is None or val_loss is None else {"val_reward": -val_loss}
        steps = self.state.step - self.first_step  # none if the checkpoint was that of the last step
        return {
            "run": str(self.directory.path),
            "step": self.state.step,
            "loss": None if math.isnan(loss) else loss,  # a run that ended with its last checkpoint may take no step
            "val_loss": val_loss,
            **rewarded,
            "tokens": self.rollouts.all_used
            if self.rollouts
            else self.train_data.used_positions(0, self.state.samples, self.job.train.seed),
            "positions": self.state.samples * self.job.model.seq_len,
            "seconds": elapsed,
            "traffic_bytes": self.mesh.ledger.traffic(steps) if steps else {},
        }
