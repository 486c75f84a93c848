"""Computing a step more than once from the same inputs: a result that changes is a fault of the hardware."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.parallel.data import Replica
from phalanx.train.guard.digest import words
from phalanx.train.guard.replicas import Difference
from phalanx.train.step import Computed

NOISE = 0.01
"""Relative difference up to which two results agree on devices whose kernels are not deterministic."""


def repeats_exactly(device: torch.device) -> bool:
    """Returns whether a step computed twice on `device` has the same bits."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


class OwnGradients:
    """Adds up this rank's own gradients, bit by bit, before they are summed over the data ranks."""

    def __init__(self, replica: Replica, device: torch.device, *, exact: bool):
        self.exact = exact
        self.total = torch.zeros((), dtype=torch.int64 if exact else torch.float64, device=device)
        replica.observe(self)

    def __call__(self, gradients: Tensor) -> None:
        # One read of the gradients. A sum of words modulo 2^64 differs after any change of one word.
        if self.exact:
            self.total += words(gradients).sum()
        else:
            dtype = torch.promote_types(gradients.dtype, torch.float32)
            self.total += torch.linalg.vector_norm(gradients.detach(), dtype=dtype).double() ** 2

    def clear(self) -> None:
        self.total.zero_()


@dataclass
class Attempt:
    """One computation of a step, settled."""

    computed: Computed
    kind: str = ""
    """The kind of doubt about it: "differs", "not_finite", "spike"; empty if there is none."""
    doubt: str = ""
    """The doubt in words."""
    differences: list[Difference] = field(default_factory=list)
    """Gradients whose replicas differ."""
    result: Tensor | None = None
    """This rank's loss, its gradients before, and those after they were summed over ranks, (3,): digests where kernels
    repeat exactly, otherwise the loss and norms."""

    def agrees(self, other: Attempt, *, exact: bool) -> Tensor:
        """Returns where this rank's result is that of another attempt, (3,) of bool."""
        assert self.result is not None, "it was kept"
        assert other.result is not None, "it was kept"
        if exact:
            return self.result == other.result
        return torch.isclose(self.result, other.result, rtol=NOISE, atol=0.0, equal_nan=True)
