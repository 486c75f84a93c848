"""Lower bounds on the bytes of the fullest rank, for many pairs of a mesh and a micro-batch at once: the formulas of
cost/memory/formulas.py, with the fewest activations that a schedule can have in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from phalanx.blocks.kinds import BlockKind
from phalanx.cost.held import GatheredParameters
from phalanx.cost.memory.formulas import fullest
from phalanx.partition.pipeline import slices_of, splits_backward
from phalanx.partition.tiers import is_offloaded
from phalanx.plan.search.space import STATES, Scheduled
from phalanx.plan.search.tables import Floats, Pipelines
from phalanx.schedule.catalogue import SCHEDULES, chunks_of


def least_in_flight(scheduled: Scheduled, pp: int, m: int, rank: int) -> int:
    """Returns the fewest activations of a stage that a rank holds at its peak; one for a schedule in a file."""
    if pp == 1 or scheduled.schedule not in SCHEDULES:
        return 1
    return SCHEDULES[scheduled.schedule].in_flight(pp, m, chunks_of(*scheduled), rank)


class StepBytes:
    """The memory of layouts with the same pipeline and recomputation. Arrays have a row per different rank contents and
    a column per pair."""

    def __init__(self, group: Pipelines):
        self.group, self.tables, self.m, self.pp = group, group.tables, group.m, group.pp
        self.formulas = group.tables.formulas
        self.entry = SCHEDULES.get(group.scheduled.schedule) if group.pp > 1 else None
        self.shards = group.shards
        self.kinds = {kind: self.tables.activations(kind, group.mode, group.inner) for kind in group.kinds}
        self.activations = self._activations() + self.formulas.buffer(group.data_ranks)
        """Least bytes of activations at the peak, and those of the buffer beside them."""
        self.states: dict[int, tuple[Floats, Floats, Floats]] = {}
        self.whole: dict[bool, Floats] = {}

    def _activations(self) -> Floats:
        group, base = self.group, self.tables.space.base
        layout = replace(base, pp=self.pp, schedule=group.scheduled.schedule)
        slices = slices_of(layout)
        several, which = np.unique(self.m, return_inverse=True)
        found = []
        for share, rank in zip(group.shares, group.first, strict=True):
            most = [least_in_flight(group.scheduled, self.pp, n, rank) for n in several.tolist()]
            # What one block needs is there whichever comes first: the least of the kinds.
            least = np.minimum.reduce([self.kinds[kind] for kind, _ in share.blocks])
            stays = 0 if is_offloaded(base, "activations") else least[:, 0]
            if splits_backward(layout):
                stays = np.minimum(stays, least[:, 3])
            if slices > 1 and self.tables.request.model.dropout:
                stays = stays / 2  # earlier slices see, and save scores of, fewer keys: half of all
            kept = np.array(most)[which] * share.least * stays
            moving = least[:, 1] + least[:, 2] if self.pp > 1 else least[:, 1]
            moving = np.maximum(moving, self.tables.loss(group.inner)) if share.head else moving
            found.append(kept + moving / slices)
        return np.array(found)

    def bytes(self, state: int) -> Floats:
        """Returns the bytes of the fullest rank. Of ranks with the same contents the first has the most in flight."""
        zero, reshard, accumulate = STATES[state]
        held, early, stepping = self._state(zero)
        if self.formulas.defers(zero, accumulate):
            early = np.maximum(early, self._unsent)
        whole = self._whole(reshard) if zero == 3 and not self.formulas.profile.gathers_matrices else 0.0
        return fullest(held, early, self.activations, whole, stepping).max(0)

    def _state(self, zero: int) -> tuple[Floats, Floats, Floats]:
        """Returns the bytes of parameters and optimizer state, of gradients while the most micro-batches are in flight,
        and of gradients in the optimizer step."""
        if zero not in self.states:
            flushes = self.entry is None or self.entry.steps == 1
            parameters, gradients, optimizer = self.formulas.state(
                self.shards, zero, self.group.data_ranks, flushes=flushes
            )
            left = self.formulas.stepping(gradients, zero, self.group.shared)
            stepping = left + self.formulas.copied(self.shards, self.group.data_ranks)
            self.states[zero] = parameters + optimizer, gradients * self._stays, stepping
        return self.states[zero]

    @cached_property
    def _stays(self) -> Floats:
        """Whether gradients of earlier micro-batches are there while the most are in flight."""
        several = 2 * self.pp + 1 if self.entry is not None and not self.entry.all_in_flight else inf
        return self.formulas.stays(self.m, 1 if self.pp == 1 else several)

    @cached_property
    def _unsent(self) -> Floats:
        return self.formulas.unsent(self.shards, self.m)

    def _whole(self, reshard: bool) -> Floats:
        """Returns the bytes of unsharded parameters of ZeRO-3, and of their gradients in transit."""
        if reshard not in self.whole:
            blocks = self.formulas.gathers(self.group.blocks, self.pp, self.tables.space.base.prefetch, reshard=reshard)
            outside, held, kept = self._largest(tiled=reshard)
            whole = self.formulas.gathered(outside, held, blocks[:, None], kept)
            self.whole[reshard] = whole * self.group.shared
        return self.whole[reshard]

    def _largest(self, *, tiled: bool) -> tuple[Floats, GatheredParameters, Floats]:
        """Returns the parameters around a rank's blocks that are whole at once, those of the largest block, and the
        most bytes that it keeps."""
        group, tables, sizes = self.group, self.tables, dict[BlockKind, Floats]()
        shared = group.ranks[1] > 1  # experts that no other rank has are not gathered
        for kind, activations in self.kinds.items():
            alone, together = (tables.gathered(kind, group.inner, shared=each, tiled=tiled) for each in (False, True))
            sizes[kind] = np.stack([*np.where(shared[:, None], together, alone).T, activations[:, 0]])
        largest = []
        for share in group.shares:
            of_kinds = [sizes[kind] for kind, _ in share.blocks]
            most = np.maximum.reduce(of_kinds)
            # The largest block may be another than that with the largest tile.
            most[2] = np.minimum.reduce(of_kinds)[2]
            largest.append(most)
        *held, kept = np.stack(largest, 1)
        outside = [tables.outside(share, group.inner, tiled=tiled) for share in group.shares]
        return np.stack(outside), GatheredParameters(*held), kept
