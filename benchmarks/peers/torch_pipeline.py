"""torch.distributed.pipelining's schedules around the model's stages.

Not started by torchrun like the other peers: benchmarks/pipeline.py runs them in its own processes. They get the
settings that make them fast: shapes known beforehand, so that no micro-batch is needed to find them, no outputs kept or
merged, and no gradients scaled: the loss is divided by the step's tokens where it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from phalanx.config.job import Job
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.stages import Stage, Stages
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import schedule_of
from phalanx.schedule.schedule import Schedule

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": pipelining.ScheduleDualPipeV,
}
"""torch's schedules by our names of the same ones; torch places stages on the same ranks."""


class StageModule(nn.Module):
    """One stage in torch's form: from tokens, or the previous stage's output, to the next one's input, or to logits."""

    def __init__(self, model: Transformer, stage: Stage):
        super().__init__()
        self.model, self.stage = model, stage
        self.places = torch.arange(model.config.seq_len)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (micro_batch, seq_len) int64 or (micro_batch, seq_len, d_model) to the latter or (..., vocabulary)."""
        if self.stage.first:
            x = self.model.embed_tokens(x, self.places, None)
        x = self.model.through(self.stage.layers, x, self.places)
        return self.model.logits(self.model.gathered(self.model.normed(x))) if self.stage.last else x


class TorchPipeline:
    """One rank's part of a job's pipeline, run by torch on the default group."""

    def __init__(self, job: Job, rank: int, vocab: int):
        steps = batch.solve(job.train.global_batch, job.layout)
        schedule = schedule_of(job.layout, steps.accumulation)
        factor = 1 / (steps.global_batch * job.model.seq_len)
        self.modules = [_module(job, schedule, rank, number, vocab) for number in schedule.stages_on(rank)]
        stages = [_stage(job, module, schedule, steps.micro_batch, vocab) for module in self.modules]
        self.first = any(module.stage.first for module in self.modules)
        self.last = any(module.stage.last for module in self.modules)
        self.schedule = SCHEDULES[job.layout.schedule](
            stages if schedule.stages > schedule.ranks else stages[0],
            n_microbatches=steps.accumulation,
            loss_fn=lambda logits, targets: (
                F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") * factor
            ),
            scale_grads=False,
        )

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Computes a step's gradients, (global_batch, seq_len) both. Returns the mean loss, zero if it is elsewhere."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        self.schedule.step(
            *((tokens,) if self.first else ()),
            target=targets if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        return torch.stack(losses).detach().sum().item() if losses else 0.0

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that the step left on this rank."""
        return [p.grad for module in self.modules for p in module.parameters() if p.grad is not None]


def _module(job: Job, schedule: Schedule, rank: int, number: int, vocab: int) -> StageModule:
    """Returns one of a rank's stages with its initial weights."""
    stages = Stages(schedule, rank, job.model, vocab, stages_of(job.model, job.layout, schedule.stages, vocab))
    stages.local_stages = {number: stages.local_stages[number]}
    with torch.device("meta"):
        model = Transformer(job.model, vocab)
    stages.keep(model)
    model.to_empty(device="cpu")
    initialise(model, job.model, job.train.seed)
    return StageModule(model, stages.local_stages[number])


def _stage(job: Job, module: StageModule, schedule: Schedule, micro_batch: int, vocab: int) -> pipelining.PipelineStage:
    between = torch.empty(micro_batch, job.model.seq_len, job.model.d_model, requires_grad=True)
    tokens = torch.empty(micro_batch, job.model.seq_len, dtype=torch.int64)
    logits = torch.empty(micro_batch, job.model.seq_len, vocab, requires_grad=True)
    return pipelining.PipelineStage(
        module,
        module.stage.number,
        schedule.stages,
        torch.device("cpu"),
        input_args=tokens if module.stage.first else between,
        output_args=logits if module.stage.last else between,
    )
