"""Parameters that a tensor rank holds, block by block: each kind of block is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from operator import le, sub
from typing import Any, NamedTuple

from phalanx.blocks.kinds import BlockKind, block_kinds
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import block_weights
from phalanx.blocks.residual import VOCABULARY, embedding_weights, head_rows, head_weights
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.exposed import larger
from phalanx.cost.spec import StepSpec
from phalanx.partition import derived
from phalanx.partition.tensor_slices import head_tiles, is_tiled
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Schedule


class BlockParameters(NamedTuple):
    """Parameters of a block on one tensor and expert rank."""

    dense: int
    """Parameters that all expert ranks have."""
    experts: int
    """Parameters of the routed experts that the rank holds."""
    matrices: int
    """Parameters of all matrices, with one expert's in place of all."""
    largest: int
    """Parameters of the largest matrix; the same matrix of all local experts counts as one."""
    trained_dense: int
    """The part of `dense` that training changes: with adapters, theirs."""
    trained_experts: int
    tiled_dense: int
    """The part of `dense` that runs in tiles."""
    tiled_experts: int
    tile_dense: int
    """Parameters of the largest tile of dense layers."""
    tile_experts: int
    tiles: int
    """Number of its tiles."""
    last: int
    """Parameters of the last trained one that ZeRO-3 sends with the rest of the block."""

    def gathered(self, experts: Any, *, tiled: bool) -> GatheredParameters:
        """Returns what ZeRO-3 gathers: with parameters of `experts`, if several ranks share them. `tiled`: tiles, if
        there are any, are given up one after the other, as after a forward pass that reshards."""
        block = self.dense + experts * self.experts
        trained = self.trained_dense + experts * self.trained_experts
        if not (tiled and self.tiled_dense + self.tiled_experts):
            return GatheredParameters(block, trained, 0)
        # No tile is frozen.
        within = self.tiled_dense + experts * self.tiled_experts
        tile = larger(self.tile_dense, experts * self.tile_experts)
        return GatheredParameters(block - within, trained - within + tile, tile)


class GatheredParameters(NamedTuple):
    """Parameters of a block that ZeRO-3 gathers."""

    block: Any
    """Those that are whole for as long as the block computes."""
    trained: Any
    """Those whose gradients are whole at once."""
    tile: Any
    """Those of the tile that is whole beside the block."""


def block_parameters(model: ModelConfig, layout: Layout, kind: BlockKind) -> BlockParameters:
    """Returns the parameters of a block of one kind on one rank of the layout's tp × ep."""
    return _block_parameters(model, layout.tp, layout.ep_shard, layout.tiles, layout.tile, kind, layout.folds)


@lru_cache(maxsize=4096)
def _block_parameters(
    model: ModelConfig, tp: int, ep: int, tiles: int, tile: str, kind: BlockKind, folds: bool
) -> BlockParameters:
    layout = Layout(tiles=tiles, tile=tile)
    dense = routed = matrices = largest = trained_dense = trained_routed = last = 0
    tiled = Counter[str]()
    for weight in (each.folded(folds) for each in block_weights(model, kind)):
        size = weight.size_on(tp, ep)
        if is_tiled(weight, layout):
            tiled[weight.name.rpartition(".")[0]] += size
        trained = 0 if weight.frozen else size
        if weight.routed:
            routed, trained_routed = routed + size, trained_routed + trained
        else:
            dense, trained_dense = dense + size, trained_dense + trained
        if weight.is_matrix:
            matrices += prod(weight.shape_on(tp)[-2:])
        largest = max(largest, size)
        last = trained if trained and not (weight.routed and ep > 1) else last
    # A layer's bias, if it is cut, is in the same tiles as its matrix.
    of_experts = [size for name, size in tiled.items() if is_expert(f"{name}.")]
    of_dense = [size for name, size in tiled.items() if not is_expert(f"{name}.")]
    return BlockParameters(
        dense,
        routed,
        matrices,
        largest,
        trained_dense,
        trained_routed,
        sum(of_dense),
        sum(of_experts),
        max(of_dense, default=0) // tiles,
        max(of_experts, default=0) // tiles,
        len(tiled) * tiles,
        last,
    )


class LayerKind(NamedTuple):
    """A kind of block with its recomputation."""

    block: BlockKind
    recompute: derived.Mode


@lru_cache(maxsize=4096)
def layer_kinds(model: ModelConfig, recomputes: str) -> tuple[LayerKind, ...]:
    """Returns the kind of every layer; `recomputes` is the layout's (partition.recompute.written)."""
    every = derived.modes(recomputes, model.n_layers)
    return tuple(LayerKind(kind, mode) for kind, mode in zip(block_kinds(model), every, strict=True))


