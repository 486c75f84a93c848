"""Steps that were measured on one device, beside their prediction from the data sheet (one_device.yaml)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.blocks.parameters import count
from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.clusters import cluster_of
from phalanx.config.job import Job
from phalanx.cost.job_spec import framework_of, step_spec
from phalanx.cost.kernels import attention_seconds
from phalanx.cost.prediction import predict, step_parts
from phalanx.cost.spec import CROWD, StepSpec
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


def test_a_node_has_the_rates_of_published_clusters() -> None:
    known = cluster_of(FACTS["cluster"]).accelerator
    one, node = spec("llama"), spec("llama", f"dp_shard={CROWD}", devices=CROWD)
    assert node.cluster.accelerator == known
    assert one.cluster.accelerator == replace(known, sustained=known.alone)
    assert one.framework.slowdown < node.framework.slowdown
    assert step_parts(one).products < step_parts(node).products


COMPUTED = ("products", "streams", "recompute", "host")
"""The parts of a step that a device computes by itself."""


@pytest.mark.parametrize("model", FACTS["models"])
@pytest.mark.parametrize("compile", [False, True])
def test_what_a_cluster_loses_grows_by_one_factor_per_doubling(model: str, compile: bool) -> None:
    """From one device to a node of eight with the same work on each: what a device computes takes the same factor
    longer at each doubling, at most a seventh, and no factor beside it; the rest is communication, and the optimizer,
    whose state the devices share."""
    worlds = [1, 2, 4, 8]
    parts = [
        step_parts(
            spec(model, f"train.compile={compile}", *([f"dp_shard={world}"] if world > 1 else []), devices=world)
        )
        for world in worlds
    ]
    for name in ("products", "streams"):
        steps = [getattr(after, name) / getattr(before, name) for before, after in pairwise(parts)]
        assert steps == pytest.approx([steps[0]] * 3, rel=0.02), name
        assert 0.85 < steps[0] < 1.18, name
    for each in parts:
        computed = sum(getattr(each, name) for name in COMPUTED)
        assert each.total == pytest.approx(computed + sum(each.exposed.values()) + each.optimizer)
    assert not parts[0].exposed
    assert [world * each.optimizer for world, each in zip(worlds, parts, strict=True)] == pytest.approx(
        [parts[0].optimizer] * 4, rel=0.25
    )


@pytest.mark.parametrize("model", FACTS["models"])
def test_without_a_cluster_s_loss_a_second_device_adds_communication_alone(model: str) -> None:
    """Of a cluster that loses nothing, one device and two differ in messages and in the optimizer's share."""
    one, two = spec(model), spec(model, "dp_shard=2", devices=2)
    lossless = replace(two, cluster=replace(two.cluster, accelerator=one.cluster.accelerator), framework=one.framework)
    first, second = step_parts(one), step_parts(lossless)
    for name in COMPUTED:
        assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-6, abs=1e-4), name
    messages, saved = sum(second.exposed.values()), first.optimizer - second.optimizer
    assert second.total == pytest.approx(first.total + messages - saved, abs=1e-4)


def test_measured_rates_have_no_slowdown() -> None:
    """What `bench` has measured is what devices reach: Phalanx adds no loss of published clusters to it."""
    asked = job("llama", f"dp_shard={CROWD}", devices=CROWD)
    calibration = asked.cluster.calibration
    compute = replace(calibration.compute, provenance=replace(calibration.compute.provenance, date="2026-11-27"))
    measured = replace(asked.cluster, calibration=replace(calibration, compute=compute))
    assert framework_of(asked).slowdown == 1.14
    assert framework_of(replace(asked, cluster=measured)).slowdown == 1


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
