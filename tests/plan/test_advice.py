"""What is said about a layout that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.check.load import load_words
from phalanx.config import overrides, values
from phalanx.config.fields import leaves
from phalanx.config.layout import Layout
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.plan.page import advice, shortfall


def spec(*words: str) -> StepSpec:
    job = load_words(overrides.parse(["train.precision=bf16", "train.compile=false", *words])).job
    return step_spec(job, job.model.vocab_size or 256)


def test_a_smaller_micro_batch_comes_first_and_then_the_fastest_single_change_that_fits() -> None:
    tight = spec("model=llama3-8b", "cluster=dgx-a100:1", "dp_shard=8", "train.global_batch=16", "micro_batch=2")
    found = advice(tight)
    assert not predict(tight).fits
    assert found
    assert all(one.fits for one in found)
    nearest, *others = found
    assert nearest.change.startswith("layout.micro_batch=1")
    assert [one.step_time_s for one in others] == sorted(one.step_time_s for one in others)
    assert any("recompute=full" in one.change for one in found)


def test_what_one_change_does_not_do_several_may() -> None:
    tight = spec("model=llama3-70b", "cluster=dgx-a100:4", "dp_shard=32", "train.global_batch=64", "micro_batch=1")
    (only,) = advice(tight)
    assert only.fits
    assert " layout." in only.change


def test_the_message_says_how_much_where_and_what_would_help() -> None:
    text = shortfall(spec("model=llama3-70b", "cluster=dgx-a100:1", "pp=8", "train.global_batch=16", "micro_batch=1"))
    assert "does not fit" in text
    assert "a100-80gb" in text
    assert ", pipeline rank " in text
    assert "the largest part is" in text
    assert "layout." in text or "no setting helps" in text


def test_nothing_helps_a_model_that_is_far_too_large() -> None:
    huge = spec("model=megatron-1008b", "cluster=dgx-a100:1", "dp_shard=8", "train.global_batch=8")
    assert "fits with" not in shortfall(huge)
    assert not any(one.fits for one in advice(huge))


def test_changes_keep_devices_and_batch() -> None:
    tight = spec("model=llama3-8b", "cluster=dgx-a100:1", "dp_replicate=8", "train.global_batch=64")
    for one in advice(tight):
        words = dict(word.split("=") for word in one.change.replace("layout.", "").split())
        kinds = {name: values.convert(value, leaves(Layout)[name]) for name, value in words.items()}
        assert replace(tight.layout, **kinds).world == 8


def test_a_smaller_micro_batch_is_advised_first_and_the_largest_that_fits() -> None:
    job = load_words(
        overrides.parse(
            [
                *(
                    "model=llama2-7b",
                    "model.n_layers=8",
                    "model.seq_len=2048",
                    "cluster=dgx-a100:1",
                    "layout.dp_shard=8",
                ),
                *("layout.zero=2", "train.precision=bf16", "train.global_batch=512"),
            ]
        )
    ).job
    found = advice(step_spec(job, 32000))
    assert found[0].fits
    size = int(found[0].change.removeprefix("layout.micro_batch="))
    assert size > 1
    twice = replace(job, layout=replace(job.layout, micro_batch=2 * size))
    assert not predict(step_spec(twice, 32000)).fits


@pytest.mark.parametrize(
    "words",
    [
        "model=llama3-8b cluster=dgx-a100:1 dp_shard=8 micro_batch=16 accumulation=1",
        "model=llama3-8b cluster=dgx-a100:1 dp_shard=8 micro_batch=16",
        "model=llama3-8b cluster=dgx-a100:1 dp_shard=8 train.global_batch=136",
        "model=mixtral-8x7b cluster=dgx-a100:1 dp_shard=8 ep=8 train.global_batch=64 seq_len=4096",
        "model=llama3-70b cluster=dgx-h100:4 tp=4 pp=4 dp_shard=2 train.global_batch=64 micro_batch=4",
    ],
)
def test_a_change_that_is_given_as_it_is_printed_has_the_figures_that_stand_beside_it(words: str) -> None:
    tight = spec(*words.split())
    found = advice(tight)
    assert found
    for one in found:
        given = [word for word in words.split() if f"layout.{word.partition('=')[0]}=" not in one.change]
        after = spec(*given, *one.change.split())
        assert after.batch.global_batch == tight.batch.global_batch
        assert predict(after).fullest.peak == one.peak
