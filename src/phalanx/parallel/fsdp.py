"""ZeRO-3 / FSDP and its hybrid form (HSDP) by torch's FSDP2: parameters are whole only while a block computes.

Zhao et al. 2023; ZeRO-3: Rajbhandari et al. 2020, section 5.3. Each block is one group, the non-block parameters
another; with `layout.tiles` each tile of a large matrix is one as well (parallel/tiling.py). A group's parameters are
all-gathered before its forward pass and, if they were resharded after it, again before its backward pass; its gradients
leave by a reduce-scatter. FSDP2's collectives go through the mesh's axes, so that they are counted, and on gloo take
the faster way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.blocks.operator import is_expert
from phalanx.comm.axis import Axis, Pending
from phalanx.config.layout import Layout
from phalanx.launch.watchdog.heartbeat import Call
from phalanx.model.experts import Experts, GroupedLinear
from phalanx.parallel import fsdp_private
from phalanx.parallel.data import GradientSum, LocalModel, Replica
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.micro import MicroTensors
from phalanx.parallel.objective import Objective
from phalanx.parallel.parameter_shards import ParameterShard, ShardGroup
from phalanx.parallel.tiling import Tile
from phalanx.parallel.zero import preceding
from phalanx.partition.matrices import row_ranges


class ShardedReplica(Replica):
    """One of the ranks over which the parameters are sharded.

    `objective`'s parameters may be on the meta device: each rank then allocates only its shards."""

    def __init__(self, model: LocalModel, sums: GradientSum, mesh: Mesh, layout: Layout, device: torch.device):
        """Shards the model; `layout` sets the prefetch depth, and whether to reshard between the passes."""
        objective, shard, replicate = model.objective, sums.shard, sums.replicate
        self.shard, self.experts, self.every_micro_batch = shard, sums.experts, sums.every_micro_batch
        self.groups = _shard(objective, mesh, replicate.size > 1, layout, sums.dtype)
        self.root = self.groups[-1]
        objective.to_empty(device=device)
        # A CPU has no streams for FSDP2 to overlap on: there collectives are asynchronous by themselves.
        defers = shard.gloo and replicate.size == 1 and not sums.every_micro_batch and sums.dtype is None
        dense = of_experts = _ReduceScatter(shard, defers, replicate)
        if sums.experts is not None:
            of_experts = _ReduceScatter(sums.experts[1], defers, replicate)
        self.scatters = {dense, of_experts}
        for group in self.groups:
            scatter = of_experts if isinstance(group, Experts) else dense
            fsdp_private.start_gathers_early(group, enabled=shard.gloo)
            group.set_custom_all_gather(_AllGather(scatter.shard))
            group.set_custom_reduce_scatter(scatter)
            if replicate.size > 1:
                # FSDP2 sums over replicas (HSDP) itself, with or without a reduce-scatter before.
                group.set_all_reduce_hook(scatter.all_reduced)
            # Plain sums: the trainer divides.
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        self.stages: dict[int, list[FSDPModule]] = {}
        blocks = objective.model.blocks
        for number, stage in (model.stages.local_stages if model.stages else {}).items():
            groups = self.stages[number] = []
            for name in reversed(stage.layers):
                modules: list[nn.Module] = [*blocks[name].modules()]
                groups += [module for module in reversed(modules) if isinstance(module, FSDPModule)]
        self.reshard = layout.reshard
        self._expect()
        super().__init__(model)

    def begin_backward(self, stage: int, *, last: bool) -> None:
        self._sum_replicas(last)
        if not self.stages:
            self.root.set_is_last_backward(last)
        for module in self.stages.get(stage, [self.root]):
            module.set_requires_gradient_sync(last or self.every_micro_batch)
            # Replicas sum their shards once, when they are complete. This call comes last, as the other sets both.
            module.set_requires_all_reduce(last)

    def _sum_replicas(self, follows: bool) -> None:
        """Tells the reduce-scatters whether FSDP2 sums their results over the replicas."""
        for scatter in self.scatters:
            scatter.all_reduce_follows = follows

    def end_backward(self, stage: int, *, last: bool) -> None:
        self._sum_replicas(last)
        for module in self.stages.get(stage, ()):
            # Deferred weight gradients arrive after autograd, and with it FSDP2, has finished.
            fsdp_private.take_in_gradients(module)
            if last or self.every_micro_batch:
                fsdp_private.fill_missing_gradients(module)
                fsdp_private.reduce_gradients(module)
                module.set_requires_gradient_sync(False)

    def collect(self) -> None:
        if self.stages:
            # Non-block parameters may belong to several stages, and are reduced after all of them.
            self._sum_replicas(True)
            self.root.set_requires_gradient_sync(True)
            self.root.set_is_last_backward(True)
            fsdp_private.take_in_gradients(self.root)
            fsdp_private.finish_backward(self.root)
            for group in self.groups:
                group.reshard()
            self._expect()
        for scatter in self.scatters:
            scatter.settle()
        for shard, (_, parameter) in zip(self.shards, self._parameters(), strict=True):
            gradient = parameter.grad
            assert isinstance(gradient, DTensor), "after the last backward pass every gradient is sharded"
            shard.gradient = gradient.to_local()

    def _expect(self) -> None:
        """Tells FSDP2 that no backward pass of a pipeline's step is its last: `collect` does the final work."""
        if self.stages:
            self.root.set_requires_gradient_sync(False)
            self.root.set_is_last_backward(False)
            self.root.set_reshard_after_backward(self.reshard)

    def observe(self, before_sum: Callable[[Tensor], None] | None) -> None:
        super().observe(before_sum)
        for scatter in self.scatters:
            scatter.before_sum = before_sum

    def loss(self, micro: MicroTensors) -> Tensor:
        loss = super().loss(micro)
        self.root.reshard()  # otherwise done in the backward pass, which is absent here
        return loss

    def _shards(self) -> list[ParameterShard]:
        shards = []
        for name, parameter in self._parameters():
            assert isinstance(parameter, DTensor), "fully_shard replaced every parameter"
            local = parameter.to_local().detach()
            # Rows are distributed as by torch.chunk: equally many per rank, the last ones fewer or none.
            rows = parameter.shape[0]
            # Not parameter.device_mesh: torch may return an equal mesh whose process groups no longer exist.
            over = self.experts[1] if self.experts and is_expert(name) else self.shard
            ranges = row_ranges(rows, parameter.numel(), over.size)
            start = ranges.of(over.rank)[0] + preceding(name, parameter.numel(), self.experts)
            shards.append(self.model.shard(name, start, local.requires_grad_()))
            shards[-1].sharing = ShardGroup(over, ranges)
        return shards