@lru_cache(maxsize=4096)
def kinds_of(model: ModelConfig, recomputes: str, layers: range) -> tuple[tuple[LayerKind, int], ...]:
    """Returns the kinds of some layers as runs: each kind with the number of consecutive layers."""
    kinds = layer_kinds(model, recomputes)
    return tuple((kind, len(list(run))) for kind, run in groupby(kinds[layer] for layer in layers))


@lru_cache(maxsize=4096)
def table(model: ModelConfig, tp: int) -> int:
    """Returns the parameters of a tensor rank's part of the head, which may be the embedding."""
    return VOCABULARY._replace(shape=(head_rows(model, model.vocab_size), model.d_model)).size_on(tp)


@lru_cache(maxsize=4096)
def outside(model: ModelConfig, tp: int, first: bool, last: bool) -> int:
    """Returns the parameters outside the blocks, on a rank that has the first stage, the last, or both."""
    vocab = model.vocab_size
    weights = [*(embedding_weights(model, vocab) if first else ()), *(head_weights(model, vocab) if last else ())]
    copied = table(model, tp) if model.embeds_at_end and last and not first else 0
    return sum(weight.size_on(tp) for weight in weights) + copied


def gathered_outside(model: ModelConfig, layout: Layout, first: bool, last: bool, *, tiled: bool) -> GatheredParameters:
    """Returns what ZeRO-3 gathers outside the blocks, with the head's gradient alone under `trained`. `tiled`: tiles,
    if there are any, are given up one after the other."""
    only = Layout(tp=layout.tp, tiles=layout.tiles if tiled else 1, tile=layout.tile)
    return _gathered_outside(model, only, first, last)


