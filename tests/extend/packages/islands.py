"""Islands: a second data axis with a period of its own. Ranks of an island sum gradients in every step, islands average
their parameters every few steps (local SGD among islands: McMahan et al. 2017; Lin et al. 2020, section 3)."""

from dataclasses import dataclass

from phalanx import extend


@dataclass(frozen=True)
class Options:
    """Islands of data-parallel ranks, which average their parameters now and then."""

    size: int = 1
    """Islands, each with whole replicas, and a part of the batch."""
    every: int = 4
    """Steps from one average to the next."""


def problems(job):
    islands = job.layout.axes.islands
    if islands.every < 1:
        yield "layout.axes.islands.every", f"must be at least 1, is {islands.every}"


def agree(axis, values):
    """Averages the parameters of all islands, in one message."""
    import torch

    mean = torch.cat([value.detach().reshape(-1) for value in values])
    axis.all_reduce(mean).wait()
    for value, part in zip(values, mean.div_(axis.size).split([value.numel() for value in values]), strict=True):
        value.copy_(part.view(value.shape))


def differs(job):
    """An average of steps is the step with the average gradient only right after each of them, for a linear rule."""
    islands = job.layout.axes.islands
    if islands.size > 1 and islands.every > 1:
        yield (
            "layout.axes.islands.every",
            f"islands train alone for {islands.every} steps, which one process does not; nearest legal: every=1",
        )
    if islands.size > 1 and (job.optimizer.name != "sgd" or job.optimizer.clip):
        yield (
            "optimizer.name",
            "an average of parameters is the step with the average gradient only where the step is linear in it; "
            "nearest legal: optimizer=sgd with clip=0",
        )


def register():
    extend.axis(
        "islands",
        extend.AxisEntry(
            "islands that average their parameters now and then",
            "Lin et al. 2020, section 3",
            cuts="samples",
            options=Options,
            problems=problems,
            every=lambda islands: max(1, islands.every),
            agree=agree,
            messages=(("all_reduce", 1.0),),
            layouts=("axes.islands.size=2,axes.islands.every=1", "axes.islands.size=2,axes.islands.every=1,tp=2"),
            differs=differs,
        ),
    )
