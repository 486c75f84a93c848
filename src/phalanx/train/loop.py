"""The training loop: from a job and this rank's place to a trained model in a run directory."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.agree import on_rank_zero
from phalanx.cost.flops import train_flops_per_step
from phalanx.data.loader import Batches, MicroBatch, TokenData, evaluation_batches
from phalanx.data.prepare import prepare
from phalanx.data.shards import open_shards
from phalanx.errors import NotFiniteError, StoppedError
from phalanx.job import batch as batch_equation
from phalanx.job.job import Job
from phalanx.job.parameters import count
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.model.init import initialise
from phalanx.model.noise import Noise
from phalanx.model.transformer import Transformer
from phalanx.parallel import mesh as meshes
from phalanx.parallel.apply import apply
from phalanx.parallel.data import MicroTensors, Replica
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.precision import DTYPES, LossScale
from phalanx.train import device as devices
from phalanx.train import learning_rate, metrics
from phalanx.train.evaluate import validation_loss
from phalanx.train.optimizer import AdamW
from phalanx.train.run_directory import RunDirectory
from phalanx.train.state import State
from phalanx.train.stop import StopRequest
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


@dataclass(frozen=True)
class Step:
    """What one step showed, the same on every rank."""

    loss: float
    """Mean over the global batch's tokens, in nats."""
    grad_norm: float
    stop: bool
    """Some rank was asked to stop."""