@lru_cache(maxsize=4096)
def _gathered_outside(model: ModelConfig, layout: Layout, first: bool, last: bool) -> GatheredParameters:
    vocab, tp = model.vocab_size, layout.tp
    weights = [*(embedding_weights(model, vocab) if first else ()), *(head_weights(model, vocab) if last else ())]
    within = sum(weight.size_on(tp) for weight in weights if is_tiled(weight, layout))
    tile = -(-table(model, tp) // model.d_model // layout.tiles) * model.d_model
    gradient = 0 if model.freezes or not last else tile if head_tiles(model, layout) > 1 else table(model, tp)
    return GatheredParameters(outside(model, tp, first, last) - within, gradient, tile if within else 0)


class ParameterCounts(NamedTuple):
    """Parameters on a tensor rank, before the data ranks shard them: dense ones, and those of routed experts."""

    dense: int
    experts: int
    trained_dense: int
    """The dense ones that training changes: all, or adapters."""
    trained_experts: int

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_experts

    def sent(self, layout: Layout, number: str) -> tuple[int, int]:
        """Returns the numbers, dense and of experts, in messages of parameters or gradients: ZeRO-3 gathers also what
        training leaves as it is."""
        if number == "parameter" and derived.gathers_parameters(layout):
            return self.dense, self.experts
        return self.trained_dense, self.trained_experts


def parameter_counts(
    model: ModelConfig, layout: Layout, blocks: Iterable[tuple[BlockKind, int]], first: bool, last: bool
) -> ParameterCounts:
    """Returns the parameters of a rank with so many `blocks` of each kind, and with the embedding (`first`) and the
    head (`last`)."""
    dense = outside(model, layout.tp, first, last)
    trained = 0 if model.freezes else dense
    experts = trained_experts = 0
    for kind, many in blocks:
        each = block_parameters(model, layout, kind)
        dense, experts = dense + many * each.dense, experts + many * each.experts
        trained, trained_experts = trained + many * each.trained_dense, trained_experts + many * each.trained_experts
    return ParameterCounts(dense, experts, trained, trained_experts)


def expert_ranks(shard_ranks: Any, ep_shard: Any) -> Any:
    """Returns over how many ranks the state of a rank's experts is sharded, of `shard_ranks` for dense parameters."""
    return larger(1, shard_ranks // ep_shard)


def shards_of(held: ParameterCounts, layout: Layout) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns parameters on a rank as groups of dense ones and experts: all, those that are trained, and over how many
    ranks their state is sharded."""
    ranks = layout.shard_ranks
    experts = held.experts, held.trained_experts, expert_ranks(ranks, layout.ep_shard)
    return (held.dense, held.trained_dense, ranks), experts


class Deferring(NamedTuple):
    """Micro-batches of one pipeline rank just before a backward pass or after a forward one, per stage of the rank,
    where some wait for their weight gradients."""

    in_flight: tuple[float, ...]
    """Those whose gradients of inputs are not computed yet."""
    deferred: tuple[float, ...]
    """Those of which only weight gradients are left to compute."""


class FetchedAhead(NamedTuple):
    """Blocks that FSDP2 has fetched ahead and that have not computed yet when a stage of a rank begins a pass."""

    backward: bool
    place: int
    """The stage's, among those of the rank."""
    firsts: frozenset[int]
    """Places of stages of which the first blocks are there: the stage before has fetched them in a forward pass."""
    lasts: frozenset[int]
    """Places of stages of which the last blocks are there: the stage after has fetched them in a backward pass."""

    def is_part_of(self, other: FetchedAhead) -> bool:
        """Returns whether all of it is there in `other`, too, which is of the same passes."""
        return self[:2] == other[:2] and self.firsts <= other.firsts and self.lasts <= other.lasts


class Flight(NamedTuple):
    """The stages and in-flight micro-batches of one pipeline rank."""

    held: tuple[int, ...]
    """The stages of the rank."""
    most: tuple[tuple[float, ...], ...]
    """Micro-batches in flight per stage of the rank, at each peak: several peaks if none has the most of every stage. A
    slice of a sequence counts as its share."""
    stages: int
    """Stages of the whole pipeline."""
    share: float = 1.0
    """Share of the micro-batches that pass each of its stages: half in a bidirectional pipeline."""
    losses: float = 1.0
    """Most micro-batches of which the rank with the last stage has logits at once."""
    unread: tuple[tuple[float, ...], ...] = ()
    """As `most`, but only those whose backward pass has not begun; empty if backward passes are whole."""
    later: tuple[tuple[float, ...], ...] = ()
    """As `most`, just before backward passes of micro-batches for which every stage of the rank has gradients already;
    empty without any."""
    later_losses: float = 1.0
    """As `losses`, at these moments."""
    deferring: tuple[Deferring, ...] = ()
    """Micro-batches in flight at peaks of a rank that splits its backward passes; empty for others."""
    final: tuple[tuple[float, ...], ...] = ()
    """Micro-batches in flight per stage when each stage of the rank begins its last backward pass."""
    ahead: tuple[FetchedAhead, ...] = ()
    """What ZeRO-3 has fetched ahead for stages of the rank when their passes begin, less what another pass of the same
    stage has as a part; empty for a rank with one stage."""

    @property
    def joined(self) -> tuple[tuple[float, ...], ...]:
        """`deferring`, with both counts of each moment in one tuple."""
        return tuple(one.in_flight + one.deferred for one in self.deferring)


def flights(layout: Layout, micro_batches: int) -> tuple[Flight, ...]:
    """Returns the stages and in-flight micro-batches of each pipeline rank, with `micro_batches` per step.

    Raises JobError if their number does not fit the schedule, or if its file is none."""
    if layout.pp == 1:
        return (Flight((0,), ((1.0,),), 1, final=((1.0,),)),)
    name = layout.schedule
    if derived.is_file(name):
        return _flights(name, layout.pp, 0, 0, 0)
    entry = catalogue.entry_of(name)
    # Longer programs repeat themselves: no more are in flight. What `later` lacks then is not asked for: while the most
    # are in flight, all stages have gradients.
    enough = 2 * entry.period(layout.pp)
    if entry.all_in_flight:
        built = min(micro_batches, enough)
        ranks = _flights(name, layout.pp, built, layout.pp_chunks, 0)
        return tuple(_with_more(rank, micro_batches - built) for rank in ranks)
    if micro_batches > enough:
        micro_batches = enough + (micro_batches - enough) % (2 * layout.pp)  # groups of pp end alike
    return _flights(name, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices)


def _with_more(rank: Flight, more: int) -> Flight:
    """Returns the rank with so many more micro-batches of a schedule that has all of them in flight at once."""

    def grown(counts: Iterable[float]) -> tuple[float, ...]:
        return tuple(n and n + more for n in counts)  # a stage without any has had all of its backward passes

    return rank._replace(
        most=tuple(map(grown, rank.most)),
        unread=tuple(map(grown, rank.unread)),
        losses=rank.losses and rank.losses + more,
        later=tuple(map(grown, rank.later)),
        later_losses=rank.later_losses and rank.later_losses + more,
        final=tuple(
            (*grown(one[:place]), one[place], *grown(one[place + 1 :])) for place, one in enumerate(rank.final)
        ),
        deferring=tuple(Deferring(grown(one.in_flight), one.deferred) for one in rank.deferring),
    )


@lru_cache(maxsize=4096)
def with_all_peaks(alike: tuple[Flight, ...]) -> Flight:
    """Returns the first of some ranks that hold the same, with the peaks of all: at its fullest moment it has as many
    micro-batches in flight as the fullest of them."""
    peaks = {
        name: _front({counts for rank in alike for counts in getattr(rank, name)}, 1)
        for name in ("most", "unread", "later", "joined")
    }
    losses = {name: max(getattr(rank, name) for rank in alike) for name in ("losses", "later_losses")}
    final = tuple(
        tuple(map(max, zip(*counts, strict=True))) for counts in zip(*(one.final for one in alike), strict=True)
    )
    ahead = _not_parts({fetched for rank in alike for fetched in rank.ahead})
    return alike[0]._replace(deferring=_deferring(peaks.pop("joined")), final=final, ahead=ahead, **peaks, **losses)


def _deferring(joined: Iterable[tuple[float, ...]]) -> tuple[Deferring, ...]:
    """Returns moments from both of their counts in one tuple."""
    return tuple(Deferring(one[: len(one) // 2], one[len(one) // 2 :]) for one in joined)


@lru_cache(maxsize=4096)
def _flights(name: str, pp: int, micro_batches: int, chunks: int, slices: int) -> tuple[Flight, ...]:
    schedule = derived.schedule_of(Layout(schedule=name, pp=pp, pp_chunks=chunks, pp_slices=slices), micro_batches)
    return tuple(_flight(schedule, rank) for rank in range(schedule.ranks))


def _flight(schedule: Schedule, rank: int) -> Flight:
    program, held = schedule.programs[rank], schedule.stages_on(rank)
    places = {stage: place for place, stage in enumerate(held)}
    # Micro-batches per stage: in flight, until B or I, and between I and W.
    now, unread, waiting = ([0] * len(held) for _ in range(3))
    most, most_unread = set[tuple[int, ...]](), set[tuple[int, ...]]()
    later, deferring, back = set[tuple[int, ...]](), set[tuple[int, ...]](), set[int]()
    logits = most_logits = later_logits = 0
    last, splits = schedule.stages - 1, any(action[0] == "I" for action in program)
    final = dict[int, tuple[int, ...]]()
    # Whether a forward action came last, and since the last one that frees an activation.
    after = grown = grown_unread = False
    for kind, stage, _, _ in program:
        place = places[stage]
        if kind in ("B", "I"):
            final[stage] = tuple(now)
            if len(back) == len(held):
                later.add(tuple(now))
                later_logits = max(later_logits, logits)
            else:
                back.add(stage)
            if grown_unread:  # a peak: this action frees one
                most_unread.add(tuple(unread))
            unread[place] -= 1
            grown_unread = False
            logits -= stage == last
        if splits and (after or kind in ("B", "I")):
            deferring.add((*map(sub, now, waiting), *waiting))
        after = kind == "F"
        if after:
            if stage == last:
                logits += 1
                most_logits = max(most_logits, logits)
            now[place] += 1
            unread[place] += 1
            grown = grown_unread = True
        elif kind == "I":
            waiting[place] += 1
        else:
            if grown:
                most.add(tuple(now))
            grown = False
            now[place] -= 1
            waiting[place] -= kind == "W"
    visits = sum(placement.count(rank) for placement in schedule.placements)
    slices = schedule.slices
    return Flight(
        held=tuple(held),
        most=_front(most, slices),
        stages=schedule.stages,
        share=visits / len(held) / len(schedule.placements),
        losses=most_logits / slices,
        unread=_front(most_unread, slices) if splits else (),
        later=_front(later, slices),
        later_losses=later_logits / slices,
        final=tuple(tuple(n / slices for n in final[stage]) for stage in held),
        deferring=_deferring(_front(deferring, slices)),
        ahead=_fetched_ahead(schedule, rank) if len(held) > 1 else (),
    )


def _fetched_ahead(schedule: Schedule, rank: int) -> tuple[FetchedAhead, ...]:
    """Returns Flight.ahead. A stage's last blocks fetch the first ones of the rank's next stage, which wait for their
    forward pass, whatever comes before it; those that wait are fetched once."""
    places = {stage: place for place, stage in enumerate(schedule.stages_on(rank))}
    # Sets of places are the bits of a number: a program has thousands of passes and few such sets.
    firsts, lasts, most = 0, 0, len(places)
    found = set[tuple[bool, int, int, int]]()
    for kind, stage, _, _ in schedule.programs[rank]:
        if kind != "W":
            place, backward = places[stage], kind != "F"
            found.add((backward, place, firsts, lasts))
            firsts &= ~(1 << place)
            lasts &= ~(1 << place)
            if backward and place:
                lasts |= 1 << place - 1
            elif not backward and place + 1 < most:
                firsts |= 1 << place + 1

    def among(bits: int) -> frozenset[int]:
        return frozenset(place for place in range(most) if bits >> place & 1)

    return _not_parts({FetchedAhead(*of, among(firsts), among(lasts)) for *of, firsts, lasts in found})


def _not_parts(found: set[FetchedAhead]) -> tuple[FetchedAhead, ...]:
    """Returns those that are no part of others."""
    kept = list[FetchedAhead]()
    for one in sorted(found, key=lambda each: len(each.firsts) + len(each.lasts), reverse=True):
        if not any(map(one.is_part_of, kept)):
            kept.append(one)
    return tuple(kept)


def _front(counts: Iterable[tuple[float, ...]], slices: int) -> tuple[tuple[float, ...], ...]:
    """Returns the counts that no others exceed everywhere, in micro-batches."""
    front = list[tuple[float, ...]]()
    for one in sorted(counts, reverse=True):  # a dominated one comes after the one that dominates it
        for other in reversed(front):  # most likely a neighbour
            if all(map(le, one, other)):
                break
        else:
            front.append(one)
    return tuple(tuple(n / slices for n in one) for one in front)


@dataclass(frozen=True)
class Content:
    """The part of the model on a pipeline rank, or in one stage, in blocks of each kind."""

    kinds: tuple[tuple[LayerKind, int], ...]
    embedding: bool
    head: bool
    share: float = 1.0
    """Share of the micro-batches that pass each of its stages."""
    swapped: tuple[tuple[LayerKind, int], ...] = ()
    """Those of its blocks whose activations leave the device."""

    @property
    def blocks(self) -> int:
        return sum(number for _, number in self.kinds)

    @property
    def of_kind(self) -> dict[BlockKind, int]:
        """The number of blocks of each kind, whatever they recompute."""
        counts: dict[BlockKind, int] = {}
        for kind, number in self.kinds:
            counts[kind.block] = counts.get(kind.block, 0) + number
        return counts


def contents(spec: StepSpec) -> tuple[Content, ...]:
    """Returns the contents of each pipeline rank."""
    stages, ranks = placed(spec)
    return tuple(_content(spec.model, *_options(spec.layout, stages), stages, rank.held, rank.share) for rank in ranks)


def content_of(spec: StepSpec, stages: Sequence[range], held: Sequence[int]) -> Content:
    """Returns the contents of some of the `stages`, given by their numbers in `held`."""
    return _content(spec.model, *_options(spec.layout, stages), tuple(stages), tuple(held), share=1.0)


def _options(layout: Layout, stages: Sequence[range]) -> tuple[str, tuple[range, ...]]:
    """Returns recomputation as the layout states it, and the layers of each stage whose activations it offloads."""
    if not derived.is_offloaded(layout, "activations"):
        return derived.written(layout), (range(0),) * len(stages)
    return derived.written(layout), tuple(derived.offloaded_layers(layout, stage) for stage in stages)


@lru_cache(10_000)
def _content(
    model: ModelConfig,
    recomputes: str,
    away: tuple[range, ...],
    stages: tuple[range, ...],
    held: tuple[int, ...],
    share: float,
) -> Content:
    every = layer_kinds(model, recomputes)
    kinds, swapped = (
        tuple(sorted(Counter(every[layer] for stage in held for layer in layers[stage]).items()))
        for layers in (stages, away)
    )
    return Content(kinds, 0 in held, len(stages) - 1 in held, share, swapped)


def placed(spec: StepSpec) -> tuple[tuple[range, ...], tuple[Flight, ...]]:
    """Returns the layers of every stage, and the stages and micro-batches in flight of every rank. Raises JobError if
    pp_cut or the schedule does not fit."""
    ranks = flights(spec.layout, spec.batch.accumulation)
    return stages_of_case(spec, ranks[0].stages), ranks


def stages_of_case(spec: StepSpec, stages: int) -> tuple[range, ...]:
    """Returns the layers of each of `stages` stages: `spec.stages`, else those of `layout.pp_cut`, else as even as
    possible. Raises JobError if pp_cut does not fit."""
    return spec.stages or _cut(
        spec.layout.pp_cut if spec.layout.pp > 1 else "", stages, spec.model.n_layers, spec.model.together
    )


@lru_cache(1024)
def _cut(text: str, stages: int, layers: int, together: int) -> tuple[range, ...]:
    return derived.written_stages(text, stages, layers, together) if text else derived.even(layers, stages, together)
