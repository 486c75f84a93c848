"""Memory of ZeRO-3 on a pipeline rank as FSDP2 has it: blocks that are whole, and their gradients on the way.

FSDP2 gathers a group of parameters (a block, its experts, a tile, or what is outside of blocks) into one buffer and
copies it to the parameters, fetches the next groups ahead, and keeps the gradients that it has sent last until it sends
the next ones (torch.distributed.fsdp._fully_shard: _fsdp_param_group.py, _fsdp_collectives.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from phalanx.cost.block_memory import BlockBytes, BlockRun, StepSizes
from phalanx.cost.held import gathered_outside, outside, table
from phalanx.cost.in_flight import RankPeak
from phalanx.cost.state_formulas import Shards
from phalanx.partition.derived import gathers_parameters, is_copied, is_offloaded, near_ranks, wire_width


class FsdpMemory:
    """Bytes of a rank's groups of parameters, of which there are none without ZeRO-3. Its stages have `runs` of blocks,
    all of it has `shards` of parameters (held.shards_of), and it has the `first` stage, or the `last`."""

    def __init__(
        self,
        step: StepSizes,
        runs: Sequence[Sequence[BlockRun]],
        shards: Shards,
        *,
        first: bool,
        last: bool,
    ):
        self.step, self.runs, self.shards = step, runs, shards
        self.model, self.layout, self.width = step.spec.model, step.spec.layout, step.spec.width
        self.memory_profile, self.formulas = step.memory_profile, step.formulas
        self.blocks = [[run.block for run in reversed(held) for _ in range(run.many)] for held in runs]
        """By stage of the rank its blocks in the order of the backward pass."""
        self.starts = [*accumulate(map(len, self.blocks), initial=0)]
        """The number of blocks of the rank before those of each stage, and of all."""
        blocks = [run.block for held in runs for run in held]
        # Experts that no other rank has are not gathered. On the host they are fetched, and stay with reshard=false;
        # else those of one rank alone are there while they compute.
        alone = self.layout.ep > 1 and self.layout.edp * self.layout.dp_replicate == 1 and self.layout.reshard
        self.deals_out = self.shards[1][2] > 1 or (is_offloaded(self.layout, "parameters") and not alone)
        fetches = gathers_parameters(self.layout) and not self.memory_profile.gathers_matrices
        self.parts_experts = self.layout.ep > 1 and bool(self.deals_out)
        """Whether ZeRO-3 gathers and sends a block's experts on their own."""
        self.units = {
            each.kind.block: each.parameters.gathered(self.deals_out, tiled=self.layout.reshard)
            for each in blocks * fetches
        }
        """By kind of block, what ZeRO-3 gathers."""
        self.sizes = [self.units[block.kind.block].block for stage in self.blocks for block in stage[::-1] * fetches]
        self.ends = gathered_outside(self.model, self.layout, first, last, tiled=self.layout.reshard)
        self.outside = outside(self.model, self.layout.tp, first, last)
        # Without a collective FSDP2 fetches a block when it computes.
        self.ahead = self.layout.prefetch if self.layout.shard_ranks > 1 else 0
        self.stay_whole = self.formulas.keeps_whole(self.layout.pp, reshard=self.layout.reshard)
        """Whether blocks stay whole until their backward pass, in a pipeline until the last one."""
        sent = max(self.ends.block, self.ends.tile, *(each.trained for each in self.units.values()), 0)
        codec = self.layout.quantise_gradients
        coded = 0.0 if codec == "none" else wire_width(codec, self.width)
        self.gradient_codes = 2 * sent * coded
        """Bytes of the codes of a group's gradients that a rank sends, and of as many that it gets."""
        wide = {"none": 0, "fp8": self.width}.get(self.layout.quantise_weights, 8)
        self.largest = max((block.parameters.largest for block in blocks), default=0)
        self.decoding = max(0.0, wide * self.largest - self.gradient_codes)
        """Bytes, more than those, in which a matrix's codes become numbers: in fp32, scaled and not."""
        self.sum_width = max(self.width, self.formulas.gradient)
        """Bytes per gradient of a group that is sent."""
        self.gathers_once = self.stay_whole and self.layout.pp > 1
        self.waiting = bool(self.units) and self.ahead > 0 and not self.gathers_once and len(runs) > 1
        """Whether blocks that are fetched ahead may wait for a pass of another stage."""
        self.lingers = bool(self.units) and self.memory_profile.keeps_gathered and self.layout.shard_ranks > 1
        """Whether FSDP2 has what it gathered last in a forward pass until it has copied what comes next."""
        goes_up = self.lingers and self.ahead > 0 and is_offloaded(self.layout, "parameters")
        self.going_up = goes_up / self.layout.shard_ranks
        """Share of a block that is copied to the device beside the buffer in which it is gathered."""
        trained = self.ends.block if self.units and not self.model.freezes else 0
        sent_last = self.formulas.sent_last(trained, step.spec.batch.accumulation, self.layout)
        self.sent_last = sent_last * (self.layout.pp == 1)
        """Bytes of gradients outside of blocks that were sent last."""
        self.outside_waits = bool(self.units) and self.layout.pp > 1 and step.spec.batch.accumulation > 1
        """Whether gradients outside of blocks wait for the end of a pipeline's step."""

    def whole(self) -> tuple[float, float]:
        """Returns the bytes of the second copy of the parameters and of what is whole outside of blocks; and those of
        its gradient of the head, which the backward pass begins with."""
        layout, found = self.layout, 0.0
        if not gathers_parameters(layout):
            return 0.0, 0.0
        if is_copied(layout):
            near = near_ranks(layout), near_ranks(layout, experts=layout.ep > 1)
            copied = sum(numbers / ranks for (numbers, *_), ranks in zip(self.shards, near, strict=True))
            found += copied * wire_width(layout.quantise_weights, self.width)
            if layout.quantise_weights == "fp8":
                found += self.outside / near[0] * (self.width - 1)
        if self.memory_profile.gathers_matrices:
            return found + max(table(self.model, layout.tp), self.largest) * 2 * self.width, 0.0
        block, _, tile = (max(sizes) for sizes in zip(*(self.units.values() or ((0, 0, 0),)), strict=True))
        if layout.quantise_weights != "none":
            # The codes of a block that arrives, beside its numbers.
            coded = max(block, tile, 0 if layout.quantise_weights == "fp8" else self.ends.block)
            found += coded * wire_width(layout.quantise_weights, self.width)
        found += self.gradient_codes
        return found + self.ends.block * self.width, self.ends.trained * self.width

    def moments(
        self, peak: RankPeak, number: int, sent: float = 0.0, *, adds: bool, unsent: bool, sends: bool = True
    ) -> Iterator[tuple[float, float, float]]:
        """Yields the bytes inside one of the blocks of a backward pass, and those of ZeRO-3's blocks and gradients on
        their way: at work, after its experts were sent on their own, and when it begins, copied from what came, before
        the next ones come. `sent`: bytes of gradients that were counted and are not there any more; `adds`: those of
        an earlier micro-batch are there; `sends`: whether any are sent in the backward pass."""
        blocks, ahead = self.blocks[peak.place], self.ahead
        block, unit = blocks[number], self.units.get(blocks[number].kind.block)
        passing, copies = self._passing(blocks[number - 1], unsent=unsent) if number else (self.sent_last, 0.0)
        inside, after = (block.inside if number else block.opening)[adds]
        fetched = self.fetched(peak, number, ahead)
        tile = unit.tile * self.sum_width if unit else 0.0
        if not sends:
            passing = copies = tile = 0.0
        yield inside, fetched + max(0.0, (copies + tile if tile else passing) - sent), 0.0
        yield after, fetched + max(0.0, copies - sent), 0.0
        if not unit or self.stay_whole:
            return
        if self.layout.shard_ranks == 1:  # what it sends is copied and divided
            yield -block.kept, 3 * unit.trained * self.sum_width, 0.0
            return
        whole, experts, _ = self._sizes(block)
        mine = whole - experts
        if self.memory_profile.copies_sums and sends:  # what it sends is copied, and its sum is there, too
            sums = (unit.trained - self._experts_alone(block)) * self.sum_width
            sums *= 2 - unsent + 1 / self.layout.shard_ranks
            sums += block.parameters.last * self.width  # the last gradient goes when all are sent
            yield -block.kept, fetched - whole + max(0.0, sums - sent), 0.0
        came = self.fetched(peak, number, ahead - 1) if ahead else mine
        # Codes become numbers when the next block is asked for; without streams when this one is waited for.
        decoded = (fetched if self.memory_profile.keeps_gathered else came) + self.decoding
        if self.going_up:
            later = [self._sizes(other)[0] for other in blocks[number + ahead : number + ahead + 1]]
            decoded = max(decoded, fetched + sum(later) * self.going_up)
        yield 0.0, max(mine + came, decoded) + max(0.0, passing - sent), 0.0

    def _sizes(self, block: BlockBytes) -> tuple[float, float, float]:
        """Returns the bytes of a block that ZeRO-3 gathers, those of its experts which it gathers on their own, and
        those that it gathers last."""
        unit, parameters, width = self.units[block.kind.block], block.parameters, self.width
        experts = (parameters.experts - parameters.tiled_experts * self.layout.reshard) * self.parts_experts
        return unit.block * width, experts * width, (experts or unit.tile or unit.block) * width

    def _experts_alone(self, block: BlockBytes) -> int:
        """Returns the trained parameters of a block's experts that ZeRO-3 sends on their own."""
        parameters = block.parameters
        return (parameters.trained_experts - parameters.tiled_experts * self.layout.reshard) * self.parts_experts

    def fetched(self, peak: RankPeak, number: int, ahead: int) -> float:
        """Returns the bytes of ZeRO-3's whole blocks while one of the blocks of a backward pass goes back: its own,
        those fetched `ahead` of the next ones, others that wait, and its largest tile."""
        blocks = self.blocks[peak.place]
        if not self.units:
            return 0.0
        if self.gathers_once:
            whole = sum(run.many * self.units[run.block.kind.block].block for held in self.runs for run in held)
        else:
            last = None if self.stay_whole else number + 1 + ahead
            whole = sum(self.units[block.kind.block].block for block in blocks[number:last])
        others = self._fetched_for_others(peak, number, ahead)
        return (whole + max(self.units[blocks[number].kind.block].tile, self.ends.tile)) * self.width + others

    def waits_for(self, peak: RankPeak) -> tuple[int, ...]:
        """Returns what differs in ZeRO-3's blocks between passes of the same stage."""
        return peak.firsts + peak.lasts if self.waiting else ()

    def _fetched_for_others(self, peak: RankPeak, number: int, ahead: int) -> float:
        """Returns the bytes of whole blocks, other than those that one of a stage's blocks has fetched `ahead` in its
        stage: of other stages, which it has fetched or which wait for a pass of theirs, and of its own, which wait for
        its turn. FSDP2 fetches blocks in their order on the rank, whichever stage computes next."""
        if not self.waiting:
            return 0.0
        start, end = self.starts[peak.place : peak.place + 2]
        at, total, forward = end - 1 - number, self.starts[-1], peak.kind == "F"
        fetched = range(at + 1, min(total, at + 1 + ahead)) if forward else range(max(0, at - ahead), at)
        here = range(start, min(end, at + 1 + ahead)) if forward else range(max(start, at - ahead), end)
        there = set(fetched)
        for stage, (first, last) in enumerate(zip(peak.firsts, peak.lasts, strict=True)):
            if first:
                there.update(range(self.starts[stage], min(total, self.starts[stage] + self.ahead)))
            if last:
                there.update(range(max(0, self.starts[stage + 1] - self.ahead), self.starts[stage + 1]))
        return sum(self.sizes[n] for n in there.difference(here)) * self.width

    def fetched_in_forward(self, peak: RankPeak) -> Iterator[tuple[float, float]]:
        """Yields the bytes of ZeRO-3's blocks when one begins in a forward pass and when it ends, or its experts begin,
        and those of activations less what blocks keep. Each is copied from what came, which may linger."""
        stream, ahead = self.step.stream / self.step.share, max(1, self.ahead)
        sizes = [size for run in reversed(self.runs[peak.place]) for size in [self._sizes(run.block)] * run.many]
        sizes.append((0.0, 0.0, self.ends.block * self.width))
        whole = [size for size, *_ in sizes]
        first, later = 0, stream
        for run in reversed(self.runs[peak.place]):
            each = 0.0 if run.leaves else run.block.kept
            # The last block, the last that has fetched as many ahead as any, and the first.
            for number in {0, min(max(0, self.ahead - first), run.many - 1), run.many - 1}:
                at, kept = first + number, later - (number + 1) * each
                (size, experts, _), (*_, before) = sizes[at : at + 2]
                stay = sum(whole[at + 1 : -1]) if self.stay_whole else 0.0
                came = sum(whole[max(0, at + 1 - ahead) : at + 1]) - (0 if self.ahead else experts)
                came += self._fetched_for_others(peak, at, ahead - 1)
                yield size - experts + came + before * self.lingers + stay + self.decoding, kept
                came = size * self.lingers + sum(whole[max(0, at - self.ahead) : at])
                came += self._fetched_for_others(peak, at, self.ahead)
                yield size + came + stay + self.decoding, kept + (0.0 if experts else run.block.forward)
                if self.going_up:
                    yield size + came + stay + whole[max(0, at - self.ahead)] * self.going_up, kept
            first, later = first + run.many, later - run.many * each

    def whole_at_end(self, peak: RankPeak) -> float:
        """Returns the bytes of ZeRO-3's blocks that stay whole in a pipeline, and of gradients on their way,
        when the last backward pass of a stage has ended."""
        return self.fetched(peak, 0, 0) + self.sent_at_end(peak.place) if self.blocks[peak.place] else 0.0

    def sent_at_end(self, place: int) -> float:
        """Returns the most bytes of gradients on their way, more than those that wait, when autograd is through with a
        stage and its blocks are sent one by one: FSDP2 copies a block's, and a collective does while the copy of those
        before is there."""
        copies, share, most, before = self.memory_profile.copies_sums, 1 / self.layout.shard_ranks, 0.0, 0.0
        for block in self.blocks[place] if self.units else ():
            sent = self.units[block.kind.block].trained * self.sum_width
            most = max(most, before + max(1.0, copies + share) * sent + block.parameters.last * self.width)
            before = (copies - 1 + share) * sent
        return most

    def fetched_in_loss(self, peak: RankPeak) -> tuple[float, float]:
        """Returns the bytes of ZeRO-3's whole blocks in the loss, and once its backward pass comes to the blocks."""
        if not (blocks := self.blocks[-1]):
            return 0.0, 0.0
        if self.memory_profile.saves_slopes:
            whole = self.fetched(peak._replace(kind="B"), 0, 0) + blocks[0].late
            first = self._fetched_for_others(peak, 0, self.ahead)
            first += self._sizes(blocks[0])[2] if self.lingers and not self.gathers_once else 0.0
            return whole * self.stay_whole + first, whole
        # Programs with another loss were measured with the last block, and with its gradients.
        first, fetched = (self.fetched(peak, 0, ahead) for ahead in (0, self.ahead))
        return first, fetched + max(0.0, self._passing(blocks[0], unsent=False)[0] - blocks[0].kept)

    def _passing(self, block: BlockBytes, *, unsent: bool) -> tuple[float, float]:
        """Returns the bytes of a ZeRO-3 block's gradients on the way, and those without what FSDP2 gives up when it
        sends the next ones."""
        if not self.units:
            return 0.0, 0.0
        waits, held = self.step.waits, self.units[block.kind.block]
        found, kept = self.formulas.passing(held, waits=waits), held.trained * self.sum_width
        # Experts' are sent before, on their own: only a collective's copy is left.
        experts = self._experts_alone(block) * self.sum_width
        found, kept = found - experts, kept - experts
        leaves = self.formulas.resident or not self.memory_profile.keeps_gathered
        leaves = leaves and self.formulas.offloads and self.layout.pp == 1 and self.layout.shard_ranks > 1
        if leaves and not self.stay_in_sums:
            own = self.formulas.gradient / self.layout.shard_ranks
            if not waits:  # what was sent before has left by then, experts' and a block's alike
                copy = self._experts_alone(block) * self.width
                return found - copy + (held.trained - self._experts_alone(block)) * own, copy
            found += held.trained * own  # leaves with the next one
        if unsent and not self.deals_out:  # experts' are divided on their own, into a copy
            found += block.parameters.trained_experts * self.formulas.gradient
        return found, found - kept

    @property
    def stay_in_sums(self) -> bool:
        """Whether gradients that leave for the host stay in the sums over replicas, too."""
        return self.layout.dp_replicate > 1 and is_offloaded(self.layout, "parameters")

    def summed_over_replicas(self, block: BlockBytes) -> float:
        """Returns the bytes of a block's shards in which FSDP2 sums over replicas, if they are wider than gradients, or
        those leave. They stay until the backward pass ends (torch's AllReduceState)."""
        layout, sizes = self.layout, self.formulas
        if not self.units or layout.dp_replicate == 1:
            return 0.0
        if sizes.unbuffered == sizes.gradient and not self.stay_in_sums:
            return 0.0
        trained = block.parameters.trained_dense, block.parameters.trained_experts
        least = 2 if self.stay_in_sums else 1  # ranks that share them
        shares = [n / ranks for n, (*_, ranks) in zip(trained, self.shards, strict=True) if ranks >= least]
        return sum(shares) * sizes.gradient
