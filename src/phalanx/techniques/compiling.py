"""torch.compile: blocks, embedding, final norm and loss as fused kernels."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.job import Job
from phalanx.techniques.technique import Effect, Problem, Technique


def compiles(job: Job, device: str = "") -> bool:
    """Returns whether blocks are compiled on a type of device; by default, on that of the job's cluster."""
    if job.train.compile != "auto":
        return job.train.compile
    return (device or job.cluster.device) != "cpu" and not refusal(job)


def compile_problems(job: Job) -> Iterator[Problem]:
    """Yields why a job that asks for it is not compiled."""
    if job.train.compile is True and (reason := refusal(job)):
        yield "train.compile", f"{reason}; nearest legal: train.compile=auto, which leaves it off"


def refusal(job: Job) -> str:
    """Returns why torch.compile does not take a job; empty if it does."""
    if job.layout.data_parallel == "threads" and job.layout.dp_replicate > 1:
        return "torch compiles in one thread at a time, and each of data_parallel=threads would make graphs of its own"
    return ""


COMPILED_PASSES, COMPILED_KERNEL_US = 0.56, 4
"""Memory-bound work over that of the eager mode (the same steps; half in torchtitan's rows), and `kernel_us`:
assumed."""
COMPILED_LOSS_TENSORS = 0, 2
"""The logits and their gradient: torch.compile fuses the loss with its cast to fp32 and saves nothing else. Measured on
a CPU in benchmarks/results/compiled_loss.md."""


def _effect(job: Job) -> Effect:
    if not compiles(job):
        return Effect()
    # The loss of a cut vocabulary communicates.
    profile = {"loss_tensors": COMPILED_LOSS_TENSORS} if job.layout.tp == 1 else {}
    if job.cluster.device == "cpu":
        return Effect(framework={"cast_bytes": 5}, profile=profile)
    return Effect(COMPILED_PASSES, framework={"cast_bytes": 5, "kernel_us": COMPILED_KERNEL_US}, profile=profile)


COMPILE = Technique(
    "blocks compiled by torch.compile",
    "Ansel et al. 2024",
    is_on=compiles,
    fields=("train.compile",),
    problems=compile_problems,
    effect=_effect,
    apply="phalanx.parallel.apply:apply_compile",
)
