"""The contenders of benchmarks/sharding.py, and how one of them is run once.

Every contender is a command. Its cost is measured in the same way for all of them, by the process that waits for it:
- step times and the end of the first step from the contender's own clock: metrics.jsonl, or the JSON a peer prints;
- start-up from the launch to the end of the first step: interpreter, imports, process group, model, and that step;
- processor time (user + system) of the whole tree of processes, from wait4. A run of `WARM_UP` steps is subtracted
  from a longer one, which leaves steps only;
- peak memory (resident set) of the largest process of the tree, from wait4: that is a rank, launchers are smaller.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.peers import harness
from phalanx.parallel.linear import onednn_is_faster

ROOT = Path(__file__).parents[1]
JOB = Path("benchmarks") / "sharding.yaml"
PEERS_PYTHON = ROOT / ".bench-venv" / "bin" / "python"
"""The environment of peers that are not part of torch: `make bench-peers`."""

WARM_UP = 4
"""Steps excluded at the start of every run."""
LIMIT_S = 300.0
"""Seconds after which a contender is stopped and counts as not run."""

Kind = Literal["ours", "loop", "peer"]


class NotRunError(Exception):
    """A contender could not be run; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One system in one layout."""

    name: str
    kind: Kind
    words: tuple[str, ...]
    """ours: overrides of the job; loop: overrides of the job; peer: module under benchmarks.peers, then its options."""
    ranks: int = 2
    batches: int = 2
    """Micro-batches of the job that a step processes on all ranks together."""
    python: Path = Path(sys.executable)

    @property
    def size(self) -> dict[str, int]:
        return {"ranks": self.ranks, "batches": self.batches}


def ours(name: str, *overrides: str, ranks: int = 2, batches: int = 2) -> Contender:
    return Contender(f"phalanx, {name}", "ours", overrides, ranks, batches)


def peer(name: str, *words: str, ranks: int = 2, batches: int = 2, own_environment: bool = False) -> Contender:
    return Contender(name, "peer", words, ranks, batches, PEERS_PYTHON if own_environment else Path(sys.executable))


LOOP = Contender("plain loop, 1 process", "loop", ("train.global_batch=4",), 1, 1)
ONE = ours("1 process", ranks=1, batches=1)
DDP = ours("DDP", "layout.dp_replicate=2")
ZERO = {stage: ours(f"ZeRO-{stage}", "layout.dp_shard=2", f"layout.zero={stage}") for stage in (1, 2, 3)}
TP = ours("TP", "layout.tp=2", batches=1)
TP_SP = ours("TP + SP", "layout.tp=2", "layout.sp=true", batches=1)
CP = ours("CP, Llama", "layout.cp=2", *harness.LLAMA, batches=1)
PP = ours("PP, Llama", "layout.pp=2", "layout.micro_batch=1", "train.global_batch=4", *harness.LLAMA, batches=1)
ZERO3_LLAMA = ours("ZeRO-3, Llama", "layout.dp_shard=2", "layout.zero=3", *harness.LLAMA)
MKL = {
    c.name: ours(f"{c.name.removeprefix('phalanx, ')}, MKL", *c.words, "train.cpu_linear=mkl", **c.size)
    for c in (ONE, DDP, ZERO[3], TP, CP, PP)
}
"""Ours with the peers' matrix library: what remains is the framework."""

TORCH_DDP = peer("torch DDP", "torch_ddp")
TORCH_FSDP2 = peer("torch FSDP2", "torch_fsdp2")
TORCH_TP = peer("torch parallelize_module, TP", "torch_tp", batches=1)
TORCH_TP_SP = peer("torch parallelize_module, TP + SP", "torch_tp", "--sequence", batches=1)
ACCELERATE = [
    peer("Accelerate, DDP", "accelerate_peer", own_environment=True),
    peer("Accelerate, FSDP2", "accelerate_peer", "--fsdp", own_environment=True),
]
DEEPSPEED = [
    peer(f"DeepSpeed, ZeRO-{stage}", "deepspeed_peer", f"--stage={stage}", own_environment=True) for stage in (1, 2, 3)
]
NANOGPT = peer("nanoGPT, 1 process", "nanogpt_peer", ranks=1, batches=1, own_environment=True)
TORCHTITAN = peer("torchtitan's Llama, FSDP2", "torchtitan_peer", own_environment=True)
MEGATRON = peer("Megatron-core, TP", "megatron_peer", batches=1, own_environment=True)
PICOTRON_CP, PICOTRON_PP = (
    peer(f"picotron's Llama, {way.upper()}", "picotron_peer", f"--way={way}", batches=1, own_environment=True)
    for way in ("cp", "pp")
)
DATA_PARALLEL_PEERS = [TORCH_DDP, TORCH_FSDP2, *ACCELERATE, *DEEPSPEED]
SHARDED_PEERS = [TORCH_FSDP2, ACCELERATE[1], DEEPSPEED[2]]
ALL = [
    *(LOOP, ONE, NANOGPT, DDP, *ZERO.values(), *DATA_PARALLEL_PEERS, ZERO3_LLAMA, TORCHTITAN),
    *(TP, TP_SP, TORCH_TP, TORCH_TP_SP, MEGATRON, CP, PICOTRON_CP, PP, PICOTRON_PP),
]
if onednn_is_faster(torch.device("cpu"), torch.float32):
    ALL += MKL.values()  # otherwise ours computes on MKL anyway


