"""torch's FSDP2: fully_shard on every block, then on the whole model."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers import harness
from phalanx.config.job import Job


def step_of(job: Job) -> harness.Step:
    """Returns one step, on the ranks of the default group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = harness.build(job)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = harness.adamw(model, job)
    return harness.plain_step(model, optimizer, lambda: clip_grad_norm_(model.parameters(), job.optimizer.clip))


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    job = harness.load(options.job)
    dist.init_process_group("gloo")
    harness.measure(step_of(job), job, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
