"""Checkpoints: how long training waits for one, and how fast it reaches the disk, beside DCP and the disk itself.

    python -m benchmarks.checkpoints [--rounds 9] [--ranks 2] [--dir FOLDER]

The state of a GPT with AdamW's moments in fp32, half of it on each of two ranks (ZeRO-3). In every round each contender
writes the same bytes once, to the same folder, and waits until they are on the disk (fsync):

- disk: every process writes its bytes to a file of its own, in pieces of 8 MiB
- synchronous: Phalanx with checkpoint.background=false
- background: Phalanx with nothing beside it: training waits until the state is copied, and "on the disk" counts until
  the checkpoint is valid, which is when its directory gets its name
- beside training: Phalanx as a run has it: forward and backward of the next step come before the optimizer waits for
  the copy. Training waits for what saving and the optimizer wait; the processor is shared
- DCP save, DCP async_save: torch.distributed.checkpoint with a gloo group of its own; no digests

Ratios are medians over the rounds, each within one round, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.report import machine, save
from phalanx.config.cluster import Cluster
from phalanx.config.job import Checkpoint, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.device import keep_freed_memory
from phalanx.train.requests import StopRequest
from phalanx.train.saving import Saving
from phalanx.train.state import TrainState
from phalanx.train.step import Stepper
from phalanx.units import seconds as as_time

MODEL = ModelConfig(n_layers=8, d_model=640, n_heads=10, seq_len=256, vocab_size=8192)
CHUNK_BYTES = 8 * 2**20
CONTENDERS = ("disk", "synchronous", "background", "beside training", "DCP save", "DCP async_save")
MOST_BLOCKED, LEAST_SPEED = 0.1, 0.8
"""The marks: training waits at most so much of the synchronous time, and the disk's own speed is reached so far."""
Turn = tuple[float, float]
"""Seconds until training may go on, and until the bytes are on the disk."""


def measure(ranks: Ranks, job: Job, folder: Path, rounds: int) -> dict[str, Any]:
    """Takes all contenders' turns as one of the ranks. Returns their seconds by round, and the bytes of all ranks."""
    keep_freed_memory()
    torch.set_num_threads(1)
    stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), job.model.vocab_size)
    stepper.optimizer.make_state(1)
    state = TrainState(stepper, "benchmark", job.model.vocab_size, step=1)
    own = {f"{ranks.rank}/{n}": share.flat for n, share in enumerate(state.shares())}
    takers = _contenders(state, own, folder, ranks.rank)
    turns: dict[str, list[Turn]] = {name: [] for name in takers}
    for number in range(rounds + 1):
        for name in list(takers) if number % 2 else list(takers)[::-1]:
            if ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                os.sync()
            dist.barrier()
            began = time.time()
            blocked = takers[name]()
            ended = valid_since(folder) or time.time()
            turns[name].append((blocked, ended - began))
    return {"turns": {name: of[1:] for name, of in turns.items()}, "bytes": sum(x.nbytes for x in own.values())}


def valid_since(folder: Path) -> float | None:
    """Returns when a checkpoint of ours became valid, in seconds since the epoch: its directory was renamed."""
    found = list((folder / "checkpoints").glob("step-*"))
    return found[0].stat().st_ctime if found else None


