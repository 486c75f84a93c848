"""AdamW whose moments have 8 bits (Dettmers et al. 2022): they are dequantised, updated and quantised again, chunk by
chunk. Norms, biases and small parameters keep moments in full precision."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from phalanx.config.optimizer import Optimizer
from phalanx.optimizers.entry import block_of
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.optimizers.quantise import table
from phalanx.train.optimizers.rule import Groups, UpdateRule, undone


def adamw8bit(groups: Groups, config: Optimizer) -> torch.optim.Optimizer:
    """Returns 8-bit AdamW with the job's betas and eps."""
    return AdamW8bit(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})


class AdamW8bit(UpdateRule):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2). `exp_avg` and `exp_avg_sq` are codes (uint8, of the parameter's
    shape), with a scale for each block of phalanx.optimizers.entry; where a parameter has no blocks, they are the
    moments themselves."""

    skips = True

    def update(self, parameter: Tensor, shard: ParameterShard, group: dict[str, Any]) -> None:
        """Updates a shard's parameter and its moments."""
        block, state = block_of(shard.tensor_slice.whole), self.state[parameter]
        if not state:
            state |= _initial(parameter, block)
        step = _AdamStep(group, self.count)
        if block:
            self._quantised(step, block, parameter)
            return
        for part in self.chunks(1, parameter, state["exp_avg"], state["exp_avg_sq"]):
            w, _, *moments = part
            with undone(self.bad, w, *moments):
                step(*part)

    def _quantised(self, step: _AdamStep, block: int, parameter: Tensor) -> None:
        state, device = self.state[parameter], parameter.device
        signed, positive = (table(device, parameter.dtype, signed=sign) for sign in (True, False))
        codes = state["exp_avg"], state["exp_avg_sq"]
        first = 0
        for w, g, *parts in self.chunks(block, parameter, *codes):
            m_codes, v_codes = (part.view(-1, block) for part in parts)
            scales = slice(first, first + len(m_codes))
            m_scales, v_scales = state["exp_avg_scale"][scales], state["exp_avg_sq_scale"][scales]
            first = scales.stop
            m, v = signed.dequantise(m_codes, m_scales), positive.dequantise(v_codes, v_scales)
            with undone(self.bad, w, m_codes, v_codes, m_scales, v_scales):
                step(w, g, m.view(-1), v.view(-1))
                signed.quantise(m, m_codes, m_scales)
                positive.quantise(v, v_codes, v_scales)


class _AdamStep:
    """One step of AdamW on flat tensors."""

    def __init__(self, group: dict[str, Any], count: int):
        """`count` is the step's number, from 1."""
        self.lr, self.eps, self.beta1, self.beta2 = group["lr"], group["eps"], *group["betas"]
        self.kept = 1 - group["lr"] * group["weight_decay"]
        self.bias1, self.bias2 = 1 - self.beta1**count, sqrt(1 - self.beta2**count)

    def __call__(self, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        """Updates weights w and moments m and v with gradients g, all (n,), in place."""
        m.lerp_(g, 1 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        root = v.sqrt().div_(self.bias2).add_(self.eps)
        w.mul_(self.kept).addcdiv_(m, root, value=-self.lr / self.bias1)


def _initial(parameter: Tensor, block: int) -> dict[str, Tensor]:
    """Returns the state before the first step."""
    moments = "exp_avg", "exp_avg_sq"
    codes = torch.uint8 if block else parameter.dtype
    state = {moment: torch.zeros_like(parameter, dtype=codes) for moment in moments}
    if block:
        blocks = parameter.numel() // block
        state |= {f"{moment}_scale": parameter.new_zeros(blocks).detach() for moment in moments}
    return state
