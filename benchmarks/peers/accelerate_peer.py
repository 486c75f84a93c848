"""Hugging Face Accelerate: DDP, or with `--fsdp` FSDP2 of every block."""

from __future__ import annotations

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import Tensor

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
