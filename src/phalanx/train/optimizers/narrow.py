"""Updates of what has fewer bits than the update computes with: moments in bf16 or in 8 bits (Dettmers et al. 2022),
parameters in bf16 without a copy in fp32. Part after part, all is widened, updated, and rounded again.

Rounding to bf16 is stochastic (Gupta et al. 2015, section 3): a number goes up with the probability that makes its mean
exact. The random bits are a hash of seed, parameter, update and place in the whole parameter, so that every layout
rounds alike. Or what rounding cuts off a parameter is kept for the next update (Zamirai et al. 2020, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx.config.job import Optimizer
from phalanx.model.seeding import derive_seed
from phalanx.optimizers.entry import COMPENSATION, POSITIVE, block_of, scale_of
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.optimizers.rule import CHUNK, LARGE_CHUNK, ElementwiseRule, Formula, compiles, undone

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


class NarrowUpdate:
    """Updates parameters by an elementwise rule whose moments or parameters are narrow."""

    def __init__(self, config: Optimizer, seed: int):
        self.state, self.seed = config.state, seed
        self.stochastic = config.rounding != "nearest"
        self.has_masters, self.compensates = config.master != "none", config.compensates
        self.random_weights = not self.has_masters and config.rounding == "stochastic"

    def update(
        self, rule: ElementwiseRule, parameter: Tensor, shard: ParameterShard, group: dict[str, Any], first: int
    ) -> None:
        """Updates a parameter, the elements of its shard from `first` on, and its state."""
        block = block_of(shard.tensor_slice.whole) if self.state == "8bit" else 0
        state, gradient = rule.state[parameter], parameter.grad
        assert gradient is not None, "only such parameters are updated"
        wide = torch.promote_types(parameter.dtype, torch.float32)
        for kind in rule.kinds:
            if kind not in state:
                dtype = torch.uint8 if block else torch.bfloat16 if self.state == "bf16" else wide
                state[kind] = torch.zeros_like(parameter, dtype=dtype).detach()
                if block:
                    state[scale_of(kind)] = parameter.new_zeros(parameter.numel() // block, dtype=wide).detach()
        if self.compensates and COMPENSATION not in state:
            state[COMPENSATION] = torch.zeros_like(parameter, dtype=torch.bfloat16).detach()
        kinds = [*rule.kinds, *([COMPENSATION] if self.compensates else ())]
        tensors = [parameter, gradient.contiguous(), rule.copies.pop(parameter, None), *(state[kind] for kind in kinds)]
        w, g, copy, *kept = (None if t is None else t.detach().view(-1) for t in tensors)
        assert w is not None
        assert g is not None
        key = derive_seed(self.seed, "rounding", shard.whole_name, rule.count) % 2**31
        start, *cut = shard.place_numbers(first)
        if not block and compiles(parameter):
            cut = cut if cut[0] else (2**62, 0, 0)  # one kernel for all
            numbers, places = (
                torch.tensor(values, dtype=dtype, pin_memory=not w.is_cpu).to(w.device, non_blocking=True)
                for values, dtype in ((rule.numbers(group), wide), ([key, start, *cut], torch.int64))
            )
            _compiled()(self._whole, type(rule).formula, (w, g, copy, kept), rule.scale, rule.bad, numbers, places)
            return
        size = CHUNK.get(parameter.device.type, LARGE_CHUNK) // max(1, block) * max(1, block)
        scales = [state[scale_of(kind)] for kind in rule.kinds] if block else []
        for begin in range(0, len(w), size):
            part = slice(begin, min(begin + size, len(w)))
            blocks = slice(begin // block, part.stop // block) if block else part
            own = [w[part], *(each[part] for each in kept if each is not None), *(each[blocks] for each in scales)]
            with undone(rule.bad, *own):
                new = self._part(rule, own, g[part], group, [key, start + begin, *cut])
            if copy is not None:
                copy[part] = own[0] if rule.bad is not None else new

    def _part(
        self, rule: ElementwiseRule, own: list[Tensor], gradient: Tensor, group: dict[str, Any], places: list[int]
    ) -> Tensor:
        """Updates a part of a parameter in the cache: `own` are the weights, moments, compensation and scales. Returns
        the new weights."""
        w, many = own[0], len(rule.kinds)
        moments, scales = own[1 : 1 + many], own[1 + many + self.compensates :]
        wide = torch.promote_types(w.dtype, torch.float32)
        x = w if self.has_masters else w.to(wide, copy=True)
        if self.compensates:
            x += own[1 + many]
        g = gradient.to(wide)
        g = g if rule.scale is None else g * rule.scale
        if not scales:
            values = [each.to(wide) for each in moments]
            rule.update_chunk(x, g, values, group)
            self._write(w, x, moments, values, own[1 + many] if self.compensates else None, places)
            return x
        tables = [table(w.device, wide, signed=kind != POSITIVE) for kind in rule.kinds]
        codes = [each.view(len(scale), -1) for each, scale in zip(moments, scales, strict=True)]
        values = [t.dequantise(code, scale) for t, code, scale in zip(tables, codes, scales, strict=True)]
        rule.update_chunk(x, g, [each.view(-1) for each in values], group)
        for t, each, code, scale in zip(tables, values, codes, scales, strict=True):
            t.quantise(each, code, scale)
        self._write(w, x, [], [], own[1 + many] if self.compensates else None, places)
        return x

    def _whole(
        self,
        formula: Formula,
        tensors: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor]],
        scale: Tensor | None,
        bad: Tensor | None,
        numbers: Tensor,
        places: Tensor,
    ) -> None:
        """Updates weights and state in one kernel, unless `bad` is set: weights, gradients, the weights' copy in
        another type, and moments with the compensation, all (n,)."""
        w, g, copy, kept = tensors
        moments, rest = (kept[:-1], kept[-1]) if self.compensates else (kept, None)
        own = [w, *kept]
        old = [each.clone() for each in own] if bad is not None else own
        x = w.to(numbers.dtype)
        x = x if rest is None else x + rest
        g = g.to(numbers.dtype)
        g = g if scale is None else g * scale
        x, *values = formula(x, g, *(each.to(numbers.dtype) for each in moments), numbers)
        self._write(w, x, moments, values, rest, [places[place] for place in range(5)])
        if bad is not None:
            for each, before in zip(own, old, strict=True):
                each.copy_(torch.where(bad, before, each))
        if copy is not None:
            copy.copy_(w)

    def _write(
        self,
        w: Tensor,
        x: Tensor,
        moments: Sequence[Tensor],
        values: Sequence[Tensor],
        rest: Tensor | None,
        places: Sequence[Any],
    ) -> None:
        """Writes the weights x to w, and moments' values, all (n,), rounded. `rest` gets what rounding cuts off x."""
        random_moments = self.stochastic and self.state == "bf16"
        bits = noise(len(w), places, w.device) if self.random_weights or random_moments else None
        for moment, value in zip(moments, values, strict=True):
            if value is not moment:
                moment.copy_(value if bits is None or not random_moments else rounded(value, bits & 0xFFFF))
        if self.has_masters:
            if x is not w:
                w.copy_(x)
        elif self.random_weights:
            assert bits is not None
            w.copy_(rounded(x, (bits >> 16) & 0xFFFF))
        else:
            nearest = x.to(torch.bfloat16)
            w.copy_(nearest)
            if rest is not None:
                rest.copy_(x - nearest)


