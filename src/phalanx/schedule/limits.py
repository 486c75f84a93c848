"""How large a schedule may be. It is a list of actions in memory: what is larger is refused before it is built."""

from __future__ import annotations

MOST_STAGES = 1024
"""As many as the deepest model has layers that a job may name (check/job.py)."""
MOST_PASSES = 1 << 22
"""Forward and backward passes of a step on all ranks together: about a minute and 2 GB to build and to simulate. Llama
3's 405B takes 16,128 (16 ranks, 4 chunks, 126 micro-batches)."""


def size_problem(ranks: int, chunks: int, micro_batches: int, slices: int = 1, steps: int = 1) -> str | None:
    """What is wrong with the size of a schedule of `chunks` stages per rank, in plain words; None where it is not too
    large."""
    if ranks * chunks > MOST_STAGES:
        return f"{ranks:,} ranks × {chunks:,} stages each = {ranks * chunks:,} stages, at most {MOST_STAGES:,}"
    each = 2 * ranks * chunks * slices * steps
    if each * micro_batches > MOST_PASSES:
        return (
            f"{each * micro_batches:,} passes in a step, 2 × {ranks:,} ranks × {chunks:,} stages × {micro_batches:,} "
            f"micro-batches × {slices:,} slices × {steps:,} steps, at most {MOST_PASSES:,} can be built; nearest "
            f"legal: {max(1, MOST_PASSES // each):,} micro-batches"
        )
    return None
