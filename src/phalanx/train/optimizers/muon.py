"""Muon (Jordan et al. 2024): a matrix moves by the orthogonal factor of its momentum, with singular values near one.

As scaled in Moonlight (Liu et al. 2025, arXiv 2502.16982, section 2.2): an update's root mean square is about 0.2, that
of AdamW's, so both share the rate and the weight decay. Embeddings, head, norms and biases are AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from phalanx.config.job import Optimizer
from phalanx.optimizers.entry import ITERATIONS, NEWTON_SCHULZ, is_hidden_matrix
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.optimizers.rule import Groups, MatrixRule, adamw, undone

RMS = 0.2
"""Root mean square of an update, relative to the rate."""
LEAST_NORM = 1e-7
"""A smaller momentum is not scaled up to an update of full size: it is rounding, or nothing at all."""


def muon(groups: Groups, config: Optimizer) -> Muon:
    """Returns Muon with AdamW for what it does not take."""
    return Muon(groups, config)


class Muon(MatrixRule):
    """m ← μ m + g, w ← (1 - lr λ) w - 0.2 lr √max(rows, columns) O, where O is the orthogonal factor of m; with
    Nesterov of g + μ m. A rank keeps the momentum of its shards' elements; for O a matrix is whole on one rank."""

    skips = True

    def __init__(self, groups: Groups, config: Optimizer):
        super().__init__(groups, {"lr": config.lr})
        self.config = config
        rest = [
            {**group, **dict(zip(("params", "shards"), map(list, zip(*others, strict=True)), strict=True))}
            for group in self.param_groups
            if (others := [pair for pair in _pairs(group) if not _is_matrix(pair[1])])
        ]
        if rest:
            self.rest = adamw(rest, config)
            self.rest.state = self.state  # one place for all state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. A collective: a rank takes part in the work on matrices of which
        it has nothing."""
        lr, momentum = self.param_groups[0]["lr"], self.config.momentum
        directions: dict[str, Tensor] = {}
        for _, parameter, shard in self._matrices():
            state, gradient = self.state[parameter], _gradient(parameter)
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"]
            with undone(self.bad, buffer):
                buffer.mul_(momentum).add_(gradient)
                # The direction takes the gradient's memory.
                direction = gradient.add_(buffer, alpha=momentum) if self.config.nesterov else gradient.copy_(buffer)
            directions[shard.name] = direction
        for name in self.matrices.names - directions.keys():
            directions[name] = torch.zeros_like(self.parameters[name])
        self.matrices.apply(directions, self._orthogonal)
        for group, parameter, shard in self._matrices():
            rows, columns = shard.tensor_slice.whole[-2:]
            with undone(self.bad, parameter):
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(directions[shard.name], alpha=-lr * RMS * sqrt(max(rows, columns)))
        if self.rest is not None:
            for group in self.rest.param_groups:
                group["lr"] = lr
            self.rest.step()

    def _matrices(self) -> Iterator[tuple[dict[str, Any], Tensor, ParameterShard]]:
        """Yields each matrix, or part of one, that has a gradient, with its group and shard."""
        for group in self.param_groups:
            for parameter, shard in _pairs(group):
                if parameter.grad is not None and _is_matrix(shard):
                    yield group, parameter, shard

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        narrow = self.config.newton_schulz == "bf16"
        return orthogonal(matrices.bfloat16()).to(matrices.dtype) if narrow else orthogonal(matrices)


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns the orthogonal factors of matrices (n, rows, columns), nearly: their singular values become 0.7 to 1.2
    in five iterations of Newton-Schulz (Jordan et al. 2024). Uses the memory of `matrices`, and as much again."""
    a, b, c = NEWTON_SCHULZ
    matrices.div_(torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=LEAST_NORM))
    transposed = matrices.shape[-2] > matrices.shape[-1]
    x, other = matrices, torch.empty_like(matrices)
    if transposed:
        other = other.view(matrices.mT.shape).copy_(matrices.mT)
        x, other = other, matrices.view(other.shape)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])
    for _ in range(ITERATIONS):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a, out=other)
        x, other = other, x
    return x.mT if transposed else x


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "only such parameters are updated"
    return parameter.grad.contiguous()


def _pairs(group: dict[str, Any]) -> Iterator[tuple[Tensor, ParameterShard]]:
    return zip(group["params"], group["shards"], strict=True)


def _is_matrix(shard: ParameterShard | None) -> bool:
    return shard is not None and is_hidden_matrix(shard.whole_name, shard.tensor_slice.whole)
