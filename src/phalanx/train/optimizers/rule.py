"""Update rules that torch does not have, or not in one pass over memory: their common loop over parameter groups.

A rule reads each gradient in the type in which it was summed, scales it while it is in the cache or in registers, and
writes the parameter's copy in its own type beside the update. No fp32 gradients exist.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from phalanx.config.job import Optimizer
from phalanx.model.layers import uncompiled
from phalanx.parallel.parameter_shards import MatrixUpdates, ParameterShard

Groups = list[dict[str, Any]]
"""torch's parameter groups. `params` are tensors in the optimizer's precision, `shards` the parameter shard of each
(its name and its place in the whole parameter), `weight_decay` the group's decay."""
CHUNK = {"cpu": 2**17}
"""Elements that are updated at a time where no compiler makes one kernel of the update: on a CPU they stay in the cache
between kernels. With a quarter as many, starting the kernels takes a quarter of the time of 8-bit AdamW."""
LARGE_CHUNK = 2**22
"""The same on other devices: it bounds the memory of temporary tensors."""
Options = dict[str, Any]
"""The options of a group, and the rate of this step."""
Tensors = list[Tensor]
Numbers = Sequence[Any] | Tensor
"""The numbers that a formula reads. A compiled kernel gets them as one tensor, other code as a list of floats."""
Formula = Callable[..., tuple[Tensor, ...]]
"""A function of weights, gradients, state, all (n,), and numbers that returns new weights and state."""


uncompiled(torch.optim.Optimizer.add_param_group.__wrapped__)  # pyrefly: ignore[missing-attribute]


