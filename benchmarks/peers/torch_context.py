"""torch's ring attention (torch.distributed.tensor.experimental) in place of a model's attention.

Not started by torchrun like the other peers: benchmarks/context.py runs it in its own processes. torch's public
`context_parallel()` does not run on a CPU: ring kernels are registered for CUDA's attention operations alone, and
DTensor finds no way to split the CPU's (2.13: NotImplementedError after a search of some seconds). So the templates
under it, a private API, are called here with the CPU's flash attention, and with its load balancer's order of tokens:
the i-th chunk from the start beside the i-th from the end, which is partition/tensor_slices.py's order, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as templates
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers import harness
from phalanx.config.job import Job
from phalanx.launch.ranks import Ranks
from phalanx.model.attention import CoreAttention
from phalanx.model.seeding import Noise
from phalanx.model.transformer import Transformer

_aten = torch.ops.aten
_TOKENS = 2
"""The dimension of tokens in (batch, heads, tokens, head_size)."""


def connect(model: Transformer, rotation: str) -> None:
    """Makes the attention of `model`, which gets a part of every sequence's tokens, see those of all ranks. Keys and
    values travel by "allgather", torch's default, or by "alltoall"."""
    group = dist.group.WORLD
    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.forward = partial(_attend, group, rotation)


def step_of(job: Job, rotation: str, places: Tensor) -> Callable[[Tensor, Tensor], tuple[float, float]]:
    """Returns an optimizer step over whole sequences, (tokens, targets), to the loss and the gradient norm. This rank
    computes the tokens at `places`; the state is sharded over the same ranks by FSDP2, as torchtitan does it."""
    model = harness.build(job)
    connect(model, rotation)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = harness.adamw(model, job)

    def step(tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, places], positions=places)
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, places].flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    return step


def public_api(ranks: Ranks) -> None:
    """Runs a forward and backward pass of a few tokens through torch's `context_parallel()`."""
    mesh = init_device_mesh("cpu", (ranks.world,))
    q, k, v = (torch.randn(1, 4, 64 * ranks.world, 32) for _ in range(3))
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[_TOKENS] * 3):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def _attend(
    group: Any, rotation: str, q: Tensor, k: Tensor, v: Tensor, noise: Noise | None, documents: Tensor | None = None
) -> Tensor:
    """Computes CoreAttention, without dropout and documents."""
    assert noise is None, "torch's ring has no dropout"
    assert documents is None, "nor documents"
    return _Ring.apply(q, k, v, group, rotation)


class _Ring(torch.autograd.Function):
    """torch's templates, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, rotation: str) -> Tensor:
        _choose(rotation)
        o, lse = templates._templated_ring_attention(group, _TOKENS, _forward, q, k, v, True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.exchange = group, rotation
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        group, rotation = ctx.exchange
        _choose(rotation)
        q, k, v, o, lse = ctx.saved_tensors
        gradients = templates._templated_ring_attention_backward(
            group, _TOKENS, _backward, grad_outputs[0], "grad_out", q, k, v, o, lse, True
        )
        return *gradients, None, None


def _choose(rotation: str) -> None:
    """Sets torch's load balancing and rotation, which hold for the whole process."""
    templates.set_rotate_method(rotation)
    templates._cp_options.enable_load_balance = True


def _forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, options["is_causal"])


def _backward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    inputs = options["grad_out"], query, key, value, options["out"], options["logsumexp"]
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, options["is_causal"])
