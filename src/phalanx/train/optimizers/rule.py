"""Update rules that torch does not have: their common loop over parameter groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.matrices import MatrixUpdates
from phalanx.parallel.parameter_shards import ParameterShard

Groups = list[dict[str, Any]]
"""torch's parameter groups. `params` are tensors in the optimizer's precision, `shards` the parameter shard of each
(its name and its place in the whole parameter), `weight_decay` the group's decay."""
CHUNK = {"cpu": 2**17}
"""Elements that a rule with several kernels updates at a time: on a CPU they stay in the cache between kernels. With a
quarter as many, starting the kernels takes a quarter of the time of 8-bit AdamW."""
LARGE_CHUNK = 2**22
"""The same on other devices: it bounds the memory of temporary tensors."""


class UpdateRule(torch.optim.Optimizer):
    """A torch optimizer that updates one parameter shard after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter, shard in zip(group["params"], group["shards"], strict=True):
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad.contiguous(), shard, group)

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, shard: ParameterShard, group: dict[str, Any]) -> None:
        """Updates a shard's parameter, of any shape, and self.state[parameter]. `group` has the options and the rate
        of this step."""


class MatrixRule(torch.optim.Optimizer):
    """A torch optimizer that updates whole matrices, of which ranks have shards: granularity "matrix"."""

    matrices: MatrixUpdates
    """Computes with whole matrices, each on one rank."""
    parameters: Mapping[str, Tensor]
    """The parameters of all shards, also of empty ones, by the shards' names."""

    def connect(self, matrices: MatrixUpdates, parameters: Mapping[str, Tensor]) -> None:
        """Takes both, before the first step."""
        self.matrices, self.parameters = matrices, parameters


def chunks(unit: int, *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yields parts of contiguous tensors of equally many elements, as flat views of the same places: a multiple of
    `unit` elements at a time."""
    flat = [tensor.detach().view(-1) for tensor in tensors]
    size = CHUNK.get(tensors[0].device.type, LARGE_CHUNK) // unit * unit
    for start in range(0, flat[0].numel(), size):
        yield [each[start : start + size] for each in flat]
