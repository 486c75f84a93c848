"""AdamW over a rank's parameter shards: decay groups, fp32 master weights for half precisions, clipping, state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from phalanx.config.optimizer import Optimizer
from phalanx.parallel.parameter_shards import ParameterShard, counted
from phalanx.parallel.precision import needs_master_weights

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019) on the parameter shards or on fp32 copies of them."""

    def __init__(self, shards: Sequence[ParameterShard], config: Optimizer, bias_rate: float = 0.0):
        """Groups the shards by weight decay. `bias_rate` is the change of the routers' balancing biases per step."""
        self.shards = shards
        self.before_write: Callable[[], None] = lambda: None
        """Called before parameters or moments change in a step."""
        self.config, self.bias_rate = config, bias_rate
        self.masters = {
            f.name: f.value.detach().float().requires_grad_() if needs_master_weights(f.value.dtype) else f.value
            for f in shards
        }
        self.updates = 0
        # A shard may be empty: another rank of dp_shard then updates all of that parameter.
        adams = [f for f in shards if f.value.numel() and not f.balances]
        self.biases = [self.masters[f.name] for f in shards if f.value.numel() and f.balances]
        matrices = [self.masters[f.name] for f in adams if f.decays]
        vectors = [self.masters[f.name] for f in adams if not f.decays]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(1)]}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def square_norm(self, loss_scale: float = 1.0) -> Tensor:
        """Returns the sum of squares, in fp64, of the gradients that this rank counts: over all ranks that hold
        different shards these add up to the square of the global 2-norm. Leaves the gradients unscaled and in the
        optimizer's precision."""
        self.take()
        if loss_scale != 1:
            for gradient in self._gradients():
                gradient.mul_(1 / loss_scale)
        masters = (self.masters[f.name].grad for f in counted(self.shards))
        return get_total_norm([gradient for gradient in masters if gradient is not None]).double() ** 2

    def take(self) -> None:
        """Takes the shards' gradients, in the optimizer's precision."""
        for shard in self.shards:
            master = self.masters[shard.name]
            gradient = shard.gradient
            master.grad = None if gradient is None else gradient.to(master.dtype)
            if master is not shard.value:
                shard.gradient = None  # its half-precision memory is no longer needed

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor) -> None:
        """Clips to the configured norm, updates, and clears the gradients. `norm` is the global norm."""
        self.before_write()
        # Experts with more than the mean load become less likely to be chosen (DeepSeek-V3, section 2.1.2).
        for bias in self.biases:
            if bias.grad is not None:
                bias.add_(bias.grad.sign(), alpha=-self.bias_rate)
                bias.grad = None  # it takes no part in clipping
        # Without clipping torch would multiply every gradient by one.
        if self.config.clip and norm + 1e-6 > self.config.clip:
            clip_grads_with_norm_(self.masters.values(), self.config.clip, norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.updates += 1
        self.write()
        self.clear()

    @torch.no_grad()
    def write(self) -> None:
        """Copies the master weights to the shards, where they are copies."""
        for shard in self.shards:
            if self.masters[shard.name] is not shard.value:
                shard.value.copy_(self.masters[shard.name])

    @torch.no_grad()
    def restart(self) -> None:
        """Adopts the shards' values and forgets all updates."""
        self.updates = 0
        self.adam.state.clear()
        for shard in self.shards:
            if self.masters[shard.name] is not shard.value:
                self.masters[shard.name].copy_(shard.value)

    def clear(self) -> None:
        """Discards the gradients."""
        for master in self.masters.values():
            master.grad = None

    def first_bad_gradient(self) -> int | None:
        """Returns the index of the first shard whose gradient contains a NaN or an infinity."""
        for number, shard in enumerate(self.shards):
            gradient = self.masters[shard.name].grad
            if gradient is not None and not torch.isfinite(gradient).all():
                return number
        return None

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns, by kind, then by name, tensors of the shards' shapes: the moments, and "master" where masters are
        kept. Before the first update there are no moments."""
        tensors: dict[str, dict[str, Tensor]] = {}
        if self.updates:
            tensors |= {kind: {} for kind in MOMENTS}
            for shard in self.shards:
                state = self.adam.state[self.masters[shard.name]]
                for kind in MOMENTS:
                    # An empty shard, or one without moments, gets moments of its own shape.
                    tensors[kind][shard.name] = state.get(kind, torch.zeros_like(self.masters[shard.name]))
        if any(self.masters[f.name] is not f.value for f in self.shards):
            tensors["master"] = {name: master.detach() for name, master in self.masters.items()}
        return tensors

    @torch.no_grad()
    def make_state(self, updates: int) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of state_tensors with zero moments, for a checkpoint after `updates` updates to fill."""
        self.updates = updates
        for master in self.masters.values():
            if updates and master.numel():
                moments = {kind: torch.zeros_like(master) for kind in MOMENTS}
                self.adam.state[master] = {"step": torch.tensor(float(updates), device=master.device), **moments}
        return self.state_tensors()

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]
