"""The last profiled step of a rank as a row of a timeline, for the run's report. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.train.profile.shares import Intervals, ProfiledRank, intervals_of_calls, of_step

MOST_SPANS = 600
"""Spans that are kept per rank; of more, the longest."""


def spans_of_last_step(
    record: ProfiledRank, latest: Mapping[tuple[str, int, int, int], int]
) -> list[tuple[str, float, float]]:
    """Returns part, start and duration of each span in seconds, in order; starts count from the beginning of the rank's
    step. `latest` is that of all ranks (`latest_starts`)."""
    if not record.steps:
        return []
    step = record.steps[-1]
    noted: list[tuple[str, Intervals]] = []
    of_step(record, step, intervals_of_calls(record, latest), noted)
    spans = [(name, (a - step[0]) / 1e9, (b - a) / 1e9) for name, intervals in noted for a, b in intervals]
    longest = sorted(spans, key=lambda span: -span[2])[:MOST_SPANS]
    return sorted(longest, key=lambda span: span[1])
