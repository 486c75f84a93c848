"""The training loop: from a job and this rank's place to a trained model in a run directory."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.flops import train_flops_per_step
from phalanx.blocks.parameters import count
from phalanx.comm.agree import on_rank_zero
from phalanx.config.job import Job
from phalanx.data.loader import Batches, MicroBatch, TokenData, evaluation_batches
from phalanx.data.prepare import prepare
from phalanx.data.shards import open_shards
from phalanx.errors import NotFiniteError, StoppedError
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipedream import PipeDream
from phalanx.parallel.precision import DTYPES
from phalanx.partition import batch as batch_equation
from phalanx.train import device as devices
from phalanx.train import learning_rate, metrics
from phalanx.train.evaluate import validation_loss
from phalanx.train.expert_load import ExpertLoads
from phalanx.train.feed import Feed
from phalanx.train.run_directory import RunDirectory
from phalanx.train.state import TrainState
from phalanx.train.step import Step, Stepper
from phalanx.train.stop import StopRequest
from phalanx.train.stream import Stream
from phalanx.train.sync.arrivals import Arrivals
from phalanx.train.sync.asp import Asynchronous
from phalanx.train.terminal import Terminal, logging_to
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)

VERIFIED_BYTES = 2**30
"""Token shards up to this many bytes (about a second's reading) are compared with their digests at every start; of
larger ones only the sizes are. `phalanx data prepare --verify` checks any size."""


def train(job: Job, ranks: Ranks, log_file: Path | None) -> dict[str, Any]:
    """Train `job` as one of `ranks`, from the run directory's newest checkpoint if there is one.

    Returns the summary that `phalanx train --json` prints. Raises NotFiniteError when loss or gradients are no longer
    finite, StoppedError after a signal once a checkpoint is written, and what reading data and checkpoints raises.
    """
    device = devices.choose(job.cluster.device, ranks.local_rank)
    torch.set_num_threads(devices.threads_for(job.run.threads, ranks.local_world or 1))
    if device.type == "cpu":
        devices.keep_freed_memory()
    torch.use_deterministic_algorithms(job.train.deterministic)
    with (
        StopRequest() as stop,
        Terminal(job.train.steps, visible=ranks.rank == 0) as terminal,
        logging_to(terminal, job.run.log_level, ranks.rank, log_file),
        process_group(ranks, device=device, timeout_s=job.run.timeout_s),
    ):
        return Trainer(job, ranks, device, stop, terminal).run()


class Trainer:
    """One rank's part in a run: everything is set up here, `run` is the loop."""

    def __init__(self, job: Job, ranks: Ranks, device: torch.device, stop: StopRequest, terminal: Terminal):
        self.job, self.ranks, self.device, self.stop, self.terminal = job, ranks, device, stop, terminal
        self.directory = RunDirectory.of(job)
        self.batch = batch_equation.solve(job.train.global_batch, job.layout)
        self.mesh: Mesh = meshes.build(job.layout, device.type)
        shards = Path(on_rank_zero(self._find_data))
        index = open_shards(shards)

        def data(split: str) -> TokenData:
            return TokenData(shards, split, job.model.seq_len, document_mask=job.data.document_mask)

        self.train_data = data("train")
        self.val_data = data("val") if job.train.eval_samples else None
        on_rank_zero(self._keep_tokenizer)
        self._introduce(index.vocab_size)
        self.stepper = Stepper(job, self.mesh, device, index.vocab_size)
        self.state = TrainState(self.stepper, index.fingerprint, index.vocab_size)
        runner = self.stepper.replica.runner
        self.stream = Stream(self.stepper, runner) if isinstance(runner, PipeDream) else None
        self.asynchronous = Asynchronous(self.stepper) if job.layout.sync == "asp" else None
        self._resume()
        self.peak, source = devices.peak_flops(job.cluster.peak_tflops, device, DTYPES[job.train.precision])
        log.info("peak: %.3g TFLOP/s per rank (%s), for mfu", self.peak / 1e12, source)

    def run(self) -> dict[str, Any]:
        """Steps until the job's last, with validation, checkpoints and metrics on the way."""
        job, state = self.job, self.state
        loss, began = math.nan, time.perf_counter()
        tokens = self.batch.global_batch * job.model.seq_len
        flops = train_flops_per_step(job.model, self.batch.global_batch, state.vocab_size)
        # A process is a device: the replicas of data_parallel=threads share one, and its peak.
        meter = metrics.Meter(tokens, flops / job.layout.processes, self.peak, job.layout.processes)
        path = self.directory.metrics if self.ranks.rank == 0 else None
        self.mesh.ledger.clear()
        self.first_step = state.step
        experts = ExpertLoads(job, self.mesh, self.stepper.routing, self.device, state.step)
        # With asp nothing is read here: shares of a batch go to whoever is ready.
        prefetch = 0 if self.asynchronous else job.data.prefetch
        place = self.mesh.data_rank, self.mesh.data_ranks
        with (
            metrics.MetricsFile(path) as rows,
            self._batches(state.samples, self.batch.global_batch, *place, prefetch) as batches,
        ):
            rows.write("start", step=state.step, layout=job.layout.line(), devices=job.layout.world)

            def note(step: int, values: dict[str, float]) -> None:
                """A step is done."""
                row = {"step": step, **values, **meter.step()}
                rows.write("step", **row)
                self._show(meter, row)

            feed = Feed(batches, meter)
            arrivals = Arrivals(job.layout.dp_replicate, note) if self.asynchronous else None
            while state.step < job.train.steps:
                before = state.step
                if self.asynchronous and arrivals:
                    state.step, stop = self._round(self.asynchronous, arrivals)
                    loss = arrivals.loss
                else:
                    stop = False
                    for number, step in self._steps(feed):
                        stop, loss = step.stop, step.loss
                        note(number, {"loss": loss, "grad_norm": step.grad_norm, "lr": self._lr(number - 1)})
                    state.step += 1
                state.samples += (state.step - before) * self.batch.global_batch
                last = state.step == job.train.steps
                experts.after(state.step, rows, shown=self._shows(state.step), ends=last or stop)
                if self._validates(state.step):
                    self._validate(rows, meter)
                if stop or self._saves(state.step):
                    self._save(meter)
                if last or stop:
                    self._report_traffic(rows)
                    experts.draw(self.directory)
                    if arrivals:
                        self._report_staleness(rows, arrivals)
                if stop and not last:
                    raise StoppedError(
                        f"stopped by a signal at step {state.step} of {job.train.steps}, with a checkpoint in "
                        f"{self.directory.checkpoints}; run the same command again to resume"
                    )
        summary = self._summary(loss, time.perf_counter() - began)
        return {**summary, "staleness": arrivals.summary()} if arrivals else summary

    def _steps(self, feed: Feed) -> list[tuple[int, Step]]:
        """One optimizer step over this rank's micro-batches. Returns what is known of it, or of the one before, with
        its number."""
        # Samples are cut from one stream of tokens, so every position counts, on every rank.
        tokens, done = self.batch.global_batch * self.job.model.seq_len, self.state.step
        micro_batches, lr, stop = feed.take(), self._lr(done), self.stop.signal != 0
        try:
            if self.stream is None:
                return [(done + 1, self.stepper.step(micro_batches, done, tokens, lr, stop))]
            runs_empty = self._validates(done + 1) or self._saves(done + 1)
            more = None if runs_empty else feed.ahead
            return self.stream.step(micro_batches, done, tokens, lr, stop, more)
        except NotFiniteError as error:
            raise self._not_finite(error) from None

    def _shows(self, step: int) -> bool:
        return step == 1 or _due(step, self.job.train.log_every)

    def _validates(self, step: int) -> bool:
        return step == self.job.train.steps or _due(step, self.job.train.eval_every)

    def _saves(self, step: int) -> bool:
        return step == self.job.train.steps or _due(step, self.job.checkpoint.every)

    def _round(self, asynchronous: Asynchronous, arrivals: Arrivals) -> tuple[int, bool]:
        """sync=asp: the steps until something is due. Returns the steps done, and whether to stop."""
        job, done = self.job, self.state.step
        due = [job.train.steps, *(done + e - done % e for e in (job.train.eval_every, job.checkpoint.every) if e)]
        samples, ranks = self.batch.global_batch // job.layout.dp_replicate, self.mesh.axis("shard")

        def read(chunk: int) -> list[MicroBatch]:
            first = self.state.samples + (chunk - done * job.layout.dp_replicate) * samples
            with self._batches(first, samples, ranks.rank, ranks.size, prefetch=0) as batches:
                return next(batches)

        try:
            return asynchronous.round(
                done,
                min(due),
                read=read,
                chunk_tokens=samples * job.model.seq_len,
                lr=self._lr,
                stop=lambda: self.stop.signal != 0,
                note=arrivals,
            )
        except NotFiniteError as error:
            raise self._not_finite(error) from None

    def _not_finite(self, error: NotFiniteError) -> NotFiniteError:
        """The error with what a person can do about it."""
        first = self.state.samples
        samples = (
            f" (samples {first} to {first + self.batch.global_batch - 1})" if self.job.layout.sync == "bsp" else ""
        )
        return NotFiniteError(
            f"{error}{samples}. The optimizer did not apply it, and checkpoints in {self.directory.checkpoints} "
            "are older; a lower optimizer.lr, a longer optimizer.warmup_steps or train.precision=fp32 usually helps"
        )

    def _lr(self, step: int) -> float:
        return learning_rate.at_step(step, self.job.optimizer, self.job.train.steps, self.batch.global_batch)

    def _batches(self, first: int, samples: int, rank: int, ranks: int, prefetch: int) -> Batches:
        """The `rank`-th of `ranks` equal parts of `samples` samples a step, from sample `first` on."""
        return Batches(
            self.train_data,
            global_batch=samples,
            micro_batch=self.batch.micro_batch,
            rank=rank,
            ranks=ranks,
            seed=self.job.train.seed,
            first_sample=first,
            prefetch=prefetch,
        )

    def _find_data(self) -> str:
        """The folder of the job's token shards, made where they are missing, with their digests checked."""
        shards = prepare(self.job.data)
        size = sum(file.stat().st_size for file in shards.glob("*.bin"))
        open_shards(shards, verify=size <= VERIFIED_BYTES)
        return str(shards)

    def _keep_tokenizer(self) -> None:
        """A run's text can be generated without the data it was trained on."""
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.train_data.tokenizer.save(self.directory.path)

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint, the same on every rank."""

        def choose() -> str | None:
            manifest = self.directory.resume_from(self.job)
            return str(manifest.path) if manifest else None

        path = on_rank_zero(choose)
        if path:
            self.state.load(Path(path))
            log.info("resumed at step %d from %s", self.state.step, path)

    def _introduce(self, vocab: int) -> None:
        job, model = self.job, self.job.model
        log.info("run: %s  layout: %s  precision: %s", self.directory.path, job.layout.line(), job.train.precision)
        log.info("model: %s parameters, %d layers, vocabulary %d", f"{count(model, vocab):,}", model.n_layers, vocab)
        log.info("batch: %s; %s training samples", self.batch.equation(), f"{self.train_data.sample_count:,}")

    def _show(self, meter: metrics.Meter, row: dict[str, float]) -> None:
        step = int(row["step"])
        self.terminal.step(step, row["loss"], row["tps"])
        if self._shows(step):
            shown = {**row, **meter.since_shown()}
            log.info("%s", metrics.line(shown, devices.peak_memory(self.device)))

    def _validate(self, rows: metrics.MetricsFile, meter: metrics.Meter) -> None:
        if self.val_data is None:
            return
        began = time.perf_counter()
        batches = evaluation_batches(
            self.val_data,
            samples=self.job.train.eval_samples,
            micro_batch=self.batch.micro_batch,
            rank=self.mesh.data_rank,
            ranks=self.mesh.data_ranks,
        )
        tensors = (self.stepper.tensors(micro, self.state.step, validates=True) for micro in batches)
        with self.mesh.ledger.aside():
            loss = validation_loss(self.stepper.replica, self.mesh, tensors, self.device)
        self.state.val_loss = loss
        elapsed = time.perf_counter() - began
        meter.pause(elapsed)
        rows.write("validation", step=self.state.step, val_loss=loss, seconds=elapsed)
        log.info("step: %d  val_loss: %.4f  (%s)", self.state.step, loss, as_time(elapsed))

    def _save(self, meter: metrics.Meter) -> None:
        began = time.perf_counter()
        with self.mesh.ledger.aside():
            path = self.state.save(self.directory.checkpoints)
        elapsed = time.perf_counter() - began
        meter.pause(elapsed)
        log.info("step: %d  checkpoint: %s  (%s)", self.state.step, path, as_time(elapsed))

    def _report_traffic(self, rows: metrics.MetricsFile) -> None:
        """What this rank sent a step, from the ledger."""
        ledger, steps = self.mesh.ledger, self.state.step - self.first_step
        rows.write("traffic", step=self.state.step, steps=steps, traffic_bytes=ledger.traffic(steps))
        for line in ledger.lines(steps):
            log.info("sent per step by rank 0 over %s", line)

    def _report_staleness(self, rows: metrics.MetricsFile, arrivals: Arrivals) -> None:
        """How far the server's parameters had moved on when gradients arrived, since this attempt began."""
        found = arrivals.summary()
        rows.write("staleness", step=self.state.step, **found)
        log.info("staleness of %d gradients: mean %.3g, max %d", found["updates"], found["mean"], found["max"])

    def _summary(self, loss: float, elapsed: float) -> dict[str, Any]:
        return {
            "run": str(self.directory.path),
            "step": self.state.step,
            "loss": loss,
            "val_loss": self.state.val_loss,
            "tokens": self.state.samples * self.job.model.seq_len,
            "seconds": elapsed,
            "traffic_bytes": self.mesh.ledger.traffic(self.state.step - self.first_step),
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
