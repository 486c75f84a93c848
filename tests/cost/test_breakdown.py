"""A prediction in words."""

from __future__ import annotations

import pytest

from cost.test_step_time import spec
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import duration, memory_lines, slow_format, subject, time_lines
from phalanx.cost.prediction import predict


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(13.7, "13.70 s"), (0.1, "0.1000 s"), (123.456, "123.5 s"), (12345.6, "12,346 s"), (0.0142, "14.2 ms")],
)
def test_durations_have_as_many_digits_as_can_be_told_apart(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_bars_are_as_long_as_their_share() -> None:
    asked = spec(Layout(tp=8, pp=2, dp_shard=4, micro_batch=1), 64)
    prediction = predict(asked)
    assert subject(asked, 64) == "llama3-8b on 64 × h100-80gb (dgx-h100:8)"
    bars = {line[2:22].strip(): line.count("█") for line in time_lines(prediction)}
    for name, spent in prediction.parts.items():
        if spent > 1e-3 * prediction.step_time_s:
            assert bars[name] == pytest.approx(40 * spent / prediction.step_time_s, abs=0.6)
    whole, *parts = memory_lines(prediction)
    assert "pipeline rank" in whole
    assert whole.endswith(": fits")
    assert len(parts) == sum(1 for _, size in prediction.fullest.parts() if size)


@pytest.mark.parametrize(
    ("products", "cluster", "named"),
    [("fp32", "dgx-h100", "bf16"), ("bf16", "dgx-h100", ""), ("fp32", "dgx-v100", "fp16"), ("fp32", "tpu-v4", "bf16")],
)
def test_a_slow_number_format_is_named(products: str, cluster: str, named: str) -> None:
    said = slow_format(spec(Layout(dp_shard=8), 8, cluster=cluster, products=products))
    assert said.partition("train.precision=")[2] == named
