"""DeepSpeed's ZeRO, `--stage` 1, 2 or 3, around the same AdamW: its own CPUAdam would be another optimizer kernel."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

import deepspeed
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import harness


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    job = harness.load(options.job)
    deepspeed.init_distributed(dist_backend="gloo")
    model = harness.build(job)
    if options.stage == 3:  # the tied head uses a parameter that belongs to another module
        deepspeed.zero.register_external_parameter(model.head, model.embed.weight)
    config = {
        "train_micro_batch_size_per_gpu": job.layout.micro_batch,
        "gradient_clipping": job.optimizer.clip,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=harness.adamw(model, job), config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = harness.loss_of(engine, tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    harness.measure(step, job, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