class UpdateRule(torch.optim.Optimizer):
    """A torch optimizer that updates one parameter shard after the other."""

    skips: ClassVar[bool] = False
    """Whether `bad` is heeded."""
    bad: Tensor | None = None
    """A flag on the device, (): where it is set, nothing changes. None if the host has seen that the step is good."""
    scale: Tensor | None = None
    """The factor of this step's gradients: clipping and fp16's loss scale; None for 1."""
    count = 1
    """The number of this step, from 1."""

    def __init__(self, groups: Groups, defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        self.copies: dict[Tensor, Tensor] = {}
        """By parameter, the copy in another type that this step writes, too: the update takes out what it writes."""
        self.starts: dict[Tensor, int] = {}
        """By parameter, the element of its shard with which it begins, if that is not the first."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter, shard in zip(group["params"], group["shards"], strict=True):
                if parameter.grad is not None:
                    self.update(parameter, shard, group)

    @abstractmethod
    def update(self, parameter: Tensor, shard: ParameterShard, group: dict[str, Any]) -> None:
        """Updates a shard's parameter, of any shape, and self.state[parameter], chunk by chunk of `chunks`. `group` has
        the options and the rate of this step."""

    def chunks(self, unit: int, parameter: Tensor, *state: Tensor) -> Iterator[list[Tensor]]:
        """Yields flat parts of a parameter, its gradient and its state, of equally many elements, a multiple of `unit`:
        views of the same places, but the gradient scaled and in the parameter's type. When the next part is asked for,
        this one's copy in another type is written."""
        gradient = parameter.grad
        assert gradient is not None, "only such parameters are updated"
        copy = self.copies.pop(parameter, parameter)
        size = CHUNK.get(parameter.device.type, LARGE_CHUNK) // unit * unit
        converts = gradient.dtype != parameter.dtype or self.scale is not None
        wide = parameter.detach().new_empty(min(parameter.numel(), size) if converts else 0)
        whole = [each.detach().view(-1) for each in (copy, parameter, gradient.contiguous(), *state)]
        parts = [whole] if parameter.numel() <= size else zip(*(each.split(size) for each in whole), strict=True)
        for narrow, w, own, *rest in parts:
            g = wide[: len(own)].copy_(own) if converts else own
            yield [w, g if self.scale is None else g.mul_(self.scale), *rest]
            if copy is not parameter:
                narrow.copy_(w)


class ElementwiseRule(UpdateRule):
    """A rule whose elements do not depend on each other: one formula, which on a GPU is compiled to one kernel."""

    skips = True
    kinds: tuple[str, ...] = ()
    """The kinds of its state, each of the parameter's shape."""
    formula: ClassVar[Formula]
    narrow: Callable[[ElementwiseRule, Tensor, ParameterShard, Options, int], None] | None = None
    """Updates a parameter, the elements of a shard from a number on, if it or its state has fewer bits than the update
    computes with (narrow.py); None if none has."""
    has_fused: ClassVar[bool] = False
    """Whether torch has a kernel of the formula for gradients in the parameter's type, which `fused` calls."""

    @abstractmethod
    def numbers(self, group: dict[str, Any]) -> list[float]:
        """Returns what the formula reads in this step besides tensors."""

    def fused(self, weights: Tensors, gradients: Tensors, state: list[Tensors], group: Options, **flags: Any) -> None:
        """Calls torch's kernel on the weights, gradients and state (by kind) of parameters of a `group`. `flags` are
        grad_scale and found_inf as torch's kernels have them."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            together: list[tuple[Tensor, Tensor, list[Tensor]]] = []
            for parameter, shard in zip(group["params"], group["shards"], strict=True):
                if parameter.grad is None:
                    continue
                if self.narrow is not None:
                    self.narrow(self, parameter, shard, group, self.starts.pop(parameter, 0))
                elif self.has_fused and parameter not in self.copies and self._is_ready(parameter):
                    together.append((parameter.detach(), parameter.grad, self._state(parameter)))
                else:
                    self.update(parameter, shard, group)
            if together:
                weights, gradients, state = zip(*together, strict=True)
                by_kind = [list(each) for each in zip(*state, strict=True)]
                inverse = None if self.scale is None else self.scale.reciprocal()
                self.fused(list(weights), list(gradients), by_kind, group, grad_scale=inverse, **self._found())

    def update(self, parameter: Tensor, shard: ParameterShard | None, group: dict[str, Any]) -> None:
        """Updates a parameter in one pass over memory."""
        state = self._state(parameter)
        if compiles(parameter):
            assert parameter.grad is not None, "only such parameters are updated"
            tensors = [parameter, parameter.grad.contiguous(), self.copies.pop(parameter, None), *state]
            w, g, copy, *flat = (None if t is None else t.detach().view(-1) for t in tensors)
            numbers = torch.tensor(self.numbers(group), dtype=parameter.dtype, pin_memory=True).to(
                parameter.device, non_blocking=True
            )
            compiled()(type(self).formula, w, g, copy, flat, self.scale, self.bad, numbers)
            return
        for w, g, *part in self.chunks(1, parameter, *state):
            self.update_chunk(w, g, part, group)

    def update_chunk(self, w: Tensor, g: Tensor, state: list[Tensor], group: dict[str, Any]) -> None:
        """Updates weights and state (n,), which are in the cache, with gradients in the weights' type."""
        if self.has_fused:
            self.fused([w], [g], [[each] for each in state], group, grad_scale=None, **self._found())
        else:
            one_pass(type(self).formula, w, g, None, state, None, self.bad, self.numbers(group))

    def _is_ready(self, parameter: Tensor) -> bool:
        """Returns whether a fused kernel reads the gradient at once. It takes a factor in fp32 alone, and writes the
        gradients that it has scaled: on a CPU, where it is faster than chunks all the same, but not on a GPU."""
        assert parameter.grad is not None
        scales = parameter.dtype == torch.float32 and parameter.is_cpu
        return parameter.grad.dtype == parameter.dtype and (self.scale is None or scales)

    def _found(self) -> dict[str, Tensor | None]:
        return {"found_inf": None if self.bad is None else self.bad.float()}

    def _state(self, parameter: Tensor) -> list[Tensor]:
        state = self.state[parameter]
        for kind in self.kinds:
            if kind not in state:
                state[kind] = torch.zeros_like(parameter).detach()
        return [state[kind] for kind in self.kinds]


def one_pass(
    formula: Formula,
    w: Tensor,
    g: Tensor,
    copy: Tensor | None,
    state: Sequence[Tensor],
    scale: Tensor | None,
    bad: Tensor | None,
    numbers: Numbers,
) -> None:
    """Updates weights w and their state in place with gradients g times `scale`, all (n,), unless `bad` is set, and
    writes the weights to `copy`. Compiled, it reads and writes each tensor once."""
    wide = g.to(w.dtype)
    wide = wide if scale is None else wide * scale
    for old, new in zip((w, *state), formula(w, wide, *state, numbers), strict=True):
        old.copy_(new if bad is None else torch.where(bad, old, new))
    if copy is not None:
        copy.copy_(w)


def compiles(parameter: Tensor) -> bool:
    """Returns whether one kernel is made of an update of this parameter."""
    return not parameter.is_cpu and has_triton()


@cache
def compiled() -> Callable[..., None]:
    """Returns `one_pass`, compiled once for all sizes of tensors of as many dimensions."""
    return torch.compile(one_pass, dynamic=True, fullgraph=True)


@contextmanager
def undone(bad: Tensor | None, *tensors: Tensor) -> Iterator[None]:
    """Gives `tensors` back, after the block has changed them, the values that they had, where the flag `bad` is set."""
    before = [] if bad is None else [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=False):
        torch.where(bad, old, tensor, out=tensor)  # pyrefly: ignore[bad-argument-type]


class MatrixRule(torch.optim.Optimizer):
    """A torch optimizer that updates whole matrices, of which ranks have shards: granularity "matrix"."""

    skips: ClassVar[bool] = False
    """As `UpdateRule.skips`."""
    bad: Tensor | None = None
    """As `UpdateRule.bad`."""
    matrices: MatrixUpdates
    """Computes with whole matrices, each on one rank."""
    parameters: Mapping[str, Tensor]
    """The parameters of all shards, also of empty ones, by the shards' names."""
    rest: UpdateRule | None = None
    """Updates the other parameters."""

    def connect(self, matrices: MatrixUpdates, parameters: Mapping[str, Tensor]) -> None:
        """Takes both, before the first step."""
        self.matrices, self.parameters = matrices, parameters


def one_pass_of(rule: torch.optim.Optimizer) -> UpdateRule | None:
    """Returns what reads gradients in their own type: the rule or a part of it; None if it is torch's own."""
    part = rule.rest if isinstance(rule, MatrixRule) else rule
    return part if isinstance(part, UpdateRule) else None


def adamw(groups: Groups, config: Optimizer) -> AdamWRule:
    """Returns AdamW, which decays the weights by lr × weight_decay."""
    return AdamWRule(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})


