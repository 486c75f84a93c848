"""TeraPipe's own cut of a sequence into slices of unequal length (Li et al. 2021, section 3.3).

A slice of l tokens after c others takes t(l, c) on the slowest stage, forward and backward, with its messages: the time
of a sequence of l tokens, and of the l × c pairs of its queries with earlier keys. K slices of each of M micro-batches
pass P stages in

    latency = M * sum of t(l_i, c_i) + (P - 1) * max of t(l_i, c_i)

Later slices attend to more keys, so equal ones leave the pipeline waiting for the last; few have long bubbles, many
have small kernels. For every value that the longest slice may have, a dynamic program over the prefixes of the sequence
finds the least sum; the best of all is the optimum over all cuts at multiples of a granule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from phalanx.cost.communication import boundary_seconds
from phalanx.cost.held import content_of, stages_of_case
from phalanx.cost.rank_time import rank_time
from phalanx.cost.spec import StepSpec
from phalanx.units import duration

GRANULES = 128
"""Parts of a sequence, at most, at whose borders it may be cut."""


@dataclass(frozen=True)
class SliceCut:
    """A cut of every sequence, with the forward and the backward seconds of each slice on the slowest stage."""

    tokens: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    ranks: int
    micro_batches: int

    @property
    def latency(self) -> float:
        each = [sum(pair) for pair in zip(self.forward, self.backward, strict=True)]
        return self.micro_batches * sum(each) + (self.ranks - 1) * max(each)


@dataclass(frozen=True)
class SliceTimes:
    """Seconds of slices by [tokens, earlier tokens], both in granules."""

    granule: int
    forward: np.ndarray
    backward: np.ndarray
    ranks: int
    micro_batches: int

    def cut(self, granules: Sequence[int]) -> SliceCut:
        """Returns the times of slices of so many granules each."""
        before = np.cumsum([0, *granules[:-1]])
        forward, backward = (
            tuple(float(table[size, start]) for size, start in zip(granules, before, strict=True))
            for table in (self.forward, self.backward)
        )
        tokens = tuple(size * self.granule for size in granules)
        return SliceCut(tokens, forward, backward, self.ranks, self.micro_batches)

    def equal(self, slices: int) -> SliceCut | None:
        """Returns the cut into equal slices; None if there is none."""
        whole = self.forward.shape[0] - 1
        return self.cut([whole // slices] * slices) if whole % slices == 0 else None

    def best(self) -> SliceCut:
        """Returns the cut with the least latency."""
        whole, each = self.forward.shape[0] - 1, self.forward + self.backward
        sizes, starts = np.nonzero(np.add.outer(np.arange(whole + 1), np.arange(whole + 1)) <= whole)
        most = np.unique(each[sizes[sizes > 0], starts[sizes > 0]])  # what the longest slice may take
        sums, last = np.full((whole + 1, len(most)), np.inf), np.zeros((whole + 1, len(most)), dtype=int)
        sums[0] = 0
        for end in range(1, whole + 1):
            of_last = each[np.arange(1, end + 1), end - np.arange(1, end + 1)][:, None]
            found = np.where(of_last <= most, sums[:end][::-1] + of_last, np.inf)
            last[end] = found.argmin(0) + 1
            sums[end] = found.min(0)
        chosen = (self.micro_batches * sums[whole] + (self.ranks - 1) * most).argmin()
        cut, end = list[int](), whole
        while end:
            cut.insert(0, int(last[end, chosen]))
            end -= cut[0]
        return self.cut(cut)


def slice_times(spec: StepSpec) -> SliceTimes:
    """Returns the predicted times of all slices of a layout's sequences."""
    whole, ranks = spec.model.seq_len, spec.layout.pp
    granules = max(number for number in range(1, min(GRANULES, whole) + 1) if whole % number == 0)
    stages = stages_of_case(spec, ranks)

    def passes(tokens: int) -> np.ndarray:
        """Returns the forward and backward seconds of a sequence of so many tokens on each stage, (2, stages)."""
        shorter = replace(spec, model=replace(spec.model, seq_len=tokens))
        times = [rank_time(shorter, content_of(shorter, stages, [stage])) for stage in range(ranks)]
        sends = boundary_seconds(shorter, 0, 1) if ranks > 1 else 0.0
        return np.array([[each.forward_seconds + sends, each.backward_seconds + sends] for each in times]).T

    # Of much longer sequences attention is what is not proportional to their length: seconds per query and key.
    pairs = np.maximum(0.0, (passes(8 * whole) - 2 * passes(4 * whole)) / (16 * whole**2))
    granule = whole // granules
    alone = np.stack([np.zeros_like(pairs), *(passes(granule * size) for size in range(1, granules + 1))])
    sizes, starts = np.arange(granules + 1)[:, None], np.arange(granules + 1)[None, :]
    by_stage = alone[:, None] + pairs * (sizes * starts * granule**2)[..., None, None]
    slowest = by_stage.sum(2).argmax(-1)
    forward, backward = (np.take_along_axis(by_stage[:, :, n], slowest[..., None], -1)[..., 0] for n in (0, 1))
    return SliceTimes(granule, forward, backward, ranks, spec.batch.accumulation)


def compared(times: SliceTimes, slices: int) -> dict[str, SliceCut]:
    """Returns the best cut, the one into `slices` equal parts, and the best equal one, by name."""
    numbers = range(1, times.forward.shape[0])
    equal = {number: cut for number in numbers if (cut := times.equal(number)) is not None}
    found = {"uneven": times.best(), "best equal": min(equal.values(), key=lambda cut: cut.latency)}
    return {**found, **({"as trained": equal[slices]} if slices in equal else {}), "whole": equal[1]}


def lines(cuts: dict[str, SliceCut]) -> list[str]:
    """Returns a line per cut."""
    found = ["slices of a sequence (Li et al. 2021, section 3.3), slowest stage; equal ones are trained:"]
    for name, cut in cuts.items():
        runs = [(size, len([*run])) for size, run in groupby(cut.tokens)]
        sizes = " + ".join(f"{many} × {size}" if many > 1 else f"{size}" for size, many in runs)
        found.append(f"  {name:<11} {duration(cut.latency):>8}  {sizes}")
    return found
