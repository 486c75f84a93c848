"""The private names of torch's FSDP2 that ZeRO-3 needs, all in this file.

torch may rename them in any version, so pyproject.toml bounds torch above, and tests/parallel/test_fsdp_private.py
checks for every supported version that they are there and do what is said here. They are needed for four things:

- collectives through the mesh's axes: the base classes of custom collectives, which no public module exports, and
  all-gathers that are started without waiting on a device without streams (`_set_unshard_async_op`);
- the bytes that go up where shards are in host memory (`_to_unsharded`): on one rank there is no collective;
- codes in place of numbers (parallel/compression.py): which shares a group sends, in which order;
- a backward pass in halves: FSDP2 reduces gradients when autograd is through with a group, but those of deferred
  weights come later, so this project adds them up, starts the reduction by itself, and lets go of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api

AllGather, ReduceScatter = _fsdp_api.AllGather, _fsdp_api.ReduceScatter


def start_gathers_early(module: FSDPModule, enabled: bool) -> None:
    """Makes the all-gathers of `module`'s group asynchronous, waited for where the parameters are used."""
    module._set_unshard_async_op(enabled)


def watch_gathers(module: FSDPModule, tell: Callable[[int], None]) -> None:
    """Calls `tell` with the bytes of this rank's share whenever the parameters of `module`'s group are gathered."""
    for group in _groups(module):

        def gathered(group: Any = group, plain: Callable[[], None] = group._to_unsharded) -> None:
            tell(sum(parameter._sharded_param_data.nbytes for parameter in group.fsdp_params))
            plain()

        group._to_unsharded = gathered


def take_in_gradients(module: FSDPModule) -> None:
    """Adds gradients that did not come from autograd to FSDP2's accumulated ones, in its accumulation type: it sends
    those of a group together, so they must have one type."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def fill_missing_gradients(module: FSDPModule) -> None:
    """Gives zero gradients to parameters without one if others of the group have one.

    A split backward pass may have produced some with an earlier micro-batch; but replicas sum the shards per
    micro-batch, so these must match."""
    for group in _groups(module):
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        empty = [p for p in trained if p.unsharded_accumulated_grad is None and p._unsharded_param.grad is None]
        if len(empty) < len(trained):
            for parameter in empty:
                zeros = torch.zeros_like(parameter._unsharded_param, dtype=parameter.reduce_dtype)
                parameter.unsharded_accumulated_grad = zeros


def reduce_gradients(module: FSDPModule) -> None:
    """Starts reducing the gradients of `module`'s group over the data ranks, as the end of its backward pass would."""
    for group in _groups(module):
        group.post_backward()


def release_sent(root: FSDPModule) -> None:
    """Gives up the gradients that FSDP2 sent last and keeps until it sends others or autograd is through, once their
    sums are there."""
    context: Any = root._get_fsdp_state()._comm_ctx
    if not hasattr(context, "reduce_scatter_states"):  # torch 2.11 keeps one at most
        sent, context.reduce_scatter_state = [context.reduce_scatter_state], None
    else:
        sent, context.reduce_scatter_states = context.reduce_scatter_states, []
    for state in filter(None, sent):
        if state.event is not None:
            torch.accelerator.current_stream().wait_event(state.event)


def finish_backward(root: FSDPModule) -> None:
    """Does what FSDP2 does at the end of the last backward pass of a model: afterwards all gradients are reduced."""
    root._get_fsdp_state()._root_post_backward_final_callback()


class SentShare(NamedTuple):
    """One rank's share of a parameter, in the order in which a group sends them."""

    elements: int
    """Elements, padding included."""
    shape: torch.Size
    """Shape of the whole parameter."""
    owner: torch.nn.Module
    """The module whose parameter it is."""
    trained: bool


def sent_shares(module: FSDPModule) -> list[SentShare]:
    """Returns what `module`'s group sends of each of its parameters. Gradients are sent of those that are trained."""
    return [
        SentShare(
            each.padded_sharded_param_size.numel(),
            each._orig_size,
            each._module_info.module,
            each.sharded_param.requires_grad,
        )
        for group in _groups(module)
        for each in group.fsdp_params
    ]


def is_whole(module: FSDPModule) -> bool:
    """Returns whether the parameters of `module`'s group are gathered now."""
    return any(not group.is_sharded for group in _groups(module))


def _groups(module: FSDPModule) -> list[Any]:
    """Returns the parameter groups that `module` gathers: one, or none if it has no parameters of its own."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11 has one at most
