"""AdamW over a model's parameters: decay groups, fp32 master weights for half precisions, clipping, and its state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from phalanx.job.optimizer import Optimizer
from phalanx.parallel.precision import needs_master_weights

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """AdamW (Loshchilov & Hutter 2019) as torch fuses it, on the parameters or on fp32 copies of them."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], config: Optimizer):
        self.parameters = dict(named_parameters)
        self.config = config
        self.masters = {
            name: p.detach().float().requires_grad_() if needs_master_weights(p.dtype) else p
            for name, p in self.parameters.items()
        }
        self.updates = 0
        matrices = [p for p in self.masters.values() if p.ndim >= 2]
        vectors = [p for p in self.masters.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},  # shrinking a norm or a bias regularises nothing
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def gradient_norm(self, loss_scale: float = 1.0) -> Tensor:
        """The global 2-norm of the gradients, which it leaves unscaled and in the optimizer's precision."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None
        grads = self._gradients()
        if loss_scale != 1:
            for gradient in grads:
                gradient.mul_(1 / loss_scale)
        return get_total_norm(grads)

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor) -> None:
        """Clip to the configured norm, update, and clear the gradients. `norm` is what gradient_norm returned."""
        if self.config.clip:
            clip_grads_with_norm_(self.masters.values(), self.config.clip, norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.updates += 1
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients (DDP keeps them as views of its buckets, which it refills)."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    def first_bad_gradient(self) -> str | None:
        """Name of the first parameter whose gradient holds a NaN or an infinity."""
        for name, master in self.masters.items():
            if master.grad is not None and not torch.isfinite(master.grad).all():
                return name
        return None

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments as "exp_avg/NAME", and "master/NAME" where masters are kept. Empty before the first update."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            state = self.adam.state.get(master, {})
            tensors.update({f"{moment}/{name}": state[moment] for moment in MOMENTS if moment in state})
            if master is not self.parameters[name]:
                tensors[f"master/{name}"] = master.detach()
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Put back what state_tensors gave after `updates` updates."""
        self.updates = updates
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(tensors[f"master/{name}"])
            if updates:
                state = {moment: tensors[f"{moment}/{name}"].to(master.device).clone() for moment in MOMENTS}
                step = torch.tensor(float(updates), device=master.device)
                self.adam.state[master] = {"step": step, **state}

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.masters.values() if p.grad is not None]
