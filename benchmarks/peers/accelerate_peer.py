"""Hugging Face Accelerate: DDP, or with `--fsdp` FSDP2 of every block.

Accelerate 1.15 reads its FSDP plugin on accelerators only: on CPU processes it silently ignores the plugin and wraps
the model in DDP. The peer then fails, rather than show DDP under FSDP2's name."""

from __future__ import annotations

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import harness


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    job = harness.load(options.job)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if options.fsdp else None)
    model = harness.build(job)
    model, optimizer = accelerator.prepare(model, harness.adamw(model, job))
    harness.require(model, FSDPModule if options.fsdp else DistributedDataParallel)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = harness.loss_of(model, tokens, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        return loss

    harness.measure(step, job, options.steps)
    accelerator.end_training()


if __name__ == "__main__":
    main()
