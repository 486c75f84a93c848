"""Validation: the mean loss over samples of the validation split, the same whatever the layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.loss import valid_tokens
from phalanx.parallel.data import MicroTensors
from phalanx.parallel.objective import Objective


@torch.no_grad()
def validation_loss(objective: Objective, batches: Iterable[MicroTensors], device: torch.device) -> float:
    """Loss per valid token, in nats, over the batches of all ranks: one sum divided by one count."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for micro in batches:
        loss: Tensor = objective(micro.tokens, micro.targets)
        total += torch.stack((loss.double(), valid_tokens(micro.targets).double()))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()