@dataclass(frozen=True)
class Run:
    """The measurements of one run of one contender."""

    step_s: float
    """Median after the warm-up; over all steps if the run is no longer than that."""
    startup_s: float | None
    """Seconds of the start-up; None if the contender does not report the end of its first step."""
    cpu_s: float
    peak_bytes: int
    steps: int


def run(contender: Contender, steps: int) -> Run:
    """Runs `contender` once, in fresh processes. Raises NotRunError."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        finished = launch(command(contender, steps, Path(folder)), Path(folder))
        if contender.kind == "ours":
            rows = [json.loads(line) for line in next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()]
            rows = [row for row in rows if row["event"] == "step"]
            seconds, first = [row["step_time_s"] for row in rows], rows[0]["time"]
        else:
            printed = json.loads(finished.stdout.strip().splitlines()[-1])
            seconds, first = (
                (printed, None) if contender.kind == "loop" else (printed["seconds"], printed["first_step_at"])
            )
    return Run(
        step_s=statistics.median(seconds[WARM_UP:] or seconds),
        startup_s=None if first is None else first - began,
        cpu_s=finished.cpu_s,
        peak_bytes=finished.peak_bytes,
        steps=len(seconds),
    )


def command(contender: Contender, steps: int, runs: Path) -> list[str]:
    """Returns the command line of `contender`; ours writes its run directory under `runs`."""
    python = str(contender.python)
    if contender.kind == "ours":
        return [python, "-m", "phalanx", "train", str(JOB), f"train.steps={steps}", f"run.dir={runs}", *contender.words]
    if contender.kind == "loop":
        options = ["--steps", str(steps), "--threads", "1"]
        return [python, "-m", "benchmarks.plain_loop", *options, str(JOB), *contender.words]
    module, *options = contender.words
    options = [str(JOB), "--steps", str(steps), *options]
    return torchrun(f"benchmarks.peers.{module}", *options, ranks=contender.ranks, python=python)


def torchrun(module: str, *words: str, ranks: int = 2, python: str = sys.executable) -> list[str]:
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", module, *words]


@dataclass(frozen=True)
class Finished:
    """The output and resource usage of a command that succeeded."""

    stdout: str
    cpu_s: float
    """User and system seconds of all its processes."""
    peak_bytes: int
    """Resident set of the largest of its processes."""


def launch(argv: Sequence[str], folder: Path) -> Finished:
    """Runs a command to its end, with one thread per process. Raises NotRunError with its error message if it fails."""
    if not Path(argv[0]).exists():
        raise NotRunError("its environment is not there: make bench-peers")
    # An environment's programs (ninja, for DeepSpeed's extension) are beside its interpreter.
    path = f"{Path(argv[0]).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or every run would compile our sources
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=out, stderr=err)
        timer = threading.Timer(LIMIT_S, os.kill, (process.pid, signal.SIGTERM))
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        too_long = timer.finished.is_set()
        timer.cancel()
        out.seek(0)
        err.seek(0)
        if too_long:
            raise NotRunError(f"not done after {LIMIT_S:.0f} s")
        if process.returncode:
            raise NotRunError(reason(err.read(), process.returncode))
        return Finished(out.read(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def reason(stderr: str, code: int) -> str:
    """Returns the line of `stderr` that names the error: a rank's exception comes before torchrun's own."""
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line] or ["it said nothing"]
    error = next((line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])
    return f"exit {code}: {error[:300]}"
