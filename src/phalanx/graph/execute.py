"""Runs a plan on the very module: its parameters become DTensors in the chosen placements, its operators compute on
local tensors, and DTensor brings tensors from one form into the next, forward and backward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.axis import Ledger
from phalanx.config.job import IGNORE
from phalanx.cost.communication import Collective
from phalanx.errors import JobError
from phalanx.graph.export import CREATES, RESHAPES, TYPES, ExportedModule, export_graph, is_mean, module_of, plain
from phalanx.graph.operators import GraphOperator
from phalanx.graph.solve import GraphPlan, is_late, result_form
from phalanx.graph.strategies import Both, Form, path, places


def placements(form: Form) -> tuple[Placement, ...]:
    """Returns a form as DTensor has it."""
    return tuple(Shard(each) if isinstance(each, int) else Partial() if each == "P" else Replicate() for each in form)


class PlannedModule(nn.Module):
    """A module that computes as a plan says. `module` keeps its parameters, by their names; all ranks begin with the
    same ones. It takes whole inputs on every rank, and returns DTensors."""

    def __init__(self, module: nn.Module, exported: ExportedModule, plan: GraphPlan, mesh: DeviceMesh):
        super().__init__()
        self.module, self.exported, self.plan, self.mesh = module, exported, plan, mesh
        self.graph = plan.graph
        for node in exported.nodes.values():
            if plain(node) == "dropout" and float(cast(Any, node.args[1])) > 0 and node.args[2]:
                raise JobError(
                    f"{node.name}: a dropout differs from rank to rank; set its p to 0, or call module.eval()"
                )
        for kind, name in exported.sources.values():
            if kind == "parameter" and name in plan.chosen:
                owner, _, own = name.rpartition(".")
                parameter = module.get_parameter(name)
                form = placements(plan.chosen[name].output[0])
                whole = distribute_tensor(parameter.data, mesh, form)
                setattr(module.get_submodule(owner), own, nn.Parameter(whole, parameter.requires_grad))

    def forward(self, *args: Any) -> Any:
        values, copies = self.values(args, {})
        (output,) = (node for node in self.exported.program.graph.nodes if node.op == "output")
        found = map_arg(output.args[0], lambda node: self.result(self.exported.names[node.name], values, copies))
        return found if len(found) > 1 else found[0]

    def values(
        self, args: tuple[Any, ...], received: Mapping[str, DTensor]
    ) -> tuple[dict[str, Tensor], dict[tuple[str, Both], Tensor]]:
        """Returns the outputs of all operators of the plan's graph on this rank, and the forms they were brought into.
        A stage is given what it receives."""
        values, inputs = {name: value.to_local() for name, value in received.items()}, iter(args)
        copies = dict[tuple[str, Both], Tensor]()
        for node in self.exported.program.graph.nodes:
            if node.op == "placeholder":
                kind, name = self.exported.sources.get(node.name, ("", ""))
                given = next(inputs) if kind in ("input", "") else None
                if name in self.graph.by_name:
                    values[name] = self._cut(self._stored(kind, name) if given is None else given, name)
            elif node.name in self.exported.nodes and node.name in self.graph.by_name and node.name not in received:
                self._compute(node, values, copies)
        return values, copies

    def _stored(self, kind: str, name: str) -> Any:
        if kind == "parameter":
            return self.module.get_parameter(name)
        return self.module.get_buffer(name) if kind == "buffer" else self.exported.program.constants[name]

    def _cut(self, value: Any, name: str) -> Tensor:
        """Returns this rank's part of a parameter, or of an input that every rank has."""
        if isinstance(value, DTensor):
            return value.to_local()
        form = self.plan.chosen[name].output[0]
        for axis, place in enumerate(form):
            if isinstance(place, int):
                value = value.tensor_split(self.plan.mesh.sizes[axis], place)[self.mesh.get_local_rank(axis)]
        return value.contiguous()

    def _form(
        self, name: str, wanted: Both, values: dict[str, Tensor], copies: dict[tuple[str, Both], Tensor]
    ) -> Tensor:
        """Returns an operator's output in the wanted form. What several need in one form is brought into it once."""
        given = self.plan.chosen[name].output
        if given == wanted:
            return values[name]
        if (name, wanted) not in copies:
            each = self.graph.by_name[name]
            if wanted[1]:
                copies[name, wanted] = cast(Tensor, _Reshard.apply(values[name], self, each, given, wanted))
            else:
                copies[name, wanted] = _moved(values[name].detach(), self, each, given[0], wanted[0])
        return copies[name, wanted]

    def result(self, name: str, values: dict[str, Tensor], copies: dict[tuple[str, Both], Tensor]) -> DTensor:
        given = self.plan.chosen[name].output
        form = given if name in self.graph.consumers else result_form(given)
        local, each = self._form(name, form, values, copies), self.graph.by_name[name]
        return DTensor.from_local(
            *(local, self.mesh, placements(form[0])),
            run_check=False,
            shape=torch.Size(each.shape),
            stride=_strides(each),
        )

    def _compute(self, node: Node, values: dict[str, Tensor], copies: dict[tuple[str, Both], Tensor]) -> None:
        each, strategy = self.graph.by_name[node.name], self.plan.chosen[node.name]
        inputs = dict(zip(each.inputs, strategy.demands, strict=True))
        taken: Any = node.args[0] if plain(node) == "getitem" else node
        bias = f"{node.name}.bias"

        def local(given: Node) -> Any:
            name = self.exported.names.get(given.name, "")
            return self._form(name, inputs[name], values, copies) if name in inputs else None

        args, kwargs = map_arg(taken.args, local), map_arg(taken.kwargs, local)
        parts = places(strategy.output[0], self.plan.mesh.sizes)
        shape = [size // parts.get(dimension, 1) for dimension, size in enumerate(each.shape)]
        name, summed = plain(node), [axis for axis, letter in enumerate(strategy.split) if letter in each.summed]
        if name in RESHAPES:
            found = args[0].reshape(shape)
        elif name == "expand":
            found = args[0].expand(shape)
        elif name == "embedding":
            found = self._embedding(each, args[0], args[1])
        elif name in CREATES and not each.inputs:
            found = self._cut(cast(Any, node.target)(*args, **kwargs), node.name)
        elif name in ("conv1d", "conv2d") and len(args) > 6 and args[6] > 1:
            found = cast(Any, node.target)(
                *args[:6], args[0].shape[1] if each.terms[1][0] == each.terms[0][1] else args[6]
            )
        elif name == "getitem":
            found = cast(Any, taken.target)(*args, **kwargs)[cast(int, node.args[1])]
        elif summed and name == "cross_entropy_loss" and is_mean(taken):
            found = self._cross_entropy(taken.target, args, kwargs, summed)
        else:
            found = _pure(taken.target)(*args, **kwargs)
        if summed and is_mean(taken) and name != "cross_entropy_loss":  # that much of the whole mean
            found = found / prod(self.plan.mesh.sizes[axis] for axis in summed)
        values[node.name] = found
        if bias in self.graph.by_name:
            whole, chosen = self.graph.by_name[bias], self.plan.chosen[bias]
            product, added = (
                self._form(one, wanted, values, copies)
                for one, wanted in zip(whole.inputs, chosen.demands, strict=True)
            )
            last = len(whole.shape) - 1 - whole.output.index(whole.terms[1][0])
            values[bias] = product + added.view(-1, *(1 for _ in range(last)))

    def _cross_entropy(self, target: Any, args: Any, kwargs: Any, summed: list[int]) -> Tensor:
        """Returns this part's sum over the number of targets that count, on all ranks along the axes `summed`."""
        names = ("weight", "reduction", "ignore_index", "label_smoothing")
        more = {"ignore_index": IGNORE, **dict(zip(names, args[2:], strict=False)), **kwargs, "reduction": 2}
        total = (args[1] != more["ignore_index"]).sum().double()
        for axis in summed:
            dist.all_reduce(total, group=self.mesh.get_group(axis))
        return cast(Tensor, target(*args[:2], **more)) / total

    def _embedding(self, each: GraphOperator, table: Tensor, ids: Tensor) -> Tensor:
        """Looks up tokens in this rank's rows; others are zero, as in Megatron's vocabulary-parallel embedding."""
        rows, part, split = each.terms[0][0], 0, False
        for axis, letter in enumerate(self.plan.chosen[each.name].split):
            if letter == rows:
                part, split = part * self.plan.mesh.sizes[axis] + self.mesh.get_local_rank(axis), True
        if not split:
            return nn.functional.embedding(ids, table)
        there = ids - part * table.shape[0]
        outside = (there < 0) | (there >= table.shape[0])
        return nn.functional.embedding(there.masked_fill(outside, 0), table).masked_fill(outside[..., None], 0)


def _pure(target: Any) -> Any:
    """Returns the operator that changes no argument."""
    name = target._opname if hasattr(target, "_opname") else ""
    if not name.endswith("_") or name.startswith("__"):
        return target
    return getattr(getattr(torch.ops.aten, name.rstrip("_")), target._overloadname)


class _Reshard(torch.autograd.Function):
    """Brings a tensor from one form into another, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: PlannedModule, each: GraphOperator, given: Both, wanted: Both) -> Tensor:
        ctx.about = run, each, given, wanted
        return _moved(x, run, each, given[0], wanted[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        run, each, given, wanted = ctx.about
        late = is_late(run.graph, each)
        return _moved(gradients[0], run, each, wanted[1], given[1], late=late), None, None, None, None


def _moved(
    x: Tensor, run: PlannedModule, each: GraphOperator, before: Form, after: Form, *, late: bool = False
) -> Tensor:
    """Brings a tensor from one form into another. A `late` one still arrives when this returns: it is waited for where
    it is used."""
    moved = DTensor.from_local(
        *(x.contiguous(), run.mesh, placements(before)),
        run_check=False,
        shape=torch.Size(each.shape),
        stride=_strides(each),
    )
    for change in path(run.plan.mesh, each.shape, each.nbytes, before, after):
        moved = moved.redistribute(run.mesh, placements(change.after), async_op=late and change.after == after)
    found = moved._local_tensor if late else moved.to_local()  # the latter waits
    if isinstance(found, AsyncCollectiveTensor):
        return found
    return found.clone() if found.data_ptr() == x.data_ptr() else found.contiguous()


def _strides(each: GraphOperator) -> tuple[int, ...]:
    return tuple(torch.empty(each.shape, device="meta").stride())


NUMBERS = {name: kind for kind, name in TYPES.items()}
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The beginnings of the names of DTensor's collectives."""


class _Counter(TorchDispatchMode):
    """Adds DTensor's collectives to a ledger."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._opname.rstrip("_")
        kind: Collective | None = next((each for each in COLLECTIVES if name.startswith(each)), None)
        if kind and func.namespace in ("_c10d_functional", "_dtensor"):
            whole = found if kind == "all_gather" else args[0]
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self.ledger.add("graph", kind, whole.nbytes, group.size())
        return found


@contextmanager
def counted(ledger: Ledger) -> Iterator[None]:
    """Counts the bytes that DTensor sends in a `with` block."""
    with _Counter(ledger):
        yield


def check_plan(place: str, plan: GraphPlan) -> dict[str, Any]:
    """Runs a plan of the function `place` on gloo processes of this machine, and compares it with one process."""
    from phalanx.launch.pool import Pool

    with Pool(plan.mesh.devices) as pool:
        return pool.run(_compare, plan.mesh.devices, place, plan, timeout=600)[0]


def _compare(_: Any, place: str, plan: GraphPlan) -> dict[str, Any]:
    torch.manual_seed(0)
    alone, args = module_of(place)
    args = tuple(each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args)
    return compare(alone.double(), args, export_graph(alone, args), plan)


def compare(alone: nn.Module, args: tuple[Any, ...], exported: ExportedModule, plan: GraphPlan) -> dict[str, Any]:
    """Returns how far a plan on the ranks of this process's group is from one process: the loss (or the sum of what the
    module returns), gradients, and bytes. `exported` is such a module as `alone`. A plan counts bytes in its graph's
    types, and the run sends those of float64: the plan's strategies are counted anew for the module as it is."""
    plan = GraphPlan(exported.graph, plan.mesh, plan.chosen)
    loss = _summed(alone(*args))
    loss.backward()
    loss = loss.detach()
    mesh, ledger = init_device_mesh("cpu", plan.mesh.sizes), Ledger()
    run = PlannedModule(copy.deepcopy(alone), exported, plan, mesh)
    with counted(ledger):
        result = _summed(run(*args))
        result.backward()
    found = cast(DTensor, result.detach()).full_tensor()
    gradients = 0.0
    for one, two in zip(alone.parameters(), run.module.parameters(), strict=True):
        if one.grad is not None:
            other = cast(DTensor, two.grad).full_tensor() if two.grad is not None else torch.zeros_like(one)
            # What is zero but for rounding, such as a key's bias, has no relative error.
            gradients = max(gradients, float((other - one.grad).abs().max() / one.grad.abs().max().clamp(min=1e-3)))
    sent, expected = sum(entry.sent for entry in ledger.entries.values()), plan.cost.sent
    away = float((found - loss).abs() / loss.abs().clamp(min=1e-30))
    ok = max(away, gradients) <= 1e-9 and abs(sent - expected) <= 1e-9 * expected
    figures = {"loss_max_rel": away, "grad_max_rel": gradients, "sent_bytes": sent, "expected_bytes": expected}
    return {"ok": ok, "processes": plan.mesh.devices, **figures}


