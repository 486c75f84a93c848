"""torch's DistributedDataParallel around the model."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers import harness
from phalanx.config.job import Job


def step_of(job: Job) -> harness.Step:
    """Returns one step, on the ranks of the default group."""
    model = DistributedDataParallel(harness.build(job), gradient_as_bucket_view=True)
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
