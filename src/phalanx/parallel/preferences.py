"""Direct preference optimisation (Rafailov et al. 2023, equation 7): the loss of a chosen and a rejected answer.

A pair's loss depends on whole sequences: the log-probability of an answer is a sum over its tokens. Context-parallel
ranks each have some of them. They sum these numbers, one per sequence, and each then takes the gradient of its own
tokens. Everything before, from embedding to logits, is what language modelling computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.config.job import DpoOptions
from phalanx.parallel.micro import MicroTensors


@dataclass(frozen=True)
class PairFacts:
    """Means over pairs, with the names they have in metrics.jsonl. A reward is beta × log(p / p of the reference)."""

    reward_chosen: float
    reward_rejected: float
    reward_margin: float
    """The chosen reward minus the rejected one."""
    reward_accuracy: float
    """The share of pairs whose chosen reward is the larger one."""

    @classmethod
    def of(cls, sums: Tensor) -> PairFacts | None:
        """Returns the means of `sums` (4,), as PairLoss.take returns them, over all ranks; None without a pair."""
        pairs, chosen, rejected, right = sums.tolist()
        if not pairs:
            return None
        return cls(chosen / pairs, rejected / pairs, (chosen - rejected) / pairs, right / pairs)


class PairLoss:
    """The loss of pairs. Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected sequence of a pair."""

    def __init__(self, options: DpoOptions, cp: Axis):
        self.options, self.cp = options, cp
        self.log_probabilities: Tensor | None = None
        """The log-probability of each sequence of the last micro-batch: (micro_batch,) fp64."""
        self._sums: Tensor | None = None

    def __call__(self, losses: Tensor, micro: MicroTensors) -> Tensor:
        """Returns the loss summed over the pairs of a micro-batch, of which every context-parallel rank gets an equal
        share, with the gradient of its own tokens. `losses` (micro_batch,) fp64 are -log p, summed over the tokens
        here."""
        assert micro.reference is not None, "the data of a job with pairs have references"
        whole = losses.detach().clone()
        self.cp.all_reduce(whole).wait()
        self.log_probabilities = -whole
        rewards = self.options.beta * (-(losses + (whole - losses.detach())) - micro.reference)
        chosen, rejected = rewards[0::2], rewards[1::2]
        real = ~micro.reference[0::2].isnan()
        margin = (chosen - rejected).where(real, 0)
        wrong = self.options.label_smoothing
        loss = -((1 - wrong) * F.logsigmoid(margin) + wrong * F.logsigmoid(-margin))
        self._count(chosen.detach(), rejected.detach(), real)
        total = loss.where(real, 0).sum()
        return total - total.detach() * (1 - 1 / self.cp.size)

    def counted(self, micro: MicroTensors) -> Tensor:
        """Returns this rank's share of the number of pairs in a micro-batch, which is not padding, in fp64."""
        assert micro.reference is not None, "the data of a job with pairs have references"
        return (~micro.reference[0::2].isnan()).double().sum() / self.cp.size

    def take(self, like: Tensor) -> Tensor:
        """Returns this rank's share of the sums over all pairs since the last call: pairs, chosen rewards, rejected
        rewards, and pairs in the right order, (4,) fp64 on the device of `like`."""
        sums, self._sums = self._sums, None
        return torch.zeros(4, dtype=torch.float64, device=like.device) if sums is None else sums / self.cp.size

    def _count(self, chosen: Tensor, rejected: Tensor, real: Tensor) -> None:
        rows = torch.stack((real, chosen, rejected, chosen > rejected)).double()
        sums = rows.where(real, 0).sum(dim=1)
        self._sums = sums if self._sums is None else self._sums + sums
