"""Times steps with the optimizer on the device, on the host and in files, in turns, and counts the tensors of each.

    python -m benchmarks.offload_files [ROUNDS] [FOLDER]

On a CPU the host is the same memory: what it shows is the cost of the copies and of the update's parts, not of a link.
Files are in FOLDER, $TMPDIR without one.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch

from benchmarks.offload import SEQUENCES, take_step
from phalanx.blocks.parameters import count
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.parallel import mesh as meshes
from phalanx.parallel.offload import DeviceBudget
from phalanx.train.residence import InFiles
from phalanx.train.step import Stepper
from phalanx.units import counted, gib

MODEL = ModelConfig(n_layers=6, d_model=384, n_heads=6, seq_len=256, vocab_size=256)
LARGE = ModelConfig(n_layers=6, d_model=640, n_heads=10, seq_len=32, vocab_size=256)
"""Its state takes several buffers."""


def main(rounds: int, folder: str) -> None:
    """Prints, for each model, the median seconds of a step, and the peaks of device and host."""
    for model in (MODEL, LARGE):
        compare(model, rounds, folder)


def compare(model: ModelConfig, rounds: int, folder: str) -> None:
    """Prints the figures of one model."""
    numbers = count(model, model.vocab_size)
    threads = counted(torch.get_num_threads(), "thread")
    print(f"{numbers:,} parameters in fp32, {SEQUENCES} × {model.seq_len} tokens, {threads}", flush=True)
    places = {"device": {}, "host": {"offload": "optimizer"}, "files": {"offload": "optimizer", "offload_to": folder}}
    steppers, peaks = {}, {}
    for name, fields in places.items():
        with DeviceBudget().counting() as budget:
            steppers[name] = _stepper(model, fields)
            for step in range(2):  # the first one makes the state
                take_step(steppers[name], step)
        peaks[name] = budget.device_peak, budget.host_peak
    seconds: dict[str, list[float]] = {name: [] for name in places}
    waited = []
    for step in range(rounds):
        for name, stepper in steppers.items():
            began = time.perf_counter()
            take_step(stepper, step)
            seconds[name].append(time.perf_counter() - began)
        residence = steppers["files"].optimizer.residence
        assert isinstance(residence, InFiles)
        waited.append(residence.waited)
    for name, each in seconds.items():
        ratio = statistics.median(here / there for here, there in zip(each, seconds["device"], strict=True))
        device, host = map(gib, peaks[name])
        print(
            f"  {name:<6} {statistics.median(each):.3f} s per step ({min(each):.3f} to {max(each):.3f}), {ratio:.2f} × "
            f"the device's, device {device}, host {host}"
        )
    moved = sum(residence.moved.values()) / residence.updates
    alone = _alone(residence)
    print(
        f"  files: {gib(residence.file.size)}, {gib(moved)} read and written per step, alone in {alone:.3f} s "
        f"({moved / alone / 1e9:.2f} GB/s); an update waited {statistics.median(waited):.3f} s for the disk"
    )


def _alone(residence: InFiles) -> float:
    """Returns the median seconds of reading and writing all parts, without updates, one after the other."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for part in residence.parts:
            residence.read(part, residence.buffers[0])
            residence.write_back(part, residence.buffers[0])
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _stepper(model: ModelConfig, fields: dict[str, str]) -> Stepper:
    layout = Layout(recompute="full", micro_batch=SEQUENCES, **fields)
    job = Job(model=model, layout=layout, train=Train(precision="fp32", global_batch=SEQUENCES))
    return Stepper(job, meshes.alone(), torch.device("cpu"), model.vocab_size)


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    main(int(given.get(0, "10")), given.get(1, tempfile.gettempdir()))
