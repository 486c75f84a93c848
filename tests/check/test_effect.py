"""Every field has an effect in each job, or a stated condition: what is set in vain is refused by name."""

from __future__ import annotations

import pytest

from phalanx.check.effect import CONDITIONS
from phalanx.check.load import from_dict, load_words
from phalanx.check.show import as_dict
from phalanx.config.fields import leaves
from phalanx.config.overrides import parse
from phalanx.errors import JobError

SECTIONS_THAT_ALWAYS_HOLD = ("cluster", "checkpoint", "guard", "run", "train", "layout", "optimizer", "model", "data")
"""Sections whose other fields have an effect in every job, or a rule of their own in check/."""
SET = {
    "model.moe.z_loss": "10",
    "model.moe.aux_loss": "0.1",
    "model.moe.capacity": "2",
    "model.mla.q_rank": "8",
    "model.lora.alpha": "8",
    "model.rope_scaling.kind": "yarn",
    "optimizer.outer_lr": "0.5",
    "optimizer.decay_fraction": "0.5",
    "optimizer.base_batch": "8",
    "data.template": "chatml",
    "data.loss_on": "all",
    "data.packing": "true",
    "data.bpe_vocab": "300",
    "data.random_vocab": "300",
    "data.columns": "[a:b]",
}


@pytest.mark.parametrize(("path", "value"), SET.items())
def test_a_field_without_effect_is_refused_with_its_condition(path: str, value: str) -> None:
    with pytest.raises(JobError) as caught:
        load_words(parse([f"{path}={value}"]))
    assert path in str(caught.value)
    assert CONDITIONS[path][1] in str(caught.value) or "nearest legal" in str(caught.value)


def test_a_default_that_is_spelled_out_is_none() -> None:
    job = load_words(parse(["model.moe.z_loss=0", "data.packing=false", "optimizer.decay_fraction=0.2"])).job
    assert from_dict(as_dict(job), "itself") == job


@pytest.mark.parametrize("path", leaves())
def test_every_field_is_known_to_have_an_effect_or_has_a_condition(path: str) -> None:
    assert path in CONDITIONS or path.partition(".")[0] in SECTIONS_THAT_ALWAYS_HOLD
    if path in CONDITIONS:
        assert CONDITIONS[path][1].startswith(("is for", "that"))