def _summed(result: Any) -> Any:
    first = result[0] if isinstance(result, (tuple, list)) else result
    return first if first.dim() == 0 else first.sum()


class StagedModule:
    """A module that runs as a pipeline: each rank has the operators and parameters of its stage, whose plan it follows.
    Stages take a micro-batch in turn; what one needs of an earlier one, and its gradient, is sent whole."""

    def __init__(self, module: nn.Module, exported: ExportedModule, stages: Sequence[GraphPlan]):
        ends = [sum(plan.mesh.devices for plan in stages[: number + 1]) for number in range(len(stages))]
        self.ranks = [range(end - plan.mesh.devices, end) for end, plan in zip(ends, stages, strict=True)]
        groups = [
            DeviceMesh("cpu", torch.tensor([*ranks]).view(plan.mesh.sizes))
            for ranks, plan in zip(self.ranks, stages, strict=True)
        ]
        self.own = next(number for number, ranks in enumerate(self.ranks) if dist.get_rank() in ranks)
        self.run = PlannedModule(module, exported, stages[self.own], groups[self.own])
        maker = {each.name: number for number, plan in enumerate(stages) for each in _made(plan)}
        self.sends = [
            (name, maker[name], number)
            for number, plan in enumerate(stages)
            for name in (each.name for each in plan.graph.operators if each.kind == "input" and each.name in maker)
            if maker[name] != number
        ]
        """Every tensor that a stage needs of another one: its name, the one's number and the other's."""

    def step(self, args: tuple[Any, ...]) -> Tensor | None:
        """Adds the gradients of one micro-batch, and returns its loss on the last stage."""
        graph, form = self.run.exported.graph, self.run.plan.chosen
        received, whole = dict[str, DTensor](), dict[str, Tensor]()
        last = len(self.ranks) - 1
        for name, source, target in self.sends:
            if target == self.own:
                each = graph.by_name[name]
                value = self._pass(torch.empty(each.shape, dtype=NUMBERS[each.dtype]), source, target)
                received[name] = distribute_tensor(value, self.run.mesh, placements(form[name].output[0]))
                received[name].requires_grad_(name in graph.differentiated)
        values, copies = self.run.values(args, received)
        for name, source, target in self.sends:
            if source == self.own:
                if name not in whole:
                    whole[name] = self.run.result(name, values, copies).full_tensor()
                self._pass(whole[name].detach().contiguous(), source, target)
        gradients = {name: torch.zeros_like(value) for name, value in whole.items() if value.requires_grad}
        loss: DTensor | None = None
        if self.own == last:
            (output,) = (node for node in self.run.exported.program.graph.nodes if node.op == "output")
            loss = self.run.result(self.run.exported.names[output.args[0][0].name], values, copies)
            loss.backward()
        for name, source, target in reversed(self.sends):
            if source == self.own and name in gradients:
                gradients[name] += self._pass(torch.empty_like(gradients[name]), target, source)
        if gradients:
            torch.autograd.backward([whole[name] for name in gradients], [*gradients.values()])
        for name, source, target in reversed(self.sends):
            if target == self.own and received[name].requires_grad:
                back = received[name].grad
                there = (
                    torch.zeros(received[name].shape, dtype=received[name].dtype)
                    if back is None
                    else cast(DTensor, back).full_tensor()
                )
                self._pass(there.contiguous(), target, source)
        return None if loss is None else loss.full_tensor().detach()

    def _pass(self, value: Tensor, source: int, target: int) -> Tensor:
        """Sends a tensor from the first rank of a stage to all ranks of another, and returns it."""
        first = self.ranks[source][0]
        for rank in self.ranks[target]:
            if dist.get_rank() == first:
                dist.send(value, rank)
            elif dist.get_rank() == rank:
                dist.recv(value, first)
        return value


def _made(plan: GraphPlan) -> Iterator[GraphOperator]:
    return (each for each in plan.graph.operators if each.kind != "input" or each.name not in plan.graph.received)
