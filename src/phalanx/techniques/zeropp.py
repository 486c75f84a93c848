"""ZeRO++ (Wang et al. 2023): a second copy of the parameters inside a node, and messages as codes of 8 or 4 bits."""

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
        equation = f"hpz {hpz} / ep {layout.ep} is not an integer"
    yield "layout.hpz", Misfit(equation, hpz, {"layout.hpz": legal})


def _quantised(job: Job) -> Iterator[Problem]:
    """Yields the problem of quantised messages that ZeRO-3 does not send."""
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


def _rounds(job: Job) -> Iterator[Problem]:
    """Yields why a layout that sends codes does not equal one process, with the bound of the error."""
    for name, messages in _ROUNDED.items():
        if (format := getattr(job.layout, name)) != "none":
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
    "parameters and gradients sent as codes (qwZ, qgZ)",
    "Wang et al. 2023, sections 3.1 and 3.3",
    is_on=lambda job: any(getattr(job.layout, name) != "none" for name in _ROUNDED),
    fields=("layout.quantise_weights", "layout.quantise_gradients"),
    layout_problems=_quantised,
    differs=_rounds,
    compared_without=True,
)
