"""torchtitan's own Llama under its FSDP2, from the installed wheel (benchmarks/gpu/torchtitan_llama.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_norm_

from benchmarks.gpu import torchtitan_llama
from benchmarks.peers import harness


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    harness.require_present(torchtitan_llama.missing())
    job = harness.load(options.job, *harness.LLAMA)
    dist.init_process_group("gloo")
    m = job.model
    model = torchtitan_llama.model(m.d_model, m.n_layers, m.n_heads, m.kv_heads, m.ff_size, m.vocab_size, m.seq_len)
    torchtitan_llama.shard(model, init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), torch.float32)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(enable=True)  # gloo has no sum that multiplies before
    optimizer = harness.adamw(model, job)
    step = harness.plain_step(model, optimizer, lambda: clip_grad_norm_(model.parameters(), job.optimizer.clip))
    harness.measure(lambda tokens, targets: step(tokens.contiguous(), targets), job, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
