"""ZeRO-3 / FSDP and its hybrid form (HSDP) by torch's FSDP2: parameters are whole only while a block computes.

Zhao et al. 2023; ZeRO-3: Rajbhandari et al. 2020, section 5.3. Each block is one group, the non-block parameters
another; with `layout.tiles` each tile of a large matrix is one as well (parallel/tiling.py). A group's parameters are
all-gathered before its forward pass and, if they were resharded after it, again before its backward pass; its gradients
leave by a reduce-scatter. FSDP2's collectives go through the mesh's axes, so that they are counted, and on gloo take
the faster way.

ZeRO++ (Wang et al. 2023). With `layout.hpz` the ranks of a node keep what the first gather of a step has brought, each
an equal part of it, and later gathers of the step stay in the node: the same numbers, to the bit. DeepSpeed does so for
gathers of the backward pass; here also those of the next micro-batch's forward pass stay, because parameters change
only after the step. With codes (qwZ) every rank computes with the same rounded parameters, also with its own share; the
second copy then consists of codes, too. The shards that the optimizer updates are never rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.blocks.operator import is_expert
from phalanx.comm.axis import Axis, Pending
from phalanx.config.layout import Layout
from phalanx.launch.watchdog.heartbeat import Call
from phalanx.model.moe import Experts, GroupedLinear
from phalanx.parallel import fsdp_private
from phalanx.parallel.compression import Codec, CodedShare, CodedSum, CompressedSum, Summand
from phalanx.parallel.data import GradientSum, LocalModel, Replica, call_when_complete
from phalanx.parallel.linear import Tile, scaled_product
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import MicroTensors, Objective
from phalanx.parallel.offload import Host, on_host
from phalanx.parallel.parameter_shards import ParameterShard, ShardGroup
from phalanx.parallel.tiling import ExpertTile
from phalanx.parallel.vocabulary import EmbeddingTile
from phalanx.parallel.zero import preceding
from phalanx.partition.derived import Format, bucket_bytes, is_copied, is_offloaded, sent_as
from phalanx.partition.matrices import row_ranges
from phalanx.partition.tensor_slices import in_buckets


class Allocates:
    """Allocates a collective's memory through FSDP2's interface."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Allocates, fsdp_private.AllGather):
    """Gathers the parameters of one group. `near` are the ranks of `shard` that keep a second copy together; None
    without one. `codec` translates a rank's shares; None sends numbers."""

    def __init__(self, shard: Axis, near: Axis | None, codec: Codec | None):
        self.shard, self.near, self.codec = shard, near, codec
        self.copy: Tensor | None = None
        """This rank's part of the second copy: what shard.size / near.size ranks sent, in rank order."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if self.near is not None and self.copy is not None:
            axis, sent = self.near, self.copy
        else:
            axis, sent = self.shard, input_tensor
            if self.codec is not None:
                sent = self.codec.encode(input_tensor.view(1, -1)).view(-1)
        whole = output_tensor if self.codec is None else sent.new_empty(axis.size * sent.numel())
        arriving = Arriving(axis.all_gather(whole, sent), lambda: self._arrived(whole, output_tensor))
        if async_op:
            return arriving
        arriving.wait()
        return None

    def drop(self) -> None:
        """Gives up the second copy: the parameters may change now."""
        self.copy = None

    def _arrived(self, whole: Tensor, numbers: Tensor) -> None:
        """Keeps a part of what all ranks have sent, and writes its numbers."""
        if self.near is not None and self.copy is None:
            self.copy = whole.view(self.near.size, -1)[self.near.rank].clone()
        if self.codec is not None:
            self.codec.decode(whole.view(self.shard.size, -1), numbers.view(self.shard.size, -1))


class Arriving(dist.Work):
    """A collective in flight, with FSDP2's interface for waiting. `then` is called once it has arrived."""

    def __init__(self, pending: Pending, then: Callable[[], None] | None = None):
        super().__init__()
        self.pending, self.then = pending, then

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.pending.wait()
        if self.then is not None:
            self.then()
            self.then = None
        return True


