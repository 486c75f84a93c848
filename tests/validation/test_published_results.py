"""Results of papers beside the prediction of the same layout (docs/explanation/accuracy.md prints the table).

Configurations and figures: Narayanan et al. 2021 (arXiv 2104.04473), table 1; Llama Team 2024 (arXiv 2407.21783),
table 4.
"""

from __future__ import annotations

from statistics import median

import pytest
from benchmarks.published import LLAMA3, MEGATRON, Published, predicted

ROWS = [*MEGATRON, *LLAMA3]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_result_within_a_tenth(row: Published) -> None:
    assert predicted(row) == pytest.approx(row.tflops, rel=0.12)


def test_the_typical_result_within_a_twentieth() -> None:
    assert median(abs(predicted(row) / row.tflops - 1) for row in MEGATRON) < 0.06
