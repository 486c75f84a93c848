"""Published results of ZeRO-Offload, ZeRO-Infinity and ZeRO++: what this version predicts of them."""

from dataclasses import replace

import pytest

from benchmarks import published_offload as published

ROWS = list(published.rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_fits_and_comes_near_or_says_why_not(row):
    found, value = published.predicted(row)
    assert found.fits == (not row.why_not)
    low, high = row.speedup if row.against else (row.tflops, row.tflops)
    if low:
        assert low / 1.45 <= value <= high * 1.45


def test_rows_have_every_kind_of_figure():
    assert sum(row.against is not None for row in ROWS) == 6
    assert sum(row.tflops > 0 for row in ROWS) == 2


def test_thirteen_billion_parameters_fit_on_one_v100_only_with_their_optimizer_on_the_host():

    row = ROWS[0]
    assert "13B" in row.name
    alone = replace(row, layout=replace(row.layout, offload="none"))
    assert not published.predicted(alone)[0].fits
