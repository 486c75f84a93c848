"""AdamW whose moments have 8 bits (Dettmers et al. 2022): they are dequantised, updated and quantised again, chunk by
chunk. Norms, biases and small parameters keep moments in full precision."""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from phalanx.config.job import Optimizer
from phalanx.optimizers.entry import block_of
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.optimizers.rule import Groups, UpdateRule, undone

DECADES = 7
SIGN = 128
"""The bit of a code that holds the sign."""
BITS = {torch.float32: (torch.int32, 16), torch.float64: (torch.int64, 45)}
"""By type of number: the integers that hold its bits, and the low bits that its cell leaves out."""


class CodeTable:
    """The values of codes, and the codes of values, on a device and in a type.

    A cell is the set of numbers with the same sign, exponent and first seven bits of the fraction. No cell has two
    bounds between codes. So a code takes one look-up: `lookup[cell]` is added to a number's bits as an integer. The
    sum's high bits are the code; a carry out of the low bits adds one where the number is above the bound inside the
    cell. This takes a thirtieth of the time of `torch.bucketize` on a CPU."""

    def __init__(self, values: Tensor, *, signed: bool):
        """`values` (n,) are the values of codes 0 to n - 1: zero, then ascending ones up to 1."""
        self.signed = signed
        self.values = torch.cat([values, -values]) if signed else values
        bounds = (values[1:] + values[:-1]) / 2
        if not signed:
            # A second moment that becomes zero would make the next step of its weight infinite: it is rounded up.
            bounds[0] = 0
        self.integer, self.low_bits = BITS[values.dtype]
        self.cells = 2 ** (torch.iinfo(self.integer).bits - self.low_bits)
        starts = torch.arange(self.cells, dtype=self.integer, device=values.device) << self.low_bits
        codes = torch.bucketize(starts.view(values.dtype).abs().nan_to_num(1), bounds).to(self.integer)
        if signed:
            codes[self.cells // 2 :] += SIGN
        self.lookup = (codes << self.low_bits) - starts
        bits = bounds.view(self.integer)
        cells, low = bits >> self.low_bits, bits & (1 << self.low_bits) - 1
        for half in (cells, cells + self.cells // 2):
            self.lookup[half] += (1 << self.low_bits) - 1 - low

    def quantise(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Writes the codes (blocks, elements) of x (blocks, elements), and the scales (blocks,)."""
        torch.amax(x.abs() if self.signed else x, dim=1, out=scales)
        inverse = torch.where(scales >= torch.finfo(scales.dtype).tiny, 1 / scales, 0)
        bits = (x * inverse.unsqueeze(1)).view(-1).view(self.integer)
        # A number's sign is shifted in from the left: the mask makes the cell a number that is not negative.
        cells = (bits >> self.low_bits).bitwise_and_(self.cells - 1)
        found = self.lookup.index_select(0, cells).add_(bits)
        codes.view(-1).copy_(found.bitwise_right_shift_(self.low_bits))

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns the elements (blocks, elements) of codes of that shape and scales (blocks,)."""
        return self.values.index_select(0, codes.reshape(-1).int()).view(codes.shape).mul_(scales.unsqueeze(1))


@cache
def table(device: torch.device, dtype: torch.dtype, *, signed: bool) -> CodeTable:
    """Returns the table of signed values (127 magnitudes) or of those that are not negative (255)."""
    values = [0.0]
    for decade in range(DECADES):
        steps = 2 ** (decade + (0 if signed else 1))
        values += [10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    # The block's largest element has a code of its own, so that scales are exact.
    values = [*values[:-1], 1.0] if signed else [*values, 1.0]
    return CodeTable(torch.tensor(values, dtype=torch.float64).to(device, dtype), signed=signed)


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
