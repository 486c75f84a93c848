"""From a job to what the cost model is asked."""

from __future__ import annotations

import pytest

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.cost.job_spec import stages, step_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.errors import JobError


def job(*words: str):
    return load_words(overrides.parse(words)).job


def test_stages_are_those_that_training_cuts() -> None:
    asked = job("model=gpt2", "pp=4", "train.global_batch=16", "cluster=dgx-a100:1", "cluster.devices_per_node=4")
    found = step_spec(asked, 50257)
    assert sum(map(len, found.stages)) == 12
    assert len(found.stages[-1]) < len(found.stages[0]), "the head is worth several blocks of GPT-2"
    assert stages(asked.model, asked.layout) == found.stages


def test_precision_is_the_jobs() -> None:
    for precision, products, width in (("fp32", "fp32", 4), ("bf16", "bf16", 2), ("fp64", "fp32", 8)):
        found = step_spec(
            job("model=gpt2", f"train.precision={precision}", "cluster=dgx-a100", "dp_shard=8", "train.global_batch=8"),
            50257,
        )
        assert (found.products, found.width) == (products, width)


@pytest.mark.parametrize(("precision", "eager", "compiled"), [("bf16", 6, 4), ("fp32", 4, 8)])
def test_a_compiled_loss_saves_no_wide_logits(precision, eager, compiled) -> None:
    machine = ("cluster=dgx-a100", "cluster.devices_per_node=1")
    words = ("model=gpt2", f"train.precision={precision}", *machine, "recompute=full")
    for on, per_logit in ((False, eager), (True, compiled), ("auto", compiled)):
        asked = job(*words, "micro_batch=16", "train.global_batch=16", f"train.compile={on}")
        (memory,) = step_memory(step_spec(asked, 50257))
        assert memory.moment == "loss"
        # In fp32, with what the head's backward pass makes besides.
        assert memory.logits == pytest.approx(16 * 1024 * 50257 * per_logit, rel=0.07)


def test_nothing_known_about_the_devices() -> None:
    with pytest.raises(JobError, match="cluster=dgx-h100:8.*phalanx bench"):
        step_spec(job("model=gpt2"), 50257)


def test_nothing_known_about_the_links() -> None:
    sheet = ("name=mine", "fp32_tflops=1", "bandwidth_gbs=40")
    words = ("model=gpt2", "dp_shard=2", "cluster.device=cpu", *(f"cluster.accelerator.{each}" for each in sheet))
    with pytest.raises(JobError, match="links between them"):
        step_spec(job(*words), 50257)
