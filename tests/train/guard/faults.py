"""Whole runs with one fault injected on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from phalanx.config.job import Job
from phalanx.train import guard, loop
from phalanx.train.requests import StopRequest

WRONG_FACTORS = {"nan": float("nan"), "own gradient": 64.0, "last digits of own gradient": 1 + 2.0**-20}


@dataclass(frozen=True)
class Fault:
    """One flipped bit, or one wrong backward pass, on one rank."""

    where: str
    """"parameter", or a kind of the optimizer's state, such as "exp_avg": before the step is computed; "summed
    gradient": after the reduction, "own gradient": before it; "last digits of own gradient": by too little for its norm
    to show; "unsteady gradient": the same, another one each time; "nan": the loss's factor."""
    rank: int
    step: int
    """Counts from 1."""
    name: str = "blocks.1.mlp.down.weight"
    times: int = 1
    """2 if it comes again when the step is computed again."""


BITS = {torch.float64: (torch.int64, 52), torch.float32: (torch.int32, 23), torch.uint8: (torch.uint8, 6)}
"""By type: integers of its size, and a bit: the lowest of the exponent, or one of a code that makes it another."""


def flip(tensor: torch.Tensor, element: int = 0) -> None:
    """Flips a bit."""
    integers, bit = BITS[tensor.dtype]
    tensor.detach().view(-1).view(integers)[element] ^= 1 << bit


def train_as_on_a_gpu(ranks: Any, job: Job, *faults: Fault) -> dict[str, Any]:
    """Trains as `train_with`, with the comparisons of devices whose kernels are not deterministic."""
    with patch.object(guard, "repeats_exactly", lambda _: False):
        return train_with(ranks, job, *faults)


def train_with(ranks: Any, job: Job, *faults: Fault) -> dict[str, Any]:
    """Trains as one of the ranks of a test's process group, and returns the run's summary."""
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    stepper, left = trainer.stepper, {fault: fault.times for fault in faults if fault.rank == ranks.rank}
    compute, forward_backward = stepper.compute, stepper.replica.forward_backward
    backward: list[Fault] = []

    def wrong_backward(micro, factor, *, last):
        for fault in backward:
            factor = factor * {"unsteady gradient": 64.0 + left[fault], **WRONG_FACTORS}[fault.where]
        return forward_backward(micro, factor, last=last)

    def faulty(inputs):
        due = [fault for fault, times in left.items() if times and fault.step == inputs.step + 1]
        stepper.replica.arrive()
        for fault in due:
            left[fault] -= 1
            stepper.optimizer.before_write()  # the checkpoint before is of the sound state
            if fault.where == "parameter":
                flip(next(f.value for f in stepper.replica.local_parameters() if f.name == fault.name))
            elif fault.where.startswith("exp"):
                flip(stepper.optimizer.rule.state[stepper.optimizer.masters[fault.name]][fault.where])
        backward[:] = [fault for fault in due if fault.where in (*WRONG_FACTORS, "unsteady gradient")]
        computed = compute(inputs)
        for fault in due:
            if fault.where == "summed gradient":
                gradient = stepper.optimizer.masters[fault.name].grad
                assert gradient is not None
                flip(gradient)
        return computed

    stepper.compute = faulty
    stepper.replica.forward_backward = wrong_backward
    return trainer.run()