def adamw_formula(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Returns new weights and moments."""
    kept, rate, root, beta1, rest1, beta2, rest2, eps = (numbers[place] for place in range(8))
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    return w * kept - rate * m / (v.sqrt() / root + eps), m, v


class AdamWRule(ElementwiseRule):
    """m ← β1 m + (1 - β1) g, v ← β2 v + (1 - β2) g², w ← (1 - lr λ) w - lr m' / (√v' + ε), where m' and v' are divided
    by 1 - β^step."""

    kinds = ("exp_avg", "exp_avg_sq")
    formula = staticmethod(adamw_formula)
    has_fused = True

    def numbers(self, group: Options) -> list[float]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        rate, root = lr / (1 - beta1**self.count), sqrt(1 - beta2**self.count)
        return [1 - lr * group["weight_decay"], rate, root, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"]]

    def fused(self, weights: Tensors, gradients: Tensors, state: list[Tensors], group: Options, **flags: Any) -> None:
        steps = [torch.full((), self.count, dtype=torch.float32, device=weights[0].device)] * len(weights)
        beta1, beta2 = group["betas"]
        numbers = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}
        torch.ops.aten._fused_adamw_.default(
            weights, gradients, *state, [], steps, **numbers, eps=group["eps"], amsgrad=False, maximize=False, **flags
        )


def sgd(groups: Groups, config: Optimizer) -> SGD:
    """Returns SGD. Its weight decay is a part of the gradient, and so of the momentum."""
    return SGD(groups, {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov})


def sgd_formula(w: Tensor, g: Tensor, *state_and_numbers: Any) -> tuple[Tensor, ...]:
    """Returns new weights and momentum, if there is one."""
    *state, numbers = state_and_numbers
    lr, decay, momentum, ahead, last = (numbers[place] for place in range(5))
    g = g + decay * w
    if not state:
        return (w - lr * g,)
    m = momentum * state[0] + g
    return w - lr * (ahead * m + last * g), m


class SGD(ElementwiseRule):
    """m ← μ m + g + λ w, w ← w - lr m; with Nesterov w ← w - lr (μ m + g + λ w), without momentum w - lr (g + λ w)."""

    formula = staticmethod(sgd_formula)
    has_fused = True

    def __init__(self, groups: Groups, defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        self.kinds = ("momentum_buffer",) if defaults["momentum"] else ()

    def numbers(self, group: Options) -> list[float]:
        momentum, nesterov = group["momentum"], group["nesterov"]
        return [group["lr"], group["weight_decay"], momentum, *((momentum, 1.0) if nesterov else (1.0, 0.0))]

    def fused(self, weights: Tensors, gradients: Tensors, state: list[Tensors], group: Options, **flags: Any) -> None:
        torch.ops.aten._fused_sgd_.default(
            weights,
            gradients,
            *(state or [[]]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,
            **flags,
        )


def lion(groups: Groups, config: Optimizer) -> Lion:
    """Returns Lion with the job's betas."""
    return Lion(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})


def lion_formula(w: Tensor, g: Tensor, m: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Returns new weights and momentum."""
    kept, lr, beta1, beta2, eps = (numbers[place] for place in range(5))
    direction = g + beta1 * (m - g)
    direction = torch.where(direction.abs() > eps, direction.sign(), 0)
    return w * kept - lr * direction, m + (1 - beta2) * (g - m)


class Lion(ElementwiseRule):
    """w ← w - lr (sign(β1 m + (1 - β1) g) + λ w), m ← β2 m + (1 - β2) g.

    Elements of the interpolation that are not above `eps` have no direction: the sign of a gradient that is zero except
    for rounding would differ from layout to layout."""

    kinds = ("exp_avg",)
    formula = staticmethod(lion_formula)

    def numbers(self, group: dict[str, Any]) -> list[float]:
        lr = group["lr"]
        return [1 - lr * group["weight_decay"], lr, *group["betas"], group["eps"]]

    def update_chunk(self, w: Tensor, g: Tensor, state: list[Tensor], group: dict[str, Any]) -> None:
        if self.bad is not None:
            super().update_chunk(w, g, state, group)
            return
        # The formula in place: a third of the kernels.
        (m,), (kept, lr, beta1, beta2, eps) = state, self.numbers(group)
        direction = torch.lerp(g, m, beta1)
        torch.hardshrink(direction, eps, out=direction).sign_()
        w.mul_(kept).add_(direction, alpha=-lr)
        m.lerp_(g, 1 - beta2)
