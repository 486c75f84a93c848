"""Lower bounds on the bytes of the fullest rank, for many pairs of a mesh and a micro-batch at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.memory.rank_parts import by_stage
from phalanx.plan.search.space import STATES, Scheduled
from phalanx.plan.search.tables import Floats, Pipelines
from phalanx.schedule.catalogue import SCHEDULES, chunks_of


def least_in_flight(scheduled: Scheduled, pp: int, m: int, rank: int) -> int:
    """Activations of a stage that a rank holds at least at its fullest moment; one for a schedule in a file."""
    if pp == 1 or scheduled.schedule not in SCHEDULES:
        return 1
    return SCHEDULES[scheduled.schedule].in_flight(pp, m, chunks_of(*scheduled), rank)


class StepBytes:
    """The memory of layouts with the same pipeline and recomputation. Arrays have a row for each different share of a
    rank and a column a pair."""

    def __init__(self, group: Pipelines):
        self.group, self.tables, self.m, self.pp = group, group.tables, group.m, group.pp
        self.memory_profile = group.tables.request.framework.memory_profile
        self.widths = group.tables.widths
        self.entry = SCHEDULES.get(group.scheduled.schedule) if group.pp > 1 else None
        self.states: dict[int, tuple[Floats, Floats, Floats]] = {}
        self.activations = self._activations()
        """Bytes, at the fullest moment at least."""

    def _activations(self) -> Floats:
        group, tables = self.group, self.tables
        several, which = np.unique(self.m, return_inverse=True)
        kinds = {kind: tables.activations(kind, group.mode, group.inner) for kind in group.kinds}
        found = []
        for share, rank in zip(group.shares, group.first, strict=True):
            most = [least_in_flight(group.scheduled, self.pp, n, rank) for n in several.tolist()]
            # What one block needs is there whichever comes first: the least of the kinds.
            here = [kinds[kind] for kind, _ in share.blocks]
            kept = np.array(most)[which] * share.least * np.minimum.reduce([kind[:, 0] for kind in here])
            moving = np.minimum.reduce([kind[:, 1] + kind[:, 2] for kind in here])
            found.append(kept + (np.maximum(moving, tables.loss(group.inner)) if share.head else moving))
        return np.array(found)

    def bytes(self, state: int) -> Floats:
        """Of the fullest rank: of those with the same share the first has the most in flight."""
        zero, reshard, accumulate = STATES[state]
        kept, early, gradients = self._state(zero)
        if zero >= 2 and accumulate == "local" and not self.memory_profile.reduces_each:
            early = np.maximum(early, self._unsent)
        whole = self._buckets
        if zero == 3 and not self.memory_profile.gathers_matrices:
            whole = whole + np.where(self.group.shared, self._whole(reshard), 0.0)
        return (kept + np.maximum(gradients, early + self.activations + whole)).max(0)

    def _state(self, zero: int) -> tuple[Floats, Floats, Floats]:
        """Bytes of parameters and the optimizer's state, of gradients while the most micro-batches are in flight, and
        of all gradients."""
        if zero not in self.states:
            parameter, gradient, optimizer = by_stage(zero, self.group.ranks, *self.widths)
            gradients = self.group.weighed(gradient)
            self.states[zero] = (
                self.group.weighed(parameter + optimizer),
                np.where(self._stays, gradients, 0.0),
                gradients,
            )
        return self.states[zero]

    @cached_property
    def _stays(self) -> NDArray[np.bool_]:
        """Whether gradients of earlier micro-batches are there while the most are in flight."""
        returns = self.entry is not None and not self.entry.all_in_flight
        several = self.m > 1 if self.pp == 1 else (self.m > 2 * self.pp + 1) & returns
        return self.memory_profile.gradients_stay | several

    @cached_property
    def _unsent(self) -> Floats:
        """Bytes of gradients that wait for the last micro-batch to be reduced."""
        return self.group.weighed(np.where((self.m > 1) & (self.group.ranks > 1), self.widths[1], 0.0))

    @cached_property
    def _buckets(self) -> Floats:
        """Bytes of gradients on their way."""
        return np.where(self.group.data_ranks > 1, self.memory_profile.bucket_numbers * self.widths[1], 0.0)

    def _whole(self, reshard: bool) -> Floats:
        """Bytes of parameters that zero 3 has whole at a time at least."""
        around, block = self._matrices
        most = [share.least for share in self.group.shares]
        blocks = [min(1 + self.tables.space.base.prefetch, least) if reshard else least for least in most]
        return around + block * np.array(blocks)[:, None]

    @cached_property
    def _matrices(self) -> tuple[Floats, Floats]:
        """Bytes of whole parameters around a rank's blocks, and of one of these on average."""
        group, width = self.group, self.tables.request.width
        inside = np.stack([self.tables.numbers(share, inside=True)[group.inner].sum(1) for share in group.shares])
        return (group.total - inside) * width, inside / group.blocks[:, None] * width