def _shard(
    objective: Objective, mesh: Mesh, hybrid: bool, layout: Layout, gradient_dtype: torch.dtype | None
) -> list[FSDPModule]:
    """Applies fully_shard to each tile, to experts cut over ranks, to each block and to the rest. Returns the groups,
    the root last."""
    assert mesh.devices is not None, "a sharded layout has a mesh"
    outer = ("dp_replicate",) if hybrid else ()
    devices = mesh.devices[*outer, "shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=gradient_dtype)
    tiles = [module for module in objective.model.modules() if isinstance(module, Tile)]
    groups: list[FSDPModule] = []
    for tile in tiles:
        group = fully_shard(tile, mesh=devices, reshard_after_forward=layout.reshard, mp_policy=policy)
        # By default FSDP2 prefetches the next group in the backward pass: two tiles at once.
        group.set_modules_to_backward_prefetch([group])
        if layout.reshard:
            # A recomputed forward pass would leave all tiles whole.
            tile.register_forward_hook(_give_up)
        groups.append(group)
    for module in objective.model.modules():
        if isinstance(module, GroupedLinear):
            # FSDP2 shards rows, here of all experts' matrices, since there may be fewer experts than ranks.
            module.weight = nn.Parameter(module.weight.detach().flatten(0, 1))
    blocks: list[list[FSDPModule]] = []
    for block in objective.model.blocks.values():
        meshes: list[tuple[nn.Module, DeviceMesh]] = [(block, devices)]
        if mesh.expert_devices is not None:
            dealt_out = mesh.expert_devices[*outer, "edp"]
            meshes = [*((module, dealt_out) for module in block.modules() if isinstance(module, Experts)), *meshes]
        blocks.append(
            [
                fully_shard(module, mesh=over, reshard_after_forward=layout.reshard, mp_policy=policy)
                for module, over in meshes
            ]
        )
    # The head is needed at once in the backward pass: it is not resharded in between.
    root = fully_shard(objective, mesh=devices, reshard_after_forward=False, mp_policy=policy)
    for number, (*_, block) in enumerate(blocks):
        after = blocks[number + 1 : number + 1 + layout.prefetch]
        before_it = blocks[max(0, number - layout.prefetch) : number][::-1]
        block.set_modules_to_forward_prefetch([group for of_block in after for group in of_block[::-1]])
        block.set_modules_to_backward_prefetch([group for of_block in before_it for group in of_block[::-1]])
    return [*groups, *(group for of_block in blocks for group in of_block), root]


def _give_up(module: nn.Module, *_: Any) -> None:
    assert isinstance(module, FSDPModule), "the hook of a tile"
    module.reshard()


class _Allocates:
    """Allocates a collective's memory through FSDP2's interface."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates, fsdp_private.AllGather):
    def __init__(self, shard: Axis):
        self.shard = shard

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        work = self.shard.all_gather(output_tensor, input_tensor)
        if async_op:
            return _Arriving(work)
        work.wait()
        return None


class _Arriving(dist.Work):
    """A collective in flight, with FSDP2's interface for waiting."""

    def __init__(self, pending: Pending):
        super().__init__()
        self.pending = pending

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.pending.wait()
        return True


class _ReduceScatter(_Allocates, fsdp_private.ReduceScatter):
    """Sends gradients. `defers`: nothing reads a group's gradient before the backward pass ends (it is not added to
    another, not cast, not reduced again), so it may arrive while the next group is computed.

    With replicas FSDP2 then makes an all-reduce of its own, which is recorded here."""

    def __init__(self, shard: Axis, defers: bool, replicate: Axis):
        self.shard, self.defers, self.replicate = shard, defers, replicate
        self.in_flight: Pending | None = None
        self.all_reduce_follows = True
        self.all_reduce: Call | None = None
        self.before_sum: Callable[[Tensor], None] | None = None
        """Gets this rank's own gradients of a group."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if self.before_sum is not None:
            self.before_sum(input_tensor)
        work = self.shard.reduce_scatter(output_tensor, input_tensor)
        if self.defers:
            self.settle()  # one at a time, since each holds a group's whole gradient
            self.in_flight = work
        else:
            work.wait()
        if self.replicate.size > 1 and self.all_reduce_follows:
            self.all_reduce = self.replicate.calls.begin("all_reduce", output_tensor, waits=True)

    def all_reduced(self, summed: Tensor) -> None:
        """Counts FSDP2's all-reduce of a group's gradients over the replicas; called after it."""
        self.replicate.count("all_reduce", summed)
        if self.all_reduce is not None:
            self.all_reduce.done()
            self.all_reduce = None

    def settle(self) -> None:
        """Waits for the last one."""
        if self.in_flight is not None:
            self.in_flight.wait()
            self.in_flight = None
