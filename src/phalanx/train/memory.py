"""A rank's memory by the formulas, to say which of it did not fit."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.config.job import Job
from phalanx.cost.memory.activations import activation_bytes
from phalanx.cost.memory.state import WIDTHS, logit_bytes, peak_in_flight, state_bytes
from phalanx.errors import RunError
from phalanx.partition import batch
from phalanx.partition.cut import stages_of
from phalanx.partition.pipeline import schedule_of
from phalanx.units import gib

REFUSALS = ("can't allocate memory", "DefaultCPUAllocator")
"""Texts of torch's RuntimeError where a CPU has no memory left."""


@dataclass(frozen=True)
class Memory:
    """The memory of one rank by the formulas, to say what did not fit."""

    job: Job
    device: torch.device
    vocab_size: int
    pp_rank: int = 0
    """The rank's place in its pipeline."""

    def table(self) -> dict[str, int]:
        """Bytes of each part."""
        model, layout, train = self.job.model, self.job.layout, self.job.train
        width = WIDTHS[train.precision]
        equation = batch.solve(train.global_batch, layout)
        micro_batch = equation.micro_batch
        kept = [activation_bytes(model, layout, micro_batch, width, layer) for layer in range(model.n_layers)]
        # While a block is computed again it has all that it would have kept.
        kept_all = replace(layout, recompute="none", recompute_cut="")
        whole = [activation_bytes(model, kept_all, micro_batch, width, layer) for layer in range(model.n_layers)]
        again = max(more - less for more, less in zip(whole, kept, strict=True))
        stages, blocks, losses, slices = [range(model.n_layers)], sum(kept), 1, 1
        if layout.pp > 1:
            schedule = schedule_of(layout, equation.accumulation)
            cut = stages_of(model, layout, schedule.stages, self.vocab_size)
            stages, slices = [cut[number] for number in schedule.stages_on(self.pp_rank)], schedule.slices
            each = [sum(kept[layer] for layer in stage) for stage in cut]
            blocks = peak_in_flight(schedule, self.pp_rank, each)
            losses = peak_in_flight(schedule, self.pp_rank, [0] * (len(cut) - 1) + [1])
        state = state_bytes(model, layout, train.precision, train.gradients, self.vocab_size, stages)
        if layout.loss_chunk:  # logits of a chunk are gone before those of the next are there
            losses = int(losses > 0)
        logits = losses * logit_bytes(model, layout, micro_batch, width, self.vocab_size)
        return {**vars(state), "activations": round(blocks + again / slices), "logits": round(logits)}

    @contextmanager
    def allocating(self, *parts: str) -> Iterator[None]:
        """Attribute a `with` block's allocations to these parts of the table. Raises RunError where they do not fit."""
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
        said = str(error).strip().splitlines() or [type(error).__name__]
        named = " or ".join(sorted(parts, key=table.__getitem__, reverse=True))
        return (
            f"no memory for this rank's {named}: by the formulas it needs {shown}, together "
            f"{gib(sum(table.values()))}; {gib(_free(self.device))} are free; nearest remedy for its {largest}: "
            f"{self._remedy(largest)} ({said[0]})"
        )

    def _remedy(self, part: str) -> str:
        """The smallest change of the layout that makes a part smaller."""
        layout, model = self.job.layout, self.job.model
        if part == "logits":
            tokens = layout.loss_chunk or batch.solve(self.job.train.global_batch, layout).micro_batch * model.seq_len
            return f"layout.loss_chunk={max(1, tokens // 4)}"
        if part == "activations":
            if layout.recompute_cut:
                return "layout.recompute=full layout.recompute_cut="
            if layout.recompute == "none":
                return f"layout.recompute={'selective' if model.dropout else 'full'}"
            if layout.recompute == "selective":
                return "layout.recompute=full"
            if layout.tp > 1 and not layout.sp:
                return "layout.sp=true"
            micro_batch = batch.solve(self.job.train.global_batch, layout).micro_batch
            return f"layout.micro_batch={micro_batch // 2}" if micro_batch > 1 else self._more_devices()
        stage = {"optimizer": 1, "gradients": 2, "parameters": 3}[part]
        if layout.shard_ranks > 1 and layout.zero < stage:
            return f"layout.zero={stage}"
        if layout.dp_replicate > 1:
            stage = max(stage, layout.zero if layout.shard_ranks > 1 else stage)
            return f"layout.dp_replicate=1 layout.dp_shard={layout.data_ranks} layout.zero={stage}"
        return self._more_devices()

    def _more_devices(self) -> str:
        layout, model = self.job.layout, self.job.model
        twice = 2 * layout.tp
        if model.n_heads % twice == 0 and model.ff_size % twice == 0 and layout.tiles == 1:
            return (
                f"twice the devices with layout.tp={twice}, or layout.dp_shard={2 * layout.dp_shard} with layout.zero=3"
            )
        return f"twice the devices with layout.dp_shard={2 * layout.dp_shard} and layout.zero=3"


def _free(device: torch.device) -> int:
    """Bytes that a rank on `device` can still have: of an accelerator, or of the machine and this process's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    left = limit - pages * resource.getpagesize() if limit != resource.RLIM_INFINITY else 2**63
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(left, available))
