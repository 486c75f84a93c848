"""Stochastic rounding: parameters lie on the grid of bf16 after every update, without a copy in fp32 and without the
bias of rounding to the nearest (Gupta et al. 2015, section 3)."""

from dataclasses import dataclass
from typing import Literal

from phalanx import extend

KEPT = {"bf16": 7, "e8m10": 10}
"""Bits of the mantissa that each format keeps."""


@dataclass(frozen=True)
class Options:
    """Stochastic rounding of the parameters at every update."""

    format: Literal["none", "bf16", "e8m10"] = "none"
    """The grid: none, that of bf16, or one with three bits more (NVIDIA's TF32)."""
    embedding: bool = True
    """Whether the embedding is rounded, too."""


def is_on(job):
    return job.techniques.rounding.format != "none"


def problems(job):
    if is_on(job) and job.train.precision in ("bf16", "fp16", "fp8"):
        yield (
            "techniques.rounding.format",
            f"rounds parameters that have no copy in fp32, and precision={job.train.precision} keeps one; nearest "
            "legal: train.precision=fp32, or techniques.rounding.format=none",
        )


def effect(job):
    """Reads and writes each parameter once more, in fp32, and draws a number of 64 bits for it."""
    return extend.Effect(update=extend.UpdateCosts(moved=16, transient=16)) if is_on(job) else extend.Effect()


def update(job):
    """Makes the function that rounds a shard: with a number that is a hash of seed, step, parameter and place, so that
    every layout rounds alike."""
    import torch

    from phalanx.model.seeding import derive_seed

    options = job.techniques.rounding

    def rounded(shard, values, step):
        if shard.whole_name.startswith("embed") and not options.embedding:
            return
        places = shard.places(0, values.numel(), values.device)
        bits = places * -0x61C8864680B583EB + (derive_seed(job.train.seed, "rounding", shard.whole_name, step) - 2**63)
        bits = (bits ^ (bits >> 29 & 0x7FFFFFFFF)) * -0x40A7B892E31B1A47
        uniform = (bits >> 11 & (1 << 53) - 1).to(torch.float64) * 2.0**-53
        flat = values.detach().view(-1)
        mantissa, exponent = torch.frexp(flat.double())
        scaled = mantissa * 2.0 ** (KEPT[options.format] + 1)
        flat.copy_(torch.ldexp((scaled + uniform).floor(), exponent - KEPT[options.format] - 1))

    return rounded


def register():
    extend.technique(
        "rounding",
        extend.Technique(
            "parameters rounded stochastically at every update",
            "Gupta et al. 2015, section 3",
            is_on=is_on,
            options=Options,
            problems=problems,
            conditions={"techniques.rounding.embedding": (is_on, "is for techniques.rounding.format other than none")},
            effect=effect,
            update=update,
            layouts=("dp_shard=2,zero=3,tp=2", "pp=2,dp_shard=2,zero=1,accumulation=2"),
        ),
    )
