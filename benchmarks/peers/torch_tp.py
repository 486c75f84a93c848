"""torch's parallelize_module: tensor parallel, with `--sequence` also sequence parallel.

The plan is the usual one (columns, then rows), as fast as it can be written: the common input of attention's three
projections is prepared once, so that the backward pass reduces its gradient once, and embedding and head stay whole,
because 65 tokens are too few to pay for the communication of cutting them.
"""

from __future__ import annotations

from inspect import signature

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

from benchmarks.peers import harness
from phalanx.config.job import Job
from phalanx.model.transformer import Block, Transformer


def cut(model: Transformer, ranks: int, sequence: bool) -> None:
    """Cuts `model` over the ranks. Activations between modules are plain local tensors."""
    mesh = init_device_mesh("cpu", (ranks,))
    outside = Shard(1) if sequence else Replicate()
    block = next(iter(model.blocks.values()))
    assert isinstance(block, Block), "a Transformer's blocks"
    plan: dict[str, ParallelStyle] = {
        "attn": _enter(block.attn, outside, Replicate()),
        "attn.wq": ColwiseParallel(),
        "attn.wk": ColwiseParallel(),
        "attn.wv": ColwiseParallel(),
        "attn.wo": RowwiseParallel(output_layouts=outside),
        "mlp": _enter(block.mlp, outside, Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=outside),
    }
    if sequence:
        plan |= {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    if sequence:
        first = _enter(block, Replicate(), Shard(1), use_local_output=True)
        head = _enter(model.head, Shard(1), Replicate(), use_local_output=True)
        parallelize_module(model, mesh, {"blocks.0": first, "final_norm": SequenceParallel(), "head": head})


def _enter(
    module: nn.Module, before: Placement, after: Placement, use_local_output: bool = False
) -> PrepareModuleInput:
    """Redistributes a module's first input from `before` to `after`. The others stay as they are."""
    others = [None] * (len(signature(module.forward).parameters) - 1)
    return PrepareModuleInput(
        input_layouts=(before, *others), desired_input_layouts=(after, *others), use_local_output=use_local_output
    )


def clip(model: nn.Module, limit: float) -> None:
    """Clips by the norm of local parts: clip_grad_norm_ refuses DTensors beside plain tensors."""
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None, "every parameter takes part in the loss"
        if not isinstance(gradient, DTensor):
            whole.append(gradient)
        elif gradient.placements[0].is_shard():
            sharded.append(gradient.to_local())
        else:  # a norm's, summed over this rank's tokens only
            summed = gradient.redistribute(placements=[Replicate()])
            parameter.grad = summed
            whole.append(summed.to_local())
    square = get_total_norm(sharded) ** 2
    dist.all_reduce(square)
    norm = (square + get_total_norm(whole) ** 2).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in [*sharded, *whole]:
        gradient.mul_(factor)


def step_of(job: Job, sequence: bool) -> harness.Step:
    """Returns one step, on the ranks of the default group."""
    model = harness.build(job)
    cut(model, dist.get_world_size(), sequence)
    optimizer = harness.adamw(model, job)
    return harness.plain_step(model, optimizer, lambda: clip(model, job.optimizer.clip))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--sequence", action="store_true")
    options = parser.parse_args()
    job = harness.load(options.job)
    dist.init_process_group("gloo")
    harness.measure(step_of(job, options.sequence), job, options.steps, data_rank=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
