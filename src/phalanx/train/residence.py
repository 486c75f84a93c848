"""Where an optimizer's state lives and its update runs: on the device, or on the host (ZeRO-Offload).

Offloaded, fp32 (or fp64) copies of the parameters and the optimizer's own tensors are in host memory (Ren et al. 2021,
section 4). Gradients come down as soon as they are final, the host's processors update part after part, and the new
parameters of one part go up while the next is updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from phalanx.parallel.offload import Host, on_host
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.precision import needs_master_weights
from phalanx.train.optimizers.rule import one_pass_of

PART_BYTES = 64 * 2**20
"""Bytes of master weights that the host updates before their parameters go up: small enough that the last part's copy,
which nothing hides, is short; large enough for many threads."""


class OnDevice:
    """State beside the parameters."""

    def memory(self) -> AbstractContextManager[None]:
        """Returns the context in which the optimizer's tensors are made."""
        return nullcontext()

    def master(self, shard: ParameterShard) -> Tensor:
        """Returns the tensor that the optimizer updates for a shard: a leaf, in its precision."""
        value = shard.value
        return value.detach().float().requires_grad_() if needs_master_weights(value.dtype) else value

    def kept(self, shard: ParameterShard) -> Mapping[str, Tensor]:
        """Returns the tensors that this residence keeps for a shard's state, by kind; none if the optimizer makes
        them."""
        return {}

    @property
    def moved(self) -> Mapping[str, int]:
        """Bytes read from and written to files so far; nothing if there are none."""
        return {}

    def settle(self) -> None:
        """Waits until gradients are where the optimizer is."""

    def update(self, rule: torch.optim.Optimizer, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        """Updates the masters of shards that have gradients, and then the shards."""
        step(rule, {master: shard.value.detach() for shard, master in pairs if master is not shard.value})

    def write(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        """Copies masters to their shards, where they are copies."""
        for shard, master in pairs:
            if master is not shard.value:
                shard.value.copy_(master)


class OnHost(OnDevice):
    """State in host memory; with `beside` the parameters are there, too."""

    def __init__(self, host: Host, *, beside: bool = False):
        self.host, self.beside = host, beside
        self.incoming: dict[str, Tensor] = {}
        """By shard, host memory for its gradient, in the gradient's type."""
        self.outgoing: dict[str, Tensor] = {}
        """By shard, host memory for the updated parameters in their own type, where masters have another."""

    def memory(self) -> AbstractContextManager[None]:
        return on_host()

    def master(self, shard: ParameterShard) -> Tensor:
        if self.beside:
            with on_host():
                return super().master(shard)
        value = shard.value.detach()
        master = self.host.empty(value, torch.promote_types(value.dtype, torch.float32))
        with on_host():
            return master.copy_(value).requires_grad_()

    def move(self, shard: ParameterShard, gradient: Tensor) -> Tensor:
        """Starts copying a shard's final gradient to host memory, and returns the copy."""
        if self.beside and gradient.device.type != self.host.device.type:
            self.host.copied.down += gradient.nbytes  # FSDP2 has copied it
            return gradient
        if shard.name not in self.incoming:
            self.incoming[shard.name] = self.host.empty(gradient)
        self.host.down(gradient, self.incoming[shard.name])
        return self.incoming[shard.name]

    def settle(self) -> None:
        self.host.settle()

    def update(self, rule: torch.optim.Optimizer, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        gradients = [master.grad for _, master in pairs]
        for _, master in pairs:
            master.grad = None
        for part in parts([master.nbytes for _, master in pairs]):
            for number in part:
                pairs[number][1].grad = gradients[number]
            updated = [pairs[number] for number in part]
            with on_host():
                step(
                    rule,
                    {master: copy for shard, master in updated if (copy := self.copy_of(shard, master)) is not None},
                )
            self.send(updated)
            for number in part:
                pairs[number][1].grad = None  # the rule leaves masters without a gradient as they are
        self.host.join()

    def copy_of(self, shard: ParameterShard, master: Tensor) -> Tensor | None:
        """Returns the host memory for a shard's updated parameters in their own type; None if it is the master's."""
        if self.beside:
            return None if master is shard.value else shard.value.detach()
        return None if master.dtype == shard.value.dtype else self._outgoing(shard)

    def write(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        for shard, master in pairs:
            if (copy := self.copy_of(shard, master)) is not None:
                copy.copy_(master.detach())
        self.send(pairs)

    def send(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        """Starts copying updated parameters to the device."""
        if self.beside:
            return
        for shard, master in pairs:
            copy = self.copy_of(shard, master)
            self.host.up(master.detach() if copy is None else copy, shard.value.detach())

    def _outgoing(self, shard: ParameterShard) -> Tensor:
        """Returns host memory for a shard's parameters: its gradient's, which the update has read, if the type fits."""
        incoming = self.incoming.get(shard.name)
        if incoming is not None and incoming.dtype == shard.value.dtype:
            return incoming
        if shard.name not in self.outgoing:
            self.outgoing[shard.name] = self.host.empty(shard.value)
        return self.outgoing[shard.name]


@torch.no_grad()
def step(rule: torch.optim.Optimizer, copies: dict[Tensor, Tensor]) -> None:
    """Runs a rule, and writes masters to their `copies`: in the same pass over memory where the rule can."""
    one_pass = one_pass_of(rule)
    if one_pass is not None:
        one_pass.copies = copies
    rule.step()
    while copies:
        master, copy = copies.popitem()
        copy.copy_(master)


def parts(sizes: Sequence[int]) -> Iterator[range]:
    """Yields consecutive runs of tensors, each but the last of at least PART_BYTES, from their sizes in bytes."""
    first = total = 0
    for number, size in enumerate(sizes):
        total += size
        if total >= PART_BYTES or number == len(sizes) - 1:
            yield range(first, number + 1)
            first, total = number + 1, 0