class Trainer:
    """One rank's part in a run: everything is set up here, `run` is the loop."""

    def __init__(self, job: Job, ranks: Ranks, device: torch.device, stop: StopRequest, terminal: Terminal):
        self.job, self.ranks, self.device, self.stop, self.terminal = job, ranks, device, stop, terminal
        self.directory = RunDirectory.of(job)
        self.batch = batch_equation.solve(job.train.global_batch, job.layout)
        self.mesh: Mesh = meshes.build(job.layout, device.type)
        shards = Path(on_rank_zero(self._find_data))
        index = open_shards(shards)
        dtype = DTYPES[job.train.precision]
        with torch.device("meta"):
            model = Transformer(job.model, index.vocab_size).to(dtype)
        initialise(model.to_empty(device=device), job.model, job.train.seed)
        optimizer = AdamW(model.named_parameters(), job.optimizer)
        self.state = State(model, optimizer, LossScale(dtype), index.fingerprint)
        self.train_data = TokenData(shards, "train", job.model.seq_len)
        self.val_data = TokenData(shards, "val", job.model.seq_len) if job.train.eval_samples else None
        on_rank_zero(self._keep_tokenizer)
        self._introduce()
        self._resume()
        self.replica: Replica = apply(model, job, self.mesh)
        self.peak, source = devices.peak_flops(job.cluster.peak_tflops, device, dtype)
        log.info("peak: %.3g TFLOP/s a rank (%s), for mfu", self.peak / 1e12, source)

    def run(self) -> dict[str, Any]:
        """Steps until the job's last, with validation, checkpoints and metrics on the way."""
        job, state = self.job, self.state
        loss, began = math.nan, time.perf_counter()
        tokens = self.batch.global_batch * job.model.seq_len
        flops = train_flops_per_step(job.model, self.batch.global_batch, state.model.embed.num_embeddings)
        # A process is a device: the replicas of data_parallel=threads share one, and its peak.
        meter = metrics.Meter(tokens, flops / job.layout.processes, self.peak, job.layout.processes)
        path = self.directory.metrics if self.ranks.rank == 0 else None
        with metrics.MetricsFile(path) as rows, self._batches() as batches:
            rows.write("start", step=state.step, layout=job.layout.line(), devices=job.layout.world)
            while state.step < job.train.steps:
                waiting = time.perf_counter()
                micro_batches = next(batches)
                meter.waited += time.perf_counter() - waiting
                lr = learning_rate.at_step(state.step, job.optimizer, job.train.steps, self.batch.global_batch)
                step = self._step(micro_batches, lr)
                loss = step.loss
                state.step += 1
                state.samples += self.batch.global_batch
                row = {"step": state.step, "loss": loss, "grad_norm": step.grad_norm, "lr": lr, **meter.step()}
                rows.write("step", **row)
                self._show(meter, row)
                last = state.step == job.train.steps
                if last or _due(state.step, job.train.eval_every):
                    self._validate(rows, meter)
                if last or step.stop or _due(state.step, job.checkpoint.every):
                    self._save(meter)
                if step.stop and not last:
                    raise StoppedError(
                        f"stopped by a signal at step {state.step} of {job.train.steps}, with a checkpoint in "
                        f"{self.directory.checkpoints}; run the same command again to go on"
                    )
        return self._summary(loss, time.perf_counter() - began)

    def _step(self, micro_batches: list[MicroBatch], lr: float) -> Step:
        """One optimizer step over this rank's micro-batches."""
        state, scale = self.state, self.state.loss_scale.value
        # Samples are cut from one stream of tokens, so every position counts, on every rank.
        global_tokens = self.batch.global_batch * self.job.model.seq_len
        status = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, micro in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            status[0] += self.replica.forward_backward(self._to_device(micro), scale / global_tokens, last=last)
        status[1] = float(self.stop.signal != 0)
        # What all ranks must know travels while the optimizer works.
        work = dist.all_reduce(status, async_op=True) if self.mesh.data_ranks > 1 else None
        norm = state.optimizer.gradient_norm(scale)
        grad_norm = norm.item()
        if math.isfinite(grad_norm):
            state.optimizer.step(lr, norm)
            state.loss_scale.fine()
        if work is not None:
            work.wait()
        loss = (status[0] / global_tokens).item()
        if not math.isfinite(grad_norm) and not state.loss_scale.overflow():
            raise NotFiniteError(self._not_finite(loss, grad_norm))
        state.optimizer.zero_grad()
        return Step(loss, grad_norm, bool(status[1].item()))

    def _to_device(self, micro: MicroBatch) -> MicroTensors:
        tokens = torch.from_numpy(micro.tokens).to(self.device, non_blocking=True)
        targets = torch.from_numpy(micro.targets).to(self.device, non_blocking=True)
        noise = None
        if self.job.model.dropout:
            noise = Noise(self.job.train.seed, self.state.step, micro.sample_ids.tolist())
        return MicroTensors(tokens, targets, noise)

    def _batches(self) -> Batches:
        return Batches(
            self.train_data,
            global_batch=self.batch.global_batch,
            micro_batch=self.batch.micro_batch,
            rank=self.mesh.data_rank,
            ranks=self.mesh.data_ranks,
            seed=self.job.train.seed,
            first_sample=self.state.samples,
            prefetch=self.job.data.prefetch,
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
            # Rank 0 has just checked the digests.
            self.state.load(Path(path), verify=False)
            log.info("resumed at step %d from %s", self.state.step, path)

    def _introduce(self) -> None:
        job, model = self.job, self.job.model
        vocab = self.state.model.embed.num_embeddings
        log.info("run: %s  layout: %s  precision: %s", self.directory.path, job.layout.line(), job.train.precision)
        log.info("model: %s parameters, %d layers, vocabulary %d", f"{count(model, vocab):,}", model.n_layers, vocab)
        log.info("batch: %s; %s training samples", self.batch.equation(), f"{self.train_data.sample_count:,}")

    def _show(self, meter: metrics.Meter, row: dict[str, float]) -> None:
        self.terminal.step(self.state.step, row["loss"], row["tps"])
        if self.state.step == 1 or _due(self.state.step, self.job.train.log_every):
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
        tensors = (self._to_device(micro) for micro in batches)
        loss = validation_loss(self.replica.objective, tensors, self.device)
        self.state.val_loss = loss
        elapsed = time.perf_counter() - began
        meter.pause(elapsed)
        rows.write("validation", step=self.state.step, val_loss=loss, seconds=elapsed)
        log.info("step: %d  val_loss: %.4f  (%s)", self.state.step, loss, as_time(elapsed))

    def _save(self, meter: metrics.Meter) -> None:
        began = time.perf_counter()
        path = on_rank_zero(lambda: str(self.state.save(self.directory.checkpoints, self.job)))
        elapsed = time.perf_counter() - began
        meter.pause(elapsed)
        log.info("step: %d  checkpoint: %s  (%s)", self.state.step, path, as_time(elapsed))

    def _not_finite(self, loss: float, grad_norm: float) -> str:
        name = self.state.optimizer.first_bad_gradient()
        first = self.state.samples
        return (
            f"step {self.state.step + 1}: loss {loss:g}, gradient norm {grad_norm:g}"
            + (f", first in {name}" if name else "")
            + f" (samples {first} to {first + self.batch.global_batch - 1}). The optimizer has not written it. "
            f"Checkpoints in {self.directory.checkpoints} are from before; a lower optimizer.lr, a longer "
            "optimizer.warmup_steps or train.precision=fp32 are what usually helps"
        )

    def _summary(self, loss: float, elapsed: float) -> dict[str, Any]:
        return {
            "run": str(self.directory.path),
            "step": self.state.step,
            "loss": loss,
            "val_loss": self.state.val_loss,
            "tokens": self.state.samples * self.job.model.seq_len,
            "seconds": elapsed,
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