class ShardedReplica(Replica):
    """One of the ranks over which the parameters are sharded.

    `objective`'s parameters may be on the meta device: each rank then allocates only its shards."""

    def __init__(self, model: LocalModel, sums: GradientSum, mesh: Mesh, layout: Layout, host: Host):
        """Shards the model over the devices beside `host`; `layout` sets the prefetch depth, whether to reshard between
        the passes, and whether shards are in host memory."""
        objective, shard = model.objective, sums.shard
        # FSDP2 can only sum numbers over replicas of the mesh: other sums follow its reduce-scatters.
        by_torch = layout.compression == "none" and layout.dp_replicate > 1
        replicate = sums.replicate if by_torch else Axis("dp_replicate")
        self.least = bucket_bytes(layout)
        self.shard, self.experts, self.every_micro_batch = shard, sums.experts, sums.every_micro_batch
        self.on_host, self.device = is_offloaded(layout, "parameters"), host.device
        self.groups = _shard(objective, mesh, replicate.size > 1, layout, sums.dtype, host.device)
        self.root = self.groups[-1]
        with on_host() if self.on_host else nullcontext():
            objective.to_empty(device="cpu" if self.on_host else host.device)
        # A CPU has no streams for FSDP2 to overlap on: there collectives are asynchronous by themselves.
        defers = shard.gloo and replicate.size == 1 and not sums.every_micro_batch and sums.dtype is None
        dense = of_experts = _ReduceScatter(shard, defers, replicate)
        if sums.experts is not None:
            of_experts = _ReduceScatter(sums.experts[1], defers, replicate)
        # In one order on all ranks: awaiting a sum of codes begins its second exchange.
        self.scatters = list(dict.fromkeys((dense, of_experts)))
        self.gathers: list[Gather] = []
        near, near_experts = (mesh.axis(name) if is_copied(layout) else None for name in ("hpz", "edp_hpz"))
        of_nodes = [
            CodedSum(scatter.shard, mesh.axis(inside), mesh.axis(f"{inside}_across"))
            for scatter, inside in ((dense, "hpz"), (of_experts, "edp_hpz"))
        ]
        for group in self.groups:
            scatter = of_experts if _of_experts(group) else dense
            fsdp_private.start_gathers_early(group, enabled=shard.gloo)
            if self.on_host:
                fsdp_private.watch_gathers(group, host.copied.goes_up)
            codec = _codec(group, layout.quantise_weights, gradients=False)
            self.gathers.append(Gather(scatter.shard, near_experts if _of_experts(group) else near, codec))
            group.set_custom_all_gather(self.gathers[-1])
            codec = _codec(group, layout.quantise_gradients, gradients=True)
            coded = of_nodes[1] if _of_experts(group) else of_nodes[0]
            group.set_custom_reduce_scatter(scatter if codec is None else _CodedScatter(scatter, coded, codec))
            if replicate.size > 1:
                # FSDP2 sums over replicas (HSDP) itself, with or without a reduce-scatter before.
                group.set_all_reduce_hook(scatter.all_reduced)
            # Plain sums: the trainer divides.
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        self.stages: dict[int, list[FSDPModule]] = {}
        blocks = objective.model.blocks
        for number, stage in (model.stages.local_stages if model.stages else {}).items():
            ends = objective.model.embed if stage.first else None, objective.model.head if stage.last else None
            parts = [ends[0], *(blocks[name] for name in stage.layers), ends[1]]
            modules = [module for part in parts if part is not None for module in part.modules()]
            self.stages[number] = [module for module in reversed(modules) if isinstance(module, FSDPModule)]
        if len(self.stages) > 1:
            # As blocks without any before them: what has computed last may be another stage's.
            self.root.set_modules_to_backward_prefetch([self.root])
        self.reshard = layout.reshard
        self._expect()
        super().__init__(model)

    def gradients(self, micros: Sequence[MicroTensors], factor: float) -> Tensor:
        self._drop_copies()  # of a step that was given up
        return super().gradients(micros, factor)

    def _drop_copies(self) -> None:
        for gather in self.gathers:
            gather.drop()

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
        if self.stages:
            fsdp_private.release_sent(self.root)

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
        self._drop_copies()
        for scatter in self.scatters:
            scatter.settle()
        if self.compression is not None:
            self._sum_compressed(self.compression)
        for shard, (_, parameter) in zip(self.shards, self._parameters(), strict=True):
            gradient = parameter.grad
            if shard.frozen or shard.name in self.left:
                continue
            assert isinstance(gradient, DTensor), "after the last backward pass every gradient is sharded"
            shard.gradient = gradient.to_local()

    def _sum_compressed(self, compression: CompressedSum) -> None:
        """Sums the shards of the gradients over the replicas, a bucket at a time."""
        pairs = zip(self.shards, (parameter.grad for _, parameter in self._parameters()), strict=True)
        own = [Summand(shard, grad.to_local()) for shard, grad in pairs if isinstance(grad, DTensor)]
        for bucket in in_buckets([each.value.nbytes for each in own], self.least):
            compression.all_reduce([own[number] for number in bucket]).wait()

    def leave_early(self) -> None:
        """Lets a group's gradients leave when the next group's are sent, where these are waited for one at a time, or
        are not sent at all. On an accelerator FSDP2 copies those of parameters on the host by itself."""
        if self.on_host and self.device.type != "cpu":
            return
        parameters = dict(self._parameters())
        self.early = [(shard, parameters[shard.name]) for shard in self.shards if not shard.frozen]
        if self.shard.size == 1:
            call_when_complete((parameter for _, parameter in self.early), self._leave_arrived)
        for scatter in self.scatters:
            scatter.arrived = WeakMethod(self._leave_arrived)

    def _leave_arrived(self, _: Tensor | None = None) -> None:
        """Lets all gradients leave that FSDP2 has given to parameters by now."""
        if not self.final or self.runner is not None:
            return
        for scatter in self.scatters:  # experts that ep distributes have one of their own, which may be in flight
            scatter.settle()
        for shard, parameter in self.early:
            if isinstance(parameter.grad, DTensor) and shard.whole_name not in self.partial_names:
                self.leave(shard, parameter.grad.to_local())
                parameter.grad = None

    def release(self) -> None:
        for _, parameter in self._parameters():
            parameter.grad = None

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
        self._drop_copies()
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
    objective: Objective,
    mesh: Mesh,
    hybrid: bool,
    layout: Layout,
    gradient_dtype: torch.dtype | None,
    device: torch.device,
) -> list[FSDPModule]:
    """Applies fully_shard to each tile, to experts cut over ranks, to each block and to the rest. Returns the groups,
    the root last."""
    assert mesh.devices is not None, "a sharded layout has a mesh"
    outer = ("dp_replicate",) if hybrid else ()
    devices = mesh.devices[*outer, "shard"]
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=gradient_dtype)}
    if is_offloaded(layout, "parameters"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for module in objective.model.modules():
        if isinstance(module, GroupedLinear):
            # FSDP2 shards rows, here of all experts' matrices, since there may be fewer experts than ranks.
            rows = module.weight.detach().flatten(0, 1)
            module.weight = nn.Parameter(rows, requires_grad=module.weight.requires_grad)
    dealt_out = devices if mesh.expert_devices is None else mesh.expert_devices[*outer, "edp"]
    modules = [*objective.model.modules()]
    tiles = [(tile, dealt_out if _of_experts(tile) else devices) for tile in modules if isinstance(tile, Tile)]
    groups: list[FSDPModule] = []
    for tile, over in tiles:
        group = fully_shard(tile, mesh=over, reshard_after_forward=layout.reshard, **options)
        # By default FSDP2 prefetches the next group in the backward pass: two tiles at once.
        group.set_modules_to_backward_prefetch([group])
        # A look-up's gradient does not depend on the rows.
        group.set_unshard_in_backward(not isinstance(tile, EmbeddingTile))
        if layout.reshard:
            # A recomputed forward pass would leave all tiles whole.
            tile.register_forward_hook(_give_up)
        groups.append(group)
    blocks: list[list[FSDPModule]] = []
    for block in objective.model.blocks.values():
        meshes: list[tuple[nn.Module, DeviceMesh]] = [(block, devices)]
        if mesh.expert_devices is not None:
            meshes = [*((module, dealt_out) for module in block.modules() if isinstance(module, Experts)), *meshes]
        blocks.append(
            [fully_shard(module, mesh=over, reshard_after_forward=layout.reshard, **options) for module, over in meshes]
        )
    # The head is needed at once in the backward pass: it is not resharded in between.
    root = fully_shard(objective, mesh=devices, reshard_after_forward=False, **options)
    for number, (*inside, block) in enumerate(blocks):
        after = blocks[number + 1 : number + 1 + layout.prefetch]
        before_it = blocks[max(0, number - layout.prefetch) : number][::-1]
        block.set_modules_to_forward_prefetch([group for of_block in after for group in of_block[::-1]])
        before = [group for of_block in before_it for group in of_block[::-1]]
        # Without any, FSDP2 takes what has computed before in the forward pass: in a pipeline another stage's block,
        # which may be through with the step.
        block.set_modules_to_backward_prefetch(before or [block])
        for group in inside:
            group.set_modules_to_backward_prefetch([group])
    return [*groups, *(group for of_block in blocks for group in of_block), root]


def _of_experts(module: object) -> bool:
    """Returns whether a module is a unit of parameters that expert parallelism cuts."""
    return isinstance(module, Experts | ExpertTile)


def _codec(group: FSDPModule, format: Format, *, gradients: bool) -> Codec | None:
    """Returns the codec of what a group sends of its parameters or their gradients, None for numbers as they are."""
    if format == "none":
        return None
    shares = [each for each in fsdp_private.sent_shares(group) if each.trained or not gradients]
    parts = [
        _in_fp8(each) if format == "fp8" else CodedShare(each.elements, sent_as(each.shape, format)) for each in shares
    ]
    return None if format == "fp8" and all(part.format == "none" for part in parts) else Codec(parts)


def _in_fp8(share: fsdp_private.SentShare) -> CodedShare:
    """Returns a share of a matrix that is multiplied in 8 bits in fp8, another as it is. Elementwise products, of which
    layouts are compared, have a scale per element here, too."""
    product, (*outputs, columns) = scaled_product(share.owner), share.shape
    if product is None or not outputs:
        return CodedShare(share.elements, "none")
    experts = share.owner.experts if isinstance(share.owner, GroupedLinear) else 1
    fits = product.fits(outputs[0] // experts, columns) and (product.emulated or experts == 1 or product.grouped)
    return (
        CodedShare(share.elements, "fp8", 1 if product.elementwise else columns)
        if fits
        else CodedShare(share.elements, "none")
    )


def _give_up(module: nn.Module, *_: Any) -> None:
    assert isinstance(module, FSDPModule), "the hook of a tile"
    module.reshard()


class _ReduceScatter(Allocates, fsdp_private.ReduceScatter):
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
        self.arrived: WeakMethod[Callable[[], None]] | None = None
        """Called when all gradients that were sent earlier are there."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self.send(output_tensor, input_tensor, self.shard.reduce_scatter)

    def send(self, part: Tensor, whole: Tensor, reduce_scatter: Callable[[Tensor, Tensor], Pending]) -> None:
        """Sends a group's gradients `whole`; `part` gets this rank's part of their sum."""
        if self.before_sum is not None:
            self.before_sum(whole)
        work = reduce_scatter(part, whole)
        if self.defers:
            self.settle()  # one at a time, since each holds a group's whole gradient
            if self.arrived is not None and (tell := self.arrived()):
                tell()
            self.in_flight = work
        else:
            work.wait()
        if self.replicate.size > 1 and self.all_reduce_follows:
            self.all_reduce = self.replicate.calls.begin("all_reduce", part, waits=True)

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


class _CodedScatter(Allocates, fsdp_private.ReduceScatter):
    """Sends the gradients of one group as codes."""

    def __init__(self, scatter: _ReduceScatter, ranks: CodedSum, codec: Codec):
        self.scatter, self.ranks, self.codec = scatter, ranks, codec

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self.scatter.send(output_tensor, input_tensor, partial(self.ranks.reduce_scatter, codec=self.codec))