def _contenders(
    state: TrainState, own: dict[str, torch.Tensor], folder: Path, rank: int
) -> dict[str, Callable[[], float]]:
    """Returns by name what writes the state and returns the seconds for which training would have waited."""
    group = dist.new_group(backend="gloo")
    background = Saving(state, folder / "checkpoints", StopRequest())
    job = dataclasses.replace(state.stepper.job, checkpoint=Checkpoint(background=False))
    synchronous = Saving(state, folder / "checkpoints", StopRequest())
    synchronous.options = job.checkpoint

    def plain() -> float:
        began = time.perf_counter()
        with (folder / str(rank)).open("wb", buffering=0) as file:
            for tensor in own.values():
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
                for start in range(0, len(data), CHUNK_BYTES):
                    file.write(data[start : start + CHUNK_BYTES])
            os.fsync(file.fileno())
        return time.perf_counter() - began

    shape = (1, state.stepper.job.model.seq_len)
    sample = MicroBatch(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(1, np.int64))

    def ours(saving: Saving, training: bool = False) -> float:
        saving.save()
        if training:
            state.stepper.gradients([sample], step=1, global_tokens=1.0)
            state.stepper.discard()
        saving.hold()
        saving.settle()
        assert saving.writer is not None
        assert not saving.writer.error, saving.writer.error
        return saving.blocked

    def dcp_save() -> float:
        began = time.perf_counter()
        dcp.save(own, checkpoint_id=folder / "dcp", process_group=group)
        return time.perf_counter() - began

    def dcp_async() -> float:
        began = time.perf_counter()
        future = dcp.async_save(own, checkpoint_id=folder / "dcp", process_group=group)
        blocked = time.perf_counter() - began
        future.result()  # type: ignore[union-attr]
        return blocked

    takers = (
        *(plain, lambda: ours(synchronous), lambda: ours(background), lambda: ours(background, training=True)),
        *(dcp_save, dcp_async),
    )
    return dict(zip(CONTENDERS, takers, strict=True))


def together(answers: list[dict[str, Any]]) -> dict[str, list[Turn]]:
    """Returns every turn's seconds of the rank that took longest."""
    return {
        name: [
            (max(blocked for blocked, _ in turn), max(total for _, total in turn))
            for turn in zip(*(answer["turns"][name] for answer in answers), strict=True)
        ]
        for name in CONTENDERS
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dir", default=None, help="folder on the disk to be measured")
    options = parser.parse_args(arguments)
    layout = Layout(dp_shard=options.ranks, zero=3)
    job = Job(model=MODEL, layout=layout, cluster=Cluster(peak_tflops=1.0), train=Train(global_batch=options.ranks))
    with tempfile.TemporaryDirectory(dir=options.dir) as folder, Pool(options.ranks) as pool:
        answers = pool.run(measure, options.ranks, job, Path(folder) / "run", options.rounds, timeout=3600.0)
    turns, size = together(answers), sum(answer["bytes"] for answer in answers)

    def ratio(name: str, at: int, other: str) -> float:
        pairs = zip(turns[name], turns[other], strict=True)
        return statistics.median(turn[at] / base[at] for turn, base in pairs)

    rows = {
        name: {
            "blocked_s": statistics.median(blocked for blocked, _ in turns[name]),
            "total_s": statistics.median(total for _, total in turns[name]),
            "bytes_per_s": size / statistics.median(total for _, total in turns[name]),
            "blocked_of_synchronous": ratio(name, 0, "synchronous"),
            "speed_of_disk": 1 / ratio(name, 1, "disk"),
        }
        for name in CONTENDERS
    }
    table = [("contender", "training waits", "of synchronous", "on the disk after", "MB/s", "of the disk's own")]
    table += [
        (
            name,
            as_time(row["blocked_s"]) if name != "disk" else "",
            f"{row['blocked_of_synchronous']:.1%}" if name != "disk" else "",
            as_time(row["total_s"]),
            f"{row['bytes_per_s'] / 1e6:,.0f}",
            f"{row['speed_of_disk']:.2f}",
        )
        for name, row in rows.items()
    ]
    blocked, speed = rows["beside training"]["blocked_of_synchronous"], rows["background"]["speed_of_disk"]
    load = os.getloadavg()[1]
    marks = (
        f"{size / 1e6:,.0f} MB of state on {options.ranks} ranks, medians of {options.rounds} rounds; load of the "
        f"machine {load:.1f}. Training waits {blocked:.1%} of the synchronous time (mark: at most {MOST_BLOCKED:.0%}): "
        f"{'reached' if blocked <= MOST_BLOCKED else 'missed'}. A save in the background reaches {speed:.2f} of the "
        f"disk's own speed (mark: at least {LEAST_SPEED}): {'reached' if speed >= LEAST_SPEED else 'missed'}. "
        "DCP computes no digests; Phalanx hashes every byte (XXH3) and checks the state for NaN."
    )
    result = {"machine": machine(), "bytes": size, "ranks": options.ranks, "load": load, "rows": rows, "turns": turns}
    save("checkpoints", result, table, "Checkpoints: waiting time of training, and speed", marks)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