def noise(elements: int, places: Sequence[Any], device: torch.device) -> Tensor:
    """Returns 32 random bits per element, (elements,) of int32: the hash (Wellons 2018, lowbias32) of a key and the
    element's place in the whole parameter. `places` are the key and `ParameterShard.place_numbers`."""
    key, first, row, whole_row, offset = places
    if isinstance(row, int) and not row and first + elements < 2**31:  # the same in fewer bytes
        x = torch.arange(first, first + elements, dtype=torch.int32, device=device) ^ key
    else:
        place = torch.arange(elements, device=device) + first
        if not isinstance(row, int) or row:
            place = place // row * whole_row + place % row + offset
        x = (place ^ (place >> 32) * 0x9E3779B9 ^ key).to(torch.int32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x = (x ^ ((x >> shift) & (2 ** (32 - shift) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Returns numbers of bf16, in the type of x (n,), fp32 or fp64: x plus `bits` random 16ths below bf16's last place,
    cut off there."""
    integer, low = BITS[x.dtype]
    moved = x.view(integer) + (bits.to(integer) << (low - 16))
    return (moved & -(1 << low)).view(x.dtype)


@cache
def _compiled() -> Callable[..., None]:
    """Returns a function that calls another, compiled once for all sizes of tensors."""
    return torch.compile(lambda call, *arguments: call(*arguments), dynamic=True, fullgraph=True)
