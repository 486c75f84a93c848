"""A run's results: the rows of metrics.jsonl, and the log lines."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from phalanx.axes.catalogue import period
from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.parameters import train_flops_per_step
from phalanx.config.job import Job
from phalanx.cost.breakdown import subject
from phalanx.data.files import write_atomic
from phalanx.echo import shortened
from phalanx.errors import DataError
from phalanx.launch.ranks import RESTARTED
from phalanx.launch.watchdog import heartbeat
from phalanx.partition.ramp import RampPhase, ramp_of
from phalanx.pictures import experts as experts_picture
from phalanx.train import device as devices
from phalanx.train.callbacks import Callback, Done
from phalanx.train.evaluate import Validation
from phalanx.train.requests import Milestones
from phalanx.train.run_directory import AppendedFile, RunDirectory, newest_step
from phalanx.train.step import Stepper
from phalanx.units import counted, gib, listed
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)


@dataclass
class Meter:
    """Measures steps and computes throughput per device, like torchtitan, and of the whole job."""

    positions_per_step: int
    """Tokens and padding per step over all devices."""
    flops_per_step: float
    """Model FLOPs of one device for all of them: forward and backward, without recomputation."""
    peak_flops: float
    """FLOP/s of one device; 0 if unknown, and rows and lines then have no `mfu`."""
    devices: int
    waited: float = 0.0
    """Seconds of this step spent waiting for data."""
    began: float = field(default_factory=time.perf_counter)
    unshown: list[tuple[float, ...]] = field(default_factory=list)
    """Seconds, positions, tokens and FLOPs of each step since the last line."""
    tokens_of: Callable[[int], int] | None = None
    """Returns the tokens of a step, counted from 1; None if there is no padding."""
    size_of: Callable[[int], tuple[float, float]] | None = None
    """Returns the positions and FLOPs of a step, counted from 1; None if they are those of every step."""

    @classmethod
    def of(cls, job: Job, vocab_size: int, peak_flops: float) -> Meter:
        """Returns the meter of a job's steps."""
        devices, ramp = job.layout.processes, ramp_of(job)  # replicas of data_parallel=threads share one, and its peak
        sizes = dict[RampPhase, tuple[int, float]]()
        for phase in ramp.phases:
            samples, seq_len = phase.batch.global_batch, job.model.seq_len
            model = replace(job.model, seq_len=seq_len // phase.parts)
            flops = train_flops_per_step(model, samples * phase.parts, vocab_size) / devices
            sizes[phase] = samples * seq_len, flops
        size_of = (lambda step: sizes[ramp.at(step - 1)]) if len(sizes) > 1 else None
        return cls(*sizes[ramp.phases[-1]], peak_flops, devices, size_of=size_of)

    def step(self, number: int) -> dict[str, float]:
        """Ends step `number`: returns its time and throughput."""
        now = time.perf_counter()
        seconds, waited = now - self.began, self.waited
        self.began, self.waited = now, 0.0
        positions, flops = self.size_of(number) if self.size_of else (self.positions_per_step, self.flops_per_step)
        tokens = positions if self.tokens_of is None else self.tokens_of(number)
        self.unshown.append((seconds, positions, tokens, flops * tokens / positions))
        return {"step_time_s": seconds, "data_wait_s": waited, **self._throughput(*self.unshown[-1])}

    def since_shown(self) -> dict[str, float]:
        """Returns the throughput over the steps since the last call, for a line that covers all of them."""
        sums = [sum(values) for values in zip(*self.unshown, strict=True)]
        self.unshown.clear()
        return self._throughput(*sums)

    def pause(self, seconds: float) -> None:
        """Excludes time that was not training (a validation, a checkpoint)."""
        self.began += seconds

    def _throughput(self, seconds: float, positions: float, tokens: float, flops: float) -> dict[str, float]:
        total, rate = tokens / seconds, flops / seconds
        found = {"tps": total / self.devices, "tps_total": total, "tflops": rate / 1e12}
        if self.peak_flops:
            found["mfu"] = rate / self.peak_flops
        return found if self.tokens_of is None else {**found, "padding": 1 - tokens / positions}


class MetricsFile:
    """metrics.jsonl: one JSON object per line, written row by row (train/run_directory.py). A context manager.

    Without a path (every rank but the first) rows are discarded.
    """

    def __init__(self, path: Path | None):
        self.newest = '{"step": 0}'  # the newest step's row that was discarded
        self.file = AppendedFile(path, log.warning) if path else None

    def take_over(self, path: Path) -> None:
        """Writes rows to a file from now on, first that of the newest step, if whoever wrote before has not come to
        it."""
        if self.file is None:
            last = newest_step(path)
            self.file = AppendedFile(path, log.warning)
            if json.loads(self.newest)["step"] > (last[0] if last else 0):
                self.file.append(self.newest)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file:
            self.file.close()

    def write(self, event: str, **values: Any) -> None:
        """Appends a row: {"event": "step", "time": seconds since the epoch, "step": 10, ...}. NaN and infinity become
        null, since JSON has neither."""
        if self.file or event == "step":
            row = {"event": event, "time": round(time.time(), 3), **values}
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            self.newest = json.dumps(finite)
            if self.file:
                self.file.append(self.newest)


def line(row: dict[str, float], memory: int) -> str:
    """Returns the log line of a step: `key: value` pairs in a stable order. `tps`, `tflops` and `mfu` are per device:

    step: 10 loss: 2.1234 grad_norm: 0.51 lr: 3.0e-04 tps: 9,999 tps_total: 79,992 tflops: 1.23 mfu: 40.1% memory:
    12.3GiB

    Of modules for further tokens, the mean of their losses stands after the loss; of preference pairs, margin and
    accuracy of the rewards stand before `tps`, of completions what `rewards` shows; of conversations, the share of the
    positions that are padding, which no figure counts; of documents over cp ranks, the most pairs of queries and keys
    that a rank has over their mean, and the share of the micro-batches in which these ranks exchange nothing.
    """
    value = row["tflops"]
    tflops = f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")  # 163, 1.23, 0.0519
    mtp = f"mtp_loss: {row['mtp_loss']:.4f}  " if "mtp_loss" in row else ""
    mfu = f"mfu: {row['mfu']:.1%}  " if "mfu" in row else ""
    padding = f"padding: {row['padding']:.1%}  " if "padding" in row else ""
    if "cp_imbalance" in row:
        padding += f"cp_imbalance: {row['cp_imbalance']:.2f}  cp_skipped: {row['cp_skipped']:.0%}  "
    return (
        f"step: {row['step']:.0f}  loss: {row['loss']:.4f}  {mtp}grad_norm: {row['grad_norm']:.2f}  "
        f"lr: {row['lr']:.1e}  "
        f"{rewards(row)}{padding}"
        f"tps: {row['tps']:,.0f}  tps_total: {row['tps_total']:,.0f}  tflops: {tflops}  "
        f"{mfu}memory: {gib(memory)}"
    )


def rewards(row: Mapping[str, float], split: str = "") -> str:
    """Returns the part of a log line about rewards, from a step's or, with the prefix `split`, a validation's facts."""
    shown = {
        "reward_margin": "margin: {:.3f}",
        "reward_accuracy": "accuracy: {:.1%}",
        "reward": f"{split}reward: {{:.3f}}",
        "reward_std": "std: {:.3f}",
        "zero_variance": "zero_variance: {:.0%}",
        "kl": "kl: {:.4f}",
        "clip_fraction": "clip: {:.1%}",
        "entropy": "entropy: {:.3f}",
        "length": "length: {:.1f}",
        "gap": "gap: {:.1e}",
    }
    return "".join(f"{text.format(row[split + name])}  " for name, text in shown.items() if split + name in row)


class Recorder(Callback):
    """Records one rank's results. A context manager; without a path (every rank but the first) the rows of
    metrics.jsonl are discarded."""

    def __init__(
        self,
        path: Path | None,
        meter: Meter,
        milestones: Milestones,
        stepper: Stepper,
        source_tokens: Callable[[int], dict[str, int]],
    ):
        self.source_tokens = source_tokens
        self.rows, self.meter, self.milestones = MetricsFile(path), meter, milestones
        self.stepper, self.device = stepper, stepper.device
        self.first = self.newest = 0
        """The steps done when the run began or went back, and the newest step."""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(self.newest, "failed", str(error) or type(error).__name__)
        self.rows.__exit__(kind, error, trace)

    def begin(self, step: int) -> None:
        self.first = step

    def replicas(self, path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
        """Records changes of the replicas that take part; `path` is given to the one that writes."""
        if path:
            self.rows.take_over(path)
        for row in rows:
            self.rows.write("replicas", **row)
            changes = ", ".join(f"{name} {listed(row[name], 8)}" for name in ("lost", "joined") if row[name])
            count = counted(len(row["members"]), "replica")
            log.info("step: %d  replicas: %s; %s (%s)", row["step"], changes, count, as_time(row["seconds"]))

    def after_step(self, done: Done) -> None:
        """Records the restart of an attempt that follows a failure, once its first step is done."""
        if facts := os.environ.pop(RESTARTED, ""):
            found, resumed = json.loads(facts), self.first
            attempt, reason, seconds = found["attempt"], found["reason"], time.time() - found["time"]
            self.rows.write("restart", step=resumed, attempt=attempt, reason=reason, down_s=seconds)
            log.info(
                "restart: attempt %d resumed from step %d, %s down: %s", attempt, resumed, as_time(seconds), reason
            )

    def conclude(self, step: int, measured: dict[str, Any]) -> None:
        """Records the bytes that this rank sent per step by axis and collective, those that it copied between the
        tiers of memory, and the staleness of gradients."""
        steps, ledger = step - self.first, self.stepper.mesh.ledger
        self.rows.write("traffic", step=step, steps=steps, traffic_bytes=ledger.traffic(steps))
        for text in ledger.lines(steps):
            log.info("sent per step by rank 0 over %s", text)
        if copied := self.stepper.offloaded:
            each = {name: count // steps for name, count in copied.items()}
            self.rows.write("offload", step=step, steps=steps, bytes=each)
            log.info("copied per step by rank 0: %s", ", ".join(f"{name} {gib(size)}" for name, size in each.items()))
        if stale := measured.get("staleness"):
            self.rows.write("staleness", step=step, **stale)
            log.info("staleness of %d gradients: mean %.3g, max %d", stale["updates"], stale["mean"], stale["max"])

    def step(self, number: int, values: dict[str, float]) -> None:
        """Records step `number`, which ends now: `values` has its loss, gradient norm and learning rate."""
        row = {"step": number, **values, **self.meter.step(number)}
        row["memory"] = memory = devices.peak_memory(self.device)
        if found := self.stepper.assignments:
            row["cp_imbalance"] = sum(each.imbalance for each in found) / len(found)
            row["cp_skipped"] = sum(each.skips(self.stepper.job.layout) for each in found) / len(found)
            found.clear()
        self.newest = number
        heartbeat.memory(memory)
        sources = self.source_tokens(number)
        self.rows.write("step", **row, **({"source_tokens": sources} if sources else {}))
        if self.milestones.shows(number):
            log.info("%s", line({**row, **self.meter.since_shown()}, devices.peak_memory(self.device)))

    def validation(self, step: int, found: Validation, seconds: float) -> None:
        """Records a validation after step `step`. Its time is not training."""
        self.meter.pause(seconds)
        facts: dict[str, Any] = (
            {f"val_{name}": value for name, value in asdict(found.facts).items()} if found.facts else {}
        )
        rewarded = "val_reward" in facts  # there is no loss of completions beside their rewards
        shown = ("" if rewarded else f"val_loss: {found.loss:.4f}  ") + rewards(facts, "val_")
        facts |= {"source_losses": found.sources} if found.sources else {}
        facts |= {} if rewarded else {"val_loss": found.loss}
        self.rows.write("validation", step=step, **facts, seconds=seconds)
        shown += "".join(f"{path}: {loss:.4f}  " for path, loss in found.sources.items())
        log.info("step: %d  %s(%s)", step, shown, as_time(seconds))

    def guard(self, step: int, text: str, values: dict[str, Any]) -> None:
        """Records what the guard found in step `step`, and what it did."""
        self.rows.write("guard", step=step, text=text, **values)
        log.warning("step: %d  guard: %s", step, text)

    def checkpoint(self, step: int, path: Path, seconds: float, waited: float) -> None:
        """Records that the checkpoint of step `step` is whole, its seconds, and those that training waited for it."""
        size = sum(file.stat().st_size for file in path.iterdir())
        self.rows.write("checkpoint", step=step, name=path.name, seconds=seconds, waited_s=waited, bytes=size)

    def end(self, step: int, status: str, reason: str = "") -> None:
        """Records how this attempt ends: finished, stopped or failed."""
        self.rows.write("end", step=step, status=status, reason=shortened(reason.partition("\n")[0], 500))


class ExpertLoads(Callback):
    """One rank's part in the balance of a run's experts: the routers' statistics, summed over all ranks, as a row of
    metrics.jsonl. A dense model has none, and nothing is done. A row covers all steps since the previous one:

    {"event": "experts", "step": 20, "steps": 10, "loads": {"layer": [tokens of each expert]}, "max_violation": 0.42,
    "worst_layer": 3, "idle": 0, "aux_loss": 0.0213, "z_loss": ...}

    A load is the number of tokens that chose the expert; with model.moe.capacity "dropped" is the share of all choices
    that exceeded it.
    With m the mean of a layer's loads, `max_violation` is (the largest - m) / m of the layer where that is largest
    (MaxVio, Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", section 4), `idle`
    the number of experts of all layers that no token chose. The penalties, if the job has them, are summed over layers,
    with their coefficients: means per token, which the `loss` of a step, a cross entropy, does not include. With sparse
    attention `index_loss` is the mean of the indexers' loss per query and layer; of a model without experts the event
    is "indexer", and it has nothing else."""

    def __init__(self, stepper: Stepper, recorder: Recorder, directory: RunDirectory):
        self.job, self.mesh, self.routing, self.device = stepper.job, stepper.mesh, stepper.routing, stepper.device
        self.recorder, self.directory = recorder, directory
        self.step = 0
        """The step up to which loads have been summed."""
        job = self.job
        self.layers = [layer for layer, kind in enumerate(block_kinds(job.model)) if kind.routed]
        self.penalties = [name for name in ("aux_loss", "z_loss") if self.layers and getattr(job.model.moe, name)]
        self.sums = [*self.penalties, *(("index_loss", "index_queries") if job.model.sparse.top_k else ())]
        self.sums += ["dropped"] if self.layers and job.model.moe.capacity else []

    def begin(self, step: int) -> None:
        self.routing.clear()
        self.step = step

    def after_step(self, done: Done) -> None:
        """Writes a row after a step that is shown, and after the last one of the run.

        Independent replicas do not wait for each other here: they write a row when they synchronize anyway, with
        local_sgd and diloco if the step is also shown, with asp at a validation or checkpoint, which call `collect`."""
        layout, step = self.job.layout, done.number
        if not (self.layers or self.sums) or done.step.requests.void:
            return
        synchronizes = step % period(layout) == 0
        shown = self.recorder.milestones.shows(step)
        if done.ends or layout.sync == "asp" or (shown and synchronizes):
            row = self.collect(step)
            self.recorder.rows.write("experts" if self.layers else "indexer", **row)
            log.info("%s", balance_line(row))

    def collect(self, step: int) -> dict[str, Any]:
        """Sums what all ranks' routers recorded since the last call, up to `step`, and returns a row. A collective."""
        n, routing = self.job.model.moe.n_experts, self.routing
        noted = torch.zeros(len(self.layers) * n + len(self.sums), dtype=torch.float64, device=self.device)
        of_layers, of_penalties = noted[: len(self.layers) * n].view(len(self.layers), n), noted[len(self.layers) * n :]
        # All tensor ranks record the same tokens, or each its own. Layers of other pipeline ranks are zero here.
        if self.mesh.owns_loss or self.job.layout.folds:
            for place, layer in enumerate(self.layers):
                of_layers[place] += routing.loads.get(layer, 0)
            for place, name in enumerate(self.sums):
                of_penalties[place] += routing.penalties.get(name, 0.0)
        routing.clear()
        with self.mesh.ledger.untracked():
            self.mesh.axis("world").all_reduce(noted).wait()
        sums, steps = dict(zip(self.sums, of_penalties.tolist(), strict=True)), step - self.step
        self.step = step
        row: dict[str, Any] = {"step": step, "steps": steps}
        if self.layers:
            row |= self.balance(of_layers, sums)
        if queries := sums.get("index_queries"):
            row["index_loss"] = sums["index_loss"] / queries
        return row

    def balance(self, of_layers: torch.Tensor, sums: dict[str, float]) -> dict[str, Any]:
        """Returns the part of a row that says how loads `of_layers` (layers, experts) are balanced, with penalties."""
        n, top_k = self.job.model.moe.n_experts, self.job.model.moe.top_k
        loads = {layer: [int(load) for load in row] for layer, row in zip(self.layers, of_layers.tolist(), strict=True)}
        tokens = sum(loads[self.layers[0]]) / top_k
        violations = {layer: max(row) * n / sum(row) - 1 for layer, row in loads.items()}
        worst = max(violations, key=lambda layer: violations[layer])
        return {
            "loads": loads,
            "max_violation": violations[worst],
            "worst_layer": worst,
            "idle": sum(row.count(0) for row in loads.values()),
            **({"dropped": sums["dropped"] / of_layers.sum().item()} if "dropped" in sums else {}),
            **{name: sums[name] / tokens for name in self.penalties},
        }

    def conclude(self, step: int, measured: dict[str, Any]) -> None:
        """Draws the run so far, on rank 0."""
        if self.layers and self.mesh.axis("world").rank == 0:
            run, model = self.directory, subject(self.job, self.job.layout.world)
            path = run.path / "experts.svg"
            try:
                write_atomic(path, experts_picture.svg(run.path.name, run.metrics, model).encode())
            except (OSError, DataError) as error:  # the rows may still wait for a full disk
                log.warning("experts: %s was not drawn: %s", path, error)
            else:
                log.info("experts: %s", path)


def balance_line(row: dict[str, Any]) -> str:
    """Returns the log line of a row:

    experts: max_violation 0.42 (layer 3) idle: 0 aux_loss: 0.0213
    """
    parts = [f"{name}: {row[name]:.4f}" for name in ("aux_loss", "z_loss") if name in row]
    parts += [f"index_loss: {row['index_loss']:.4g}"] if "index_loss" in row else []
    if "loads" not in row:
        return f"indexer: {'  '.join(parts)}"
    parts = [f"dropped: {100 * row['dropped']:.1f} %", *parts] if "dropped" in row else parts
    parts = [f"max_violation {row['max_violation']:.2f} (layer {row['worst_layer']})", f"idle: {row['idle']}", *parts]
    return f"experts: {'  '.join(parts)}"
