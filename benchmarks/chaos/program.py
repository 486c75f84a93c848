"""The programs that the bench runs: `phalanx train`, and for comparison a plain loop under torchrun with DCP."""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.chaos import weights
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.nodes import Nodes
from phalanx.config.fields import leaves

HANG_S = 10.0
"""Seconds without progress after which a run counts as hung, set in every run so that the bench need not wait long."""

JOB: dict[str, Any] = {
    "model.d_model": 64,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.seq_len": 64,
    "data.corpus": "random",
    "data.random_tokens": 40_000,
    "data.random_vocab": 64,
    "layout.dp_replicate": 2,
    "train.steps": 40,
    "train.global_batch": 32,
    "train.log_every": 1,
    "train.eval_samples": 8,
    "checkpoint.every": 5,
    "checkpoint.keep": 0,
    "checkpoint.timeout_s": HANG_S,
    "cluster.peak_tflops": 1,
    "run.name": "chaos",
    "run.sample_tokens": 0,
    "run.timeout_s": 2 * HANG_S,
    "run.hang_s": HANG_S,
}
"""The job: about 55 ms per step on two cores, so that a fault from outside meets the step that it is meant for."""

Settings = Mapping[str, Any]


class Program(ABC):
    """A training program: how it is started, and where its results lie. All paths are in the command's folder."""

    name: str
    run = Path("runs/chaos")
    metrics = run / "metrics.jsonl"
    checkpoints = run / "checkpoints"

    @abstractmethod
    def write(self, folder: Path, settings: Settings) -> None:
        """Writes the files that the command needs."""

    @abstractmethod
    def argv(self, settings: Settings, launch: str, node: int, nodes: Nodes | None) -> list[str]:
        """Returns the command line of a node (launch="ranks": of a rank)."""

    def environment(self, nodes: Nodes | None) -> Mapping[str, str]:
        """Returns variables that the command needs on its node; none by default."""
        return {}

    def adapt(self, fault: Fault) -> Fault:
        """Returns the fault with what is asked for of this program."""
        return fault

    @abstractmethod
    def load(self, folder: Path, step: int) -> weights.State | None:
        """Returns the final weights of a run of `step` steps, or None."""


class Phalanx(Program):
    """`phalanx train job.yaml`."""

    name = "phalanx"

    def write(self, folder: Path, settings: Settings) -> None:
        """Writes job.yaml. Settings that this version does not know are left out."""
        known, tree = leaves(), {}
        for path, value in settings.items():
            if path in known:
                section, _, key = path.partition(".")
                tree.setdefault(section, {})[key] = value
        (folder / "job.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")

    def argv(self, settings: Settings, launch: str, node: int, nodes: Nodes | None) -> list[str]:
        """Returns the words, with the console script where it is installed: -m would put the folder on the path."""
        script = Path(sys.executable).with_name("phalanx")
        train = ["train", "job.yaml"]
        if launch == "torchrun":
            return [*torchrun(settings), "-m", "phalanx", *train]
        if nodes:
            train += ["--nnodes", "1:2", "--rdzv-endpoint", _endpoint(nodes)]
        return [*([str(script)] if script.exists() else [sys.executable, "-P", "-m", "phalanx"]), *train]

    def load(self, folder: Path, step: int) -> weights.State | None:
        """Reads the newest whole checkpoint."""
        return weights.load(folder / self.checkpoints, step)


class Peer(Program):
    """peer.py under torchrun: DDP or FSDP2, with DCP."""

    name = "torchrun + DCP"
    script = Path(__file__).with_name("peer.py")

    def write(self, folder: Path, settings: Settings) -> None:
        """Writes nothing: the command line has it all."""

    def argv(self, settings: Settings, launch: str, node: int, nodes: Nodes | None) -> list[str]:
        """Returns torchrun's words; FSDP2 where the layout shards."""
        how = "fsdp" if settings.get("layout.dp_shard", 1) > 1 else "ddp"
        size = [str(settings[f"model.{name}"]) for name in ("d_model", "n_layers", "seq_len")]
        steps, every = str(settings["train.steps"]), str(settings["checkpoint.every"])
        return [*torchrun(settings, nodes), str(self.script), str(self.run), how, steps, every, *size]

    def environment(self, nodes: Nodes | None) -> Mapping[str, str]:
        """Returns what makes gloo take the link between the nodes."""
        return nodes.environment() if nodes else {}

    def adapt(self, fault: Fault) -> Fault:
        """Returns the fault without what torchrun never does: it shows tracebacks, and has a table of ranks."""
        names = fault.names.replace("rank 1", r"rank\s*:?\s*1").replace("rank 0", r"rank\s*:?\s*0")
        return replace(fault, traceback=True, names=re.sub(r"\.\*\(SIGKILL\|killed\)$", "", names))

    def load(self, folder: Path, step: int) -> weights.State | None:
        """Reads the last checkpoint with DCP."""
        from benchmarks.chaos import peer

        return peer.final(folder / self.checkpoints, step)


def torchrun(settings: Settings, nodes: Nodes | None = None) -> list[str]:
    """Returns torchrun with its options and at most 3 restarts. A lost node is waited for, but not for the ten minutes
    of the default: on one node alone the loop would train on a smaller batch."""
    base = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
    if nodes:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", _endpoint(nodes), "--rdzv-conf", "join_timeout=30"]
        return [*base, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "chaos", *where]
    return [*base, "--standalone", "--nproc-per-node", str(ranks_of(settings))]


def _endpoint(nodes: Nodes) -> str:
    return f"{nodes.addresses[0]}:{29400 + os.getpid() % 1000}"


def ranks_of(settings: Settings) -> int:
    """Returns the number of ranks of a layout."""
    ranks = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "pp"):
        ranks *= settings.get(f"layout.{axis}", 1)
    return ranks
