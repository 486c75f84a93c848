"""Bytes that a rank sends for an optimizer that updates whole matrices (Muon): pieces to their owners, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phalanx.blocks.parameters import weight_of
from phalanx.config.model import ModelConfig
from phalanx.cost.traffic.parameters import HeldParameter, LayerRun
from phalanx.cost.traffic.table import Table
from phalanx.optimizers.entry import is_hidden_matrix, matrix_elements
from phalanx.partition.matrices import Piece, ShardRanges, SharedMatrix, rounds, sent_elements


class Instance(NamedTuple):
    """One parameter of one layer, or one tile of it, as a rank holds it, with the ranks that share it."""

    layer: int
    """Number of the layer among those of the rank; the parameters outside the blocks have one of their own."""
    held: HeldParameter
    axis: str
    ranks: int
    rank: int
    """This rank's place among them."""
    ranges: ShardRanges


def instances_of(runs: Sequence[LayerRun]) -> list[tuple[int, HeldParameter]]:
    """Returns every parameter of a rank with the number of its layer, in the order of the module tree: `runs` have
    equal layers once."""
    layers = (run.held for run in runs for _ in range(run.times))
    return [(layer, parameter) for layer, held in enumerate(layers) for parameter in held]


def matrix_traffic(
    table: Table, instances: Iterable[Instance], model: ModelConfig, width: int, tp: int, tp_rank: int
) -> None:
    """Adds what a rank, tensor rank `tp_rank` of `tp`, sends for one update in numbers of `width` bytes."""
    groups: dict[tuple[str, int, int, int], list[Instance]] = {}
    for each in instances:
        if is_hidden_matrix(each.held.name, each.held.shape):
            # What every tensor rank holds whole does not travel between them.
            copies = each.held.copies if each.held.cut and tp > 1 else 0
            groups.setdefault((each.axis, each.ranks, each.rank, copies), []).append(each)
    for (axis, ranks, rank, copies), group in groups.items():
        matrices, between = _shared(group, model), (tp, tp_rank, copies) if copies else (1, 0, 1)
        for owners in rounds(matrices, ranks, between[0]):
            sent = sent_elements(matrices, owners, rank, *between)
            table.note(axis, "all_to_all", sent.shards * width)
            table.note("tp", "all_to_all", sent.tp * width)


def _shared(group: Iterable[Instance], model: ModelConfig) -> list[SharedMatrix]:
    """Returns the matrices of some parameters; tiles of one matrix are its pieces."""
    pieces: dict[tuple[int, str, int], list[Piece]] = {}
    for layer, held, *_, ranges in group:
        size = matrix_elements(held.name, held.shape, held.shape)
        for number, start in enumerate(range(0, ranges.elements, size)):
            pieces.setdefault((layer, held.name, number), []).append(Piece(ranges, start, start + size))
    shared = []
    for (_, name, _), parts in pieces.items():
        rows, columns = weight_of(model, name).shape[-2:]
        shared.append(SharedMatrix((rows, columns), tuple(parts)))
    return shared
