"""The number format of training: fp8 products, fp16's loss scale, gradients in fp32, and oneDNN's products in fp32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.config import clusters
from phalanx.config.cluster import DEVICE_WORDS, Cluster
from phalanx.config.job import Job
from phalanx.config.precision import FP8_UNITS, SCALED, Precision
from phalanx.errors import JobError
from phalanx.nearest import Misfit, multiples
from phalanx.partition.derived import PARAMETER_BYTES, overlaps
from phalanx.techniques.technique import Effect, Problem, Technique, is_one_of

WORTH = 1.25
"""Least rate of products in bf16 over that in fp32 with which precision=auto is bf16: a step does other things, too."""
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def fastest_precision(cluster: Cluster) -> tuple[Precision, str]:
    """Returns what train.precision=auto is on a cluster, or, if it does not describe its devices, on this machine; and
    why."""
    described = cluster
    if not cluster.accelerator.name:
        with suppress(JobError):  # not measured
            described = clusters.read_local_partly(clusters.default_path())
    device = described.accelerator
    if device.bf16_tflops and device.fp32_tflops and cluster.device in ("auto", described.device):
        rates = f"{device.name} multiplies bf16 at {device.bf16_tflops:.3g} TFLOP/s, fp32 at {device.fp32_tflops:.3g}"
        return ("bf16" if device.bf16_tflops >= WORTH * device.fp32_tflops else "fp32"), rates
    if cluster.device in DEVICE_WORDS or (cluster.device == "auto" and os.path.exists("/dev/nvidia0")):
        return "bf16", "accelerators multiply it faster than fp32"
    information = Path("/proc/cpuinfo")
    flags = information.read_text(encoding="utf-8").split() if information.exists() else []
    found = [name for name in BF16_INSTRUCTIONS if name in flags]
    return ("bf16", f"this processor has {found[0]}") if found else ("fp32", "this processor multiplies no bf16")


def _problems(job: Job) -> Iterator[Problem]:
    """Yields what a format cannot be combined with."""
    train, device = job.train, job.cluster.accelerator
    if train.cpu_linear == "onednn" and (
        train.precision != "fp32" or train.compile is True or job.cluster.device in DEVICE_WORDS
    ):
        yield "train.cpu_linear", "onednn needs precision fp32 on a CPU, without compile; auto uses it where it can"
    if train.precision == "auto":
        chosen, why = fastest_precision(job.cluster)
        yield "train.precision", f"auto is for jobs that are loaded; nearest legal: {chosen}, {why}"
    if train.precision != "fp8":
        return
    if device.name and not device.fp8_tflops:
        yield (
            "train.precision",
            f"fp8 needs matrix products in 8 bits, and {device.name} has none (cluster.accelerator.fp8_tflops is 0); "
            "nearest legal: bf16",
        )
    unit = FP8_UNITS[train.fp8_scaling]
    if train.fp8_scaling == "mxfp8" and device.fp8_tflops and not device.fp4_tflops:
        yield (
            "train.fp8_scaling",
            f"mxfp8 needs products whose blocks of {unit} have scales (Blackwell), and {device.name} has none "
            "(cluster.accelerator.fp4_tflops is 0); nearest legal: rowwise",
        )
    if device.fp8_tflops and job.model.d_model % unit:
        yield (
            "model.d_model",
            Misfit(
                f"d_model {job.model.d_model} is not a multiple of {unit}, so that train.precision=fp8 would "
                "leave every matrix in bf16",
                job.model.d_model,
                {"model.d_model": multiples(unit, job.model.d_model)},
            ),
        )
    if job.model.lora.rank:
        yield "train.precision", "fp8 is for training whole weights, not adapters (model.lora); nearest legal: bf16"


def _layout_problems(job: Job) -> Iterator[Problem]:
    """Yields what cannot skip a step."""
    layout = job.layout
    if job.train.precision != SCALED:
        return
    if overlaps(layout):
        yield (
            "train.precision",
            f"{layout.schedule} cannot skip a step whose fp16 gradients overflow; nearest legal: precision=bf16, or "
            "schedule=1f1b",
        )
    if layout.sync != "bsp":
        yield (
            "layout.sync",
            f"{layout.sync} does not work with fp16, whose loss scale all replicas would share in every step; nearest "
            "legal: precision=bf16, or sync=bsp",
        )


def _effect(job: Job) -> Effect:
    train, framework, profile = job.train, {}, {}
    if train.precision == "fp8":
        experts = job.cluster.accelerator.fp8_experts
        framework = {
            "narrow_experts": experts,
            "narrow_unit": FP8_UNITS[train.fp8_scaling],
            "offers_fp8_gathers": experts or not job.model.moe.n_experts,
        }
    if train.gradients != "same":
        profile = {"gradient_bytes": 4, "unbuffered_gradient_bytes": PARAMETER_BYTES[train.precision]}
    return Effect(framework=framework, profile=profile)


PRECISION = Technique(
    "the number format of products, gradients and parameters",
    "Micikevicius et al. 2018 and 2022",
    is_on=lambda job: job.train.precision != "fp32",
    fields=("train.precision", "train.gradients", "train.fp8_scaling", "train.cpu_linear"),
    problems=_problems,
    layout_problems=_layout_problems,
    conditions={"train.fp8_scaling": is_one_of("train.precision", "fp8")},
    effect=_effect,
    stage="layers",
    apply="phalanx.parallel.apply:apply_number_format",
)
