"""The optimizer of a rank's parameter shards: decay groups, fp32 master weights for half precisions, clipping, state.

What all optimizers share is here; their update rules are in train/optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.config.job import Optimizer
from phalanx.optimizers.catalogue import OPTIMIZERS, keeps_masters, state_tensors
from phalanx.optimizers.entry import MASTER, StateKind
from phalanx.parallel.parameter_shards import MatrixUpdates, ParameterShard, counted
from phalanx.train.optimizers.narrow import NarrowUpdate
from phalanx.train.optimizers.rule import CHUNK, ElementwiseRule, Groups, MatrixRule, UpdateRule, one_pass_of
from phalanx.train.residence import OnDevice, state_shapes

AfterUpdate = Callable[[ParameterShard, Tensor, int], None]
"""Changes the values, (n,) or of the shard's shape, that an update wrote for a shard, in place. The number is that of
updates so far."""


class ShardedOptimizer:
    """The job's optimizer on the parameter shards or on fp32 copies of them."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        config: Optimizer,
        bias_rate: float = 0.0,
        tp: Axis | None = None,
        residence: OnDevice | None = None,
        after_update: Sequence[AfterUpdate] = (),
        seed: int = 0,
    ):
        """Groups the shards by weight decay. `bias_rate` is the change of the routers' balancing biases per step, `tp`
        the axis of the ranks that hold the other slices, if there are any; `residence` is where the state lives,
        `after_update` what techniques do to a shard's new values, and `seed` the run's, for stochastic rounding."""
        self.shards, self.residence, self.after_update = shards, residence or OnDevice(), after_update
        self.residence.has_masters = config.master != "none"
        self.before_write: Callable[[], None] = lambda: None
        """Called before parameters or state change in a step."""
        self.config, self.bias_rate = config, bias_rate
        self.masters = {f.name: self.residence.master(f) for f in shards}
        self.keeps_masters = any(keeps_masters(config, f.value.element_size()) for f in shards)
        """True if masters hold more than the parameters, so that checkpoints need them."""
        self.updates = 0
        # A shard may be empty: another rank of dp_shard then updates all of that parameter.
        trained = [f for f in shards if f.value.numel() and not f.balances]
        self.biases = [self.masters[f.name] for f in shards if f.value.numel() and f.balances]
        groups = [
            self._group([f for f in trained if f.decays], config.weight_decay),
            self._group([f for f in trained if not f.decays], 0.0),
        ]
        # torch's optimizers refuse to have nothing to do.
        nothing: Groups = [{"params": [torch.zeros(1)], "shards": [None], "weight_decay": 0.0}]
        make_rule = OPTIMIZERS.code(config.name, "rule")
        self.rule: torch.optim.Optimizer = make_rule([group for group in groups if group["params"]] or nothing, config)
        """The update rule."""
        if config.is_narrow and isinstance(self.rule, ElementwiseRule):
            self.rule.narrow = NarrowUpdate(config, seed).update
        if isinstance(self.rule, MatrixRule):
            self.rule.connect(MatrixUpdates(shards, tp or Axis("tp")), self.masters)
        self.one_pass = one_pass_of(self.rule)
        """The part of the rule that reads gradients in their own type and scales them."""
        reads = [p for group in self.one_pass.param_groups for p in group["params"]] if self.one_pass else []
        self.in_one_pass = set(reads)
        self.unscale = 1.0
        """The factor that takes fp16's loss scale out of this step's gradients."""

    def _group(self, shards: Sequence[ParameterShard], weight_decay: float) -> dict[str, object]:
        return {
            "params": [self.masters[f.name] for f in shards],
            "shards": list(shards),
            "weight_decay": weight_decay,
        }

    @property
    def skips(self) -> bool:
        """Whether a flag on the device can keep a step from changing anything: techniques do not read it."""
        heeds = isinstance(self.rule, UpdateRule | MatrixRule) and self.rule.skips
        return heeds and type(self.residence) is OnDevice and not self.after_update

    def square_norm(self, loss_scale: float = 1.0) -> Tensor:
        """Returns the sum of squares, in fp64, of the gradients that this rank counts: over all ranks that hold
        different shards these add up to the square of the global 2-norm. The update divides by `loss_scale`."""
        self.take()
        self.unscale = 1 / loss_scale
        with self.residence.memory():
            masters = (self.masters[f.name].grad for f in counted(self.shards))
            return square_sum([gradient for gradient in masters if gradient is not None]) * self.unscale**2

    def take(self) -> None:
        """Takes the shards' gradients: in their own type where the rule reads that, else in the optimizer's."""
        self.residence.settle()
        self.unscale = 1.0
        for shard in self.shards:
            master, gradient = self.masters[shard.name], shard.gradient
            with self.residence.memory():
                if gradient is not None and master in self.in_one_pass:
                    if gradient.dtype != master.dtype:
                        master.grad_dtype = None  # any
                elif gradient is not None:
                    gradient = gradient.to(master.dtype)
            master.grad = gradient
            if master is not shard.value:
                shard.gradient = None  # the memory of what was converted is no longer needed

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, bad: Tensor | None = None) -> None:
        """Clips to the configured norm, updates, and clears the gradients. `norm` is the global norm. If the optimizer
        `skips`, nothing changes where `bad`, a flag on the device, is set."""
        self.before_write()
        # Experts with more than the mean load become less likely to be chosen (DeepSeek-V3, section 2.1.2).
        with self.residence.memory():
            for bias in self.biases:
                if bias.grad is not None:
                    sign = bias.grad.sign()
                    bias.add_(sign if bad is None else sign.where(~bad, 0), alpha=-self.bias_rate)
                    bias.grad = None  # it takes no part in clipping
            scale = self._scale(norm)
            if scale is not None:
                for master in self.masters.values():
                    if master.grad is not None and master not in self.in_one_pass:
                        master.grad.mul_(scale)
        for rule in (self.rule, self.one_pass):
            if isinstance(rule, UpdateRule | MatrixRule):
                rule.bad = bad
        if self.one_pass is not None:
            self.one_pass.scale, self.one_pass.count = scale, self.updates + 1
        for group in self.rule.param_groups:
            group["lr"] = lr
        self.residence.update(self.rule, self._pairs())
        self.updates += 1
        for change in self.after_update:
            for shard, master in self._pairs():
                if shard.value.numel():
                    change(shard, master, self.updates)
        self.clear()

    def _scale(self, norm: Tensor) -> Tensor | None:
        """Returns the factor of this step's gradients in the optimizer's precision, where its state is: clipping and
        the loss scale; None if there is neither. The host does not wait for it."""
        master = next(iter(self.masters.values()), norm)
        dtype = torch.promote_types(master.dtype, torch.float32)
        if self.config.clip:
            return ((self.config.clip / (norm + 1e-6)).clamp(max=1.0) * self.unscale).to(master.device, dtype)
        return None if self.unscale == 1 else torch.full((), self.unscale, dtype=dtype, device=master.device)

    @torch.no_grad()
    def write(self) -> None:
        """Copies the master weights to the shards, where they are copies."""
        self.residence.write(self._pairs())

    def _pairs(self) -> list[tuple[ParameterShard, Tensor]]:
        return [(shard, self.masters[shard.name]) for shard in self.shards]

    @torch.no_grad()
    def restart(self) -> None:
        """Adopts the shards' values and forgets all updates."""
        self.updates = 0
        self.rule.state.clear()
        self._adopt()

    def reload(self) -> None:
        """Adopts the shards' values that were loaded, where masters are mere copies of them."""
        if not self.keeps_masters:
            self._adopt()

    @torch.no_grad()
    def _adopt(self) -> None:
        for shard, master in self._pairs():
            if master is not shard.value:
                master.copy_(shard.value)

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

    def kinds_of(self, shard: ParameterShard) -> tuple[StateKind, ...]:
        """Returns the kinds of state of a shard, besides its master."""
        return state_tensors(self.config, shard.whole_name, shard.tensor_slice.whole)

    def state_of(self, shard: ParameterShard, kind: str) -> Tensor | None:
        """Returns a tensor of a shard's state; None before the first update, and where there is none."""
        return self.rule.state.get(self.masters[shard.name], {}).get(kind)

    @cached_property
    def kinds(self) -> dict[str, list[ParameterShard]]:
        """The shards that have a state tensor of each kind, besides masters. A tensor with one element per block has a
        shard of its own: its place in a tensor of all blocks of the whole parameter."""
        found: dict[str, list[ParameterShard]] = {}
        for shard in self.shards:
            for kind in self.kinds_of(shard):
                found.setdefault(kind.kind, []).append(shard.in_blocks(kind.block))
        return found

    def places(self, kind: str) -> Sequence[ParameterShard]:
        """Returns the shards whose tensors of a kind `state_tensors` returns."""
        return self.shards if kind == MASTER else self.kinds[kind]

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of `places`, by kind, then by the shard's name: the optimizer's own, and "master" where
        masters are kept. Before the first update there are none of its own."""
        tensors: dict[str, dict[str, Tensor]] = {}
        if self.updates:
            tensors |= {kind: {} for kind in self.kinds}
            for shard in self.shards:
                for kind in self.kinds_of(shard):
                    own = self.state_of(shard, kind.kind)
                    # An empty shard, or one that is not trained, gets state of its own size.
                    tensors[kind.kind][shard.name] = self._zeros(shard, kind.kind) if own is None else own
        if self.keeps_masters:
            tensors[MASTER] = {name: master.detach() for name, master in self.masters.items()}
        return tensors

    @torch.no_grad()
    def make_state(self, updates: int) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of state_tensors for a checkpoint after `updates` updates to fill: the optimizer's own
        are zero, or in files whatever was there."""
        self.updates = updates
        for shard in self.shards:
            master = self.masters[shard.name]
            if updates and master.numel():
                kept = self.residence.kept(shard)
                with self.residence.memory():
                    kept = kept or {kind.kind: self._zeros(shard, kind.kind) for kind in self.kinds_of(shard)}
                    self.rule.state[master] = {"step": torch.tensor(float(updates), device=master.device), **kept}
        return self.state_tensors()

    def _zeros(self, shard: ParameterShard, kind: str) -> Tensor:
        """Returns a tensor of a shard's state, of zeros: (elements / block,), or of the shard's shape."""
        master = self.masters[shard.name]
        precision = torch.promote_types(master.dtype, torch.float32)
        shape, dtype, _ = state_shapes(self.config, shard, precision)[kind]
        return torch.zeros(shape, dtype=dtype, device=master.device)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements, () in fp64, accumulated in fp32 at least: a norm rounded to bf16
    would be wrong in the third digit. On a CPU half precisions are converted part by part, in the cache."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if not tensors[0].is_cpu:
        norms = torch.ops.aten._foreach_norm.Scalar(list(tensors), 2, dtype=wide)
    else:
        split = [t.split(CHUNK["cpu"]) if t.dtype != wide else [t] for t in (t.detach().reshape(-1) for t in tensors)]
        norms = [torch.linalg.vector_norm(part.to(wide)) for parts in split for part in parts]
    return torch.stack(norms).double().square().sum()
