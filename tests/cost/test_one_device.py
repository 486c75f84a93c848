"""Steps that were measured on one device, beside their prediction from the data sheet (one_device.yaml)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.blocks.parameters import count
from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.clusters import cluster_of
from phalanx.config.job import Job
from phalanx.cost.job_spec import step_spec
from phalanx.cost.kernels import attention_seconds
from phalanx.cost.prediction import predict, step_parts
from phalanx.cost.spec import StepSpec
from phalanx.plan.space import plan_request

FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("one_device.yaml").read_text(encoding="utf-8"))
WITHIN = 0.08


def job(model: str, *more: str, devices: int = 1) -> Job:
    words = FACTS["models"][model].split()
    batch = int(words[-1].removeprefix("micro_batch="))
    machine = f"cluster={FACTS['cluster']}", f"cluster.devices_per_node={devices}"
    return load_words(
        overrides.parse([*words, *machine, "train.precision=bf16", f"train.global_batch={batch * devices}", *more])
    ).job


def spec(model: str, *more: str, devices: int = 1) -> StepSpec:
    asked = job(model, *more, devices=devices)
    return step_spec(asked, asked.model.vocab_size)


def as_measured(of: StepSpec) -> float:
    """Returns the milliseconds of a step with the update that the measured program had."""
    parts, update = step_parts(of), FACTS["update"]
    return 1e3 * (parts.total - parts.optimizer) + update["then"] * count(of.model) / update["parameters"]


@pytest.mark.parametrize("step", FACTS["steps"], ids=lambda step: f"{step['model']}, {step['ms']} ms")
def test_a_measured_step_is_predicted_from_the_data_sheet(step: dict[str, Any]) -> None:
    eager, compiled = (as_measured(spec(step["model"], f"train.compile={on}")) for on in (False, True))
    predicted = step["compiled"] * compiled + (1 - step["compiled"]) * eager
    assert predicted == pytest.approx(step["ms"], rel=WITHIN)


def test_the_update_is_predicted_from_the_bytes_it_moves() -> None:
    assert count(spec("llama").model) == FACTS["update"]["parameters"]
    assert 1e3 * step_parts(spec("llama")).optimizer == pytest.approx(FACTS["update"]["now"], rel=WITHIN)


@pytest.mark.parametrize("kernels", FACTS["kernels"], ids=lambda kernels: kernels["model"])
def test_attention_and_products_are_predicted_by_kernel(kernels: dict[str, Any]) -> None:
    of = spec(kernels["model"])
    model, sequences = of.model, of.batch.global_batch
    heads = sequences * model.n_heads, sequences * model.kv_heads, model.head_size, model.head_size
    attention = model.n_layers * sum(
        attention_seconds(
            *(of.cluster.accelerator, "bf16", model.seq_len, model.seq_len, *heads), backward=back, kernel="cudnn"
        )
        for back in (False, True)
    )
    assert of.framework.flash == "cudnn"
    assert 1e3 * attention == pytest.approx(kernels["attention"], rel=WITHIN)
    # A mixture's factor (Framework.moe_slowdown) is on all kernels of its blocks.
    products = predict(replace(of, framework=replace(of.framework, moe_slowdown=1.0))).parts.products - attention
    assert 1e3 * products == pytest.approx(kernels["products"], rel=WITHIN)


def test_several_devices_have_the_rates_of_published_clusters() -> None:
    known = cluster_of(FACTS["cluster"]).accelerator
    one, two = spec("llama"), spec("llama", "dp_shard=2", devices=2)
    assert two.cluster.accelerator == known
    assert one.cluster.accelerator == replace(known, sustained=known.alone)
    assert one.framework.slowdown < two.framework.slowdown
    assert step_parts(one).products < step_parts(two).products


@pytest.mark.parametrize("devices", [1, 2])
def test_plans_have_the_rates_of_predictions(devices: int) -> None:
    layout = ["dp_shard=2"] if devices == 2 else []
    asked = job("llama", *layout, devices=devices)
    (request,) = plan_request(asked, asked.model.vocab_size).each()
    assert (
        predict(request.spec(asked.layout)).step_time_s == predict(spec("llama", *layout, devices=devices)).step_time_s
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_compiled_blocks_move_fewer_bytes(devices: int) -> None:
    layout = ["dp_shard=2"] if devices == 2 else []
    eager, compiled = (
        step_parts(spec("llama", *layout, f"train.compile={on}", devices=devices)) for on in (False, True)
    )
    assert compiled.streams < 0.7 * eager.streams
    assert compiled.products == eager.products
