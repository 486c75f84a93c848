"""Interleaved 1F1B with split backward passes: weight gradients fill the bubble that more stages per rank leave."""

from phalanx import extend
from phalanx.schedule.generators import interleaved_1f1b, with_weight_passes

MOST_CHUNKS = 4


def interleaved_zb(ranks: int, micro_batches: int, chunks: int = 2) -> extend.Schedule:
    """Takes the order of interleaved 1F1B with I for B, and puts each W where its rank would wait."""
    whole = interleaved_1f1b(ranks, micro_batches, chunks)
    orders = [[action._replace(kind="I" if action.kind == "B" else "F") for action in rank] for rank in whole.programs]
    programs = with_weight_passes(orders, stages=ranks * chunks, most=(chunks + 1) * ranks)
    return extend.Schedule("interleaved_zb", whole.placements, micro_batches, programs)


def register() -> None:
    extend.schedule(
        "interleaved_zb",
        extend.ScheduleEntry(
            interleaved_zb,
            "interleaved 1f1b with split backward passes",
            "Qi et al. 2023, section 2, on Narayanan et al. 2021, section 2.2",
            in_flight=lambda p, m, v, r: (v - 1) * min(m, p) + min(m, 2 * (p - 1 - r) + 1),
            idle=lambda p, m, v, forward: (p - 1) * forward / v,
            searched=True,
            chunks=(2, MOST_CHUNKS),
            splits=True,
            also_called=("interleavedzb",),
        ),
    )
