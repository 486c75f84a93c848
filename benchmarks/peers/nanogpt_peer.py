"""nanoGPT's own model, one process. NANOGPT names the folder of its repository (karpathy/nanoGPT)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.gpu import nanogpt
from benchmarks.peers import harness


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    harness.require_present(nanogpt.missing())
    job = harness.load(options.job)
    dist.init_process_group("gloo")
    theirs = nanogpt.module()
    shape = {"n_layer": job.model.n_layers, "n_head": job.model.n_heads, "n_embd": job.model.d_model}
    sizes = {"block_size": job.model.seq_len, "vocab_size": job.model.vocab_size}
    model = theirs.GPT(theirs.GPTConfig(**shape, **sizes, dropout=0.0, bias=job.model.bias))
    optimizer = harness.adamw(model, job)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        _, loss = model(tokens, targets.contiguous())
        loss.backward()
        clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        return loss

    harness.measure(step, job, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
