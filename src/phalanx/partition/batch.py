"""The batch equation, in one place: global batch = micro-batch × accumulation × data ranks."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.layout import Layout

DEFAULT_GLOBAL_BATCH = 16
"""Default sequences per step: independent of the layout, so that the loss curve is too."""


@dataclass(frozen=True)
class Batch:
    """The batch of one optimizer step, in sequences: global, micro-batch, accumulation and data ranks."""

    global_batch: int
    micro_batch: int
    accumulation: int
    data_ranks: int

    def equation(self) -> str:
        return (
            f"global batch {self.global_batch} = micro-batch {self.micro_batch} × accumulation {self.accumulation}"
            f" × data ranks {self.data_ranks}"
        )


def solve(global_batch: int, layout: Layout) -> Batch:
    """Solves the batch equation for the fields that are open (0).

    If both the micro-batch and the accumulation are open, the micro-batch is all of a data rank's sequences. In a
    pipeline that would leave all ranks but one idle, so it gets the smallest accumulation that is at least 2 × pp and
    divides those sequences, or, if there is none, micro-batches of one sequence.

    Raises ValueError with the equation, its values and the nearest legal global batches if they disagree.
    """
    ranks = layout.data_ranks
    micro, accumulation = layout.micro_batch, layout.accumulation
    if not global_batch and not micro:
        global_batch = DEFAULT_GLOBAL_BATCH
    if not global_batch:
        return Batch(micro * (accumulation or 1) * ranks, micro, accumulation or 1, ranks)
    known = ranks * (micro or 1) * (accumulation or 1)
    if global_batch % known or (micro and accumulation and global_batch != known):
        raise ValueError(_disagreement(global_batch, layout, known))
    rest = global_batch // known
    if not micro and not accumulation:
        accumulation = _filling_accumulation(layout.pp, rest)
        return Batch(global_batch, rest // accumulation, accumulation, ranks)
    return Batch(global_batch, micro or rest, accumulation or rest, ranks)


def _filling_accumulation(pp: int, sequences: int) -> int:
    """Returns the accumulation that keeps a pipeline busy, for a data rank with `sequences` sequences."""
    if pp == 1:
        return 1
    return next((n for n in range(2 * pp, sequences) if sequences % n == 0), sequences)


def _disagreement(global_batch: int, layout: Layout, known: int) -> str:
    micro = f"micro_batch {layout.micro_batch}" if layout.micro_batch else "micro_batch ?"
    accumulation = f"accumulation {layout.accumulation}" if layout.accumulation else "accumulation ?"
    ranks = f"data ranks {layout.data_ranks} (dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard})"
    if layout.micro_batch and layout.accumulation:
        legal = f"global_batch {known} agrees"
    else:
        below = global_batch // known * known
        legal = f"nearest legal global_batch: {f'{below} or ' if below else ''}{below + known}"
    return f"global_batch {global_batch} ≠ {micro} × {accumulation} × {ranks}: {legal}"
