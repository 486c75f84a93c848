"""Predicts a rank's memory, to explain which part of it did not fit."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.check.offload import offload_problems, with_offload
from phalanx.config.job import Job
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import RankParts, StepParts
from phalanx.errors import RunError
from phalanx.parallel.offload.budget import BudgetError
from phalanx.partition import derived as batch
from phalanx.partition.derived import Part
from phalanx.units import gib

REFUSALS = ("can't allocate memory", "DefaultCPUAllocator", "could not create a primitive")
"""Texts of the RuntimeError of torch, or of oneDNN, where a CPU has no memory left."""


@dataclass(frozen=True)
class Memory:
    """The predicted memory of one rank, which explains an out-of-memory error."""

    job: Job
    device: torch.device
    vocab_size: int
    pp_rank: int = 0
    """The rank's place in its pipeline."""

    def table(self) -> dict[str, int]:
        """Returns the bytes of each part, at the moment when there is most of it."""
        step = StepParts(rank_spec(self.job, self.vocab_size, self.device.type))
        rank = RankParts(step, step.flights[self.pp_rank])
        parameters, gradients, optimizer = rank.state()
        activations = rank.kept()[0] + rank.backward(gradients=True)[0]
        logits = rank.logits()[0] + rank.waiting_logits()
        parts = {
            "parameters": parameters,
            "gradients": max(gradients, rank.unsent()),
            "optimizer": optimizer,
            "activations": activations,
            "logits": logits,
        }
        return {name: round(size) for name, size in parts.items()}

    @contextmanager
    def allocating(self, *parts: str) -> Iterator[None]:
        """Attributes a `with` block's allocations to these parts of the table. Raises RunError if they do not fit."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RunError(self._message(parts, error)) from error
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
            raise RunError(self._message(parts, error)) from error

    def _message(self, parts: Iterable[str], error: Exception) -> str:
        table = self.table()
        largest = max(parts, key=table.__getitem__)
        shown = ", ".join(f"{part} {gib(size)}" for part, size in table.items())
        message = str(error).strip().splitlines() or [type(error).__name__]
        words = " or ".join(sorted(parts, key=table.__getitem__, reverse=True))
        free = error.free if isinstance(error, BudgetError) else _free(self.device)
        return (
            f"no memory for this rank's {words}: it is predicted to need {shown}, together "
            f"{gib(sum(table.values()))}; {gib(free)} are free; nearest remedy for its {largest}: "
            f"{self._remedy(largest)} ({message[0]})"
        )

    def _remedy(self, part: str) -> str:
        """Returns the smallest change of the layout that makes a part smaller."""
        layout, model = self.job.layout, self.job.model
        if part == "logits":
            tokens = batch.solve(self.job.train.global_batch, layout).micro_batch * model.seq_len
            smaller = max(1, (layout.logits_of(tokens) or tokens) // 4)
            return f"layout.loss_chunk={smaller if layout.loss_chunk else 'auto'}"
        if part == "activations":
            if layout.recompute_cut:
                return "layout.recompute=full layout.recompute_cut="
            if layout.recompute == "none":
                return f"layout.recompute={'selective' if model.dropout else 'products'}"
            if layout.recompute != "full":
                return "layout.recompute=full"
            if layout.tp > 1 and not layout.sp:
                return "layout.sp=true"
            micro_batch = batch.solve(self.job.train.global_batch, layout).micro_batch
            if micro_batch > 1:
                return f"layout.micro_batch={micro_batch // 2}"
            return self._offload("activations") or self._more_devices()
        stage = {"optimizer": 1, "gradients": 2, "parameters": 3}[part]
        if layout.shard_ranks > 1 and layout.zero < stage:
            return f"layout.zero={stage}"
        if layout.dp_replicate > 1:
            stage = max(stage, layout.zero if layout.shard_ranks > 1 else stage)
            return f"layout.dp_replicate=1 layout.dp_shard={layout.data_ranks} layout.zero={stage}"
        return self._offload("parameters" if part == "parameters" else "optimizer") or self._more_devices()

    def _offload(self, part: Part) -> str:
        """Returns the change that offloads a part too; empty if it leaves the device already, or cannot."""
        layout = with_offload(part, self.job.layout)
        problems = offload_problems(replace(self.job, layout=layout))
        if layout.offload == self.job.layout.offload or any(True for _ in problems):
            return ""
        return f"layout.offload={layout.offload}"

    def _more_devices(self) -> str:
        layout, model = self.job.layout, self.job.model
        twice = 2 * layout.tp
        if model.n_heads % twice == 0 and model.ff_size % twice == 0 and layout.tiles == 1:
            return (
                f"twice the devices with layout.tp={twice}, or layout.dp_shard={2 * layout.dp_shard} with layout.zero=3"
            )
        return f"twice the devices with layout.dp_shard={2 * layout.dp_shard} and layout.zero=3"


def _free(device: torch.device) -> int:
    """Returns the bytes that a rank can still allocate: of an accelerator, or of the machine and its process limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    left = limit - pages * resource.getpagesize() if limit != resource.RLIM_INFINITY else 2**63
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(left, available))
