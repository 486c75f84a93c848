"""ZeRO++ (Wang et al. 2023): a second copy of the parameters inside a node, and messages as codes of 8 or 4 bits; and
gathers in fp8."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.job import Job
from phalanx.nearest import Misfit
from phalanx.partition.derived import BLOCK, LARGEST, legal_hpz
from phalanx.techniques.technique import Problem, Technique

_ROUNDED = {"quantise_weights": "gathered parameters", "quantise_gradients": "gradients each time they are sent"}
"""Messages that a layout rounds, by the setting that sends them as codes."""


def _second_copy(job: Job) -> Iterator[Problem]:
    """Yields the problems of the ranks that keep a second copy of the parameters."""
    layout = job.layout
    hpz, ranks = layout.hpz, layout.shard_ranks
    if hpz == 1:
        return
    if layout.zero < 3:
        yield (
            "layout.hpz",
            f"hpz {hpz} copies parameters that zero=3 shards, zero is {layout.zero}; nearest legal: zero=3, or hpz=1",
        )
    elif not layout.reshard:
        yield (
            "layout.hpz",
            f"hpz {hpz} copies parameters for the gathers of the backward pass, of which reshard=false has none; "
            "nearest legal: reshard=true, or hpz=1",
        )
    legal = legal_hpz(layout)
    if hpz in legal:
        return
    if ranks % hpz:
        equation = f"dp_shard {layout.dp_shard} × cp {layout.cp} = {ranks} / hpz {hpz} is not an integer"
    elif hpz == ranks:
        equation = f"hpz {hpz} ranks are all of dp_shard {layout.dp_shard} × cp {layout.cp}, which hold a copy already"
    else:
        equation = f"hpz {hpz} / ep {layout.ep_shard}{' (ep / tp)' if layout.folds else ''} is not an integer"
    yield "layout.hpz", Misfit(equation, hpz, {"layout.hpz": legal})


def _in_fp8(job: Job) -> Iterator[Problem]:
    """Yields what is not multiplied in 8 bits and so cannot be gathered in them."""
    device = job.cluster.accelerator
    if job.layout.quantise_weights != "fp8":
        return
    if job.train.precision != "fp8":
        yield (
            "layout.quantise_weights",
            f"fp8 gathers the matrices that train.precision=fp8 multiplies in 8 bits, and precision is "
            f"{job.train.precision}; nearest legal: quantise_weights=none, or precision=fp8",
        )
    elif job.model.moe.n_experts and device.fp8_tflops and not device.fp8_experts:
        yield (
            "layout.quantise_weights",
            f"fp8 gathers what is multiplied in 8 bits, and {device.name or 'this device'} multiplies experts in bf16 "
            "(cluster.accelerator.fp8_experts is false); nearest legal: quantise_weights=none",
        )


def _layout_problems(job: Job) -> Iterator[Problem]:
    layout = job.layout
    for name in _ROUNDED:
        if (format := getattr(layout, name)) == "none":
            continue
        if layout.zero < 3 or layout.shard_ranks == 1:
            ranks = f"dp_shard {layout.dp_shard} × cp {layout.cp} = {layout.shard_ranks}"
            yield (
                f"layout.{name}",
                f"{format} is for the messages of zero=3 on several ranks, zero is {layout.zero} and {ranks}; nearest "
                f"legal: {name}=none, or zero=3 with dp_shard=2",
            )
    yield from _in_fp8(job)


def _rounds(job: Job) -> Iterator[Problem]:
    """Yields why a layout that sends codes does not equal one process, with the bound of the error."""
    for name, messages in _ROUNDED.items():
        if (format := getattr(job.layout, name)) not in ("none", "fp8"):  # fp8 rounds what its product rounds anyway
            yield (
                f"layout.{name}",
                f"{format} rounds {messages} by at most 1/{2 * LARGEST[format]} of the largest of {BLOCK}, so it "
                f"does not equal one process to verify's tolerance; nearest legal: {name}=none",
            )


SECOND_COPY = Technique(
    "a second copy of the parameters inside a node (hpZ)",
    "Wang et al. 2023, section 3.2",
    is_on=lambda job: job.layout.hpz > 1,
    fields=("layout.hpz",),
    layout_problems=_second_copy,
    layouts=("dp_shard=4,zero=3,hpz=2,accumulation=2",),
)
QUANTISATION = Technique(
    "parameters and gradients sent as codes (qwZ, qgZ) or in fp8",
    "Wang et al. 2023, sections 3.1 and 3.3",
    is_on=lambda job: any(getattr(job.layout, name) != "none" for name in _ROUNDED),
    fields=("layout.quantise_weights", "layout.quantise_gradients"),
    layout_problems=_layout_problems,
    differs=_rounds,
    compared_without=True,
)
