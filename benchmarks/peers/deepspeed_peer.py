"""DeepSpeed's ZeRO, `--stage` 1, 2 or 3, around the same AdamW: its own CPUAdam would be another optimizer kernel.

With `--offload optimizer`, ZeRO-Offload: optimizer state on the host, updated by DeepSpeed's CPUAdam; `--offload all`
keeps the parameters there as well (stage 3)."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

from benchmarks.peers import harness


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--offload", choices=("none", "optimizer", "all"), default="none")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    job = harness.load(options.job)
    deepspeed.init_distributed(dist_backend="gloo")
    model = harness.build(job)
    if options.stage == 3:  # the tied head uses a parameter that belongs to another module
        deepspeed.zero.register_external_parameter(model.head, model.embed.weight)
    zero: dict[str, Any] = {"stage": options.stage}
    optimizer = harness.adamw(model, job)
    if options.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
        settings = {"lr": job.optimizer.lr, "betas": job.optimizer.betas, "eps": job.optimizer.eps}
        optimizer = DeepSpeedCPUAdam(optimizer.param_groups, **settings, adamw_mode=True)
    if options.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": job.layout.micro_batch,
        "gradient_clipping": job.optimizer.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = harness.loss_of(engine, tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    harness.measure(step, job, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
