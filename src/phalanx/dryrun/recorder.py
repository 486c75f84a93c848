"""Records the operations of a rank's rehearsed program, with the bytes that they read and write, for dryrun/sums.py
and dryrun/dependence.py; `ByteStates` keeps what those know of every byte."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.data.loader import MicroBatch
from phalanx.dryrun.gpu import device_of_torch
from phalanx.dryrun.operations import RealTensors
from phalanx.dryrun.world import DEVICE_OF
from phalanx.launch.watchdog import heartbeat
from phalanx.parallel.compression import parts
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.step import Stepper
from phalanx.train.sync import DiLoCo

PIECEWISE = {"copy_", "clone", "_to_copy", "detach", "zero_"} | {
    *("add_", "add", "sub_", "sub", "mul_", "mul", "div_", "div"),
}
"""Operations each of whose elements depends on those at the same place alone: parts of a buffer keep their states."""
SHAPED = {f"{x}_like" for x in ("empty", "zeros", "ones", "full")} | {
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}
"""Operations that read no element: their results have the shape or the type of what they are given."""
MESSAGE = "a message between stages"


@dataclass(frozen=True)
class SumFinding:
    """A sum that is missing or made twice, or what else is wrong in how ranks share a step."""

    axis: str
    ranks: tuple[int, int]
    what: str
    """The gradient, parameter or collective."""
    why: str
    module: str = ""

    def line(self) -> str:
        where = f" in {self.module}" if self.module else ""
        between = f"{self.axis} (ranks {self.ranks[0]} and {self.ranks[1]})" if self.axis else f"rank {self.ranks[0]}"
        return f"{between}: {self.what}{where}: {self.why}"


class BytesOf(NamedTuple):
    """Where a tensor's elements lie."""

    storage: int
    """Number of the storage in its rank's program; -1 for one of the host, whose elements `content` tells."""
    first: int
    last: int
    dense: bool
    shape: tuple[int, ...]
    content: str = ""
    bits: int = 0
    """Those of the micro-batch whose tokens or targets they are."""


class RecordedOperation(NamedTuple):
    """An operation, a collective or a check of one rank's program."""

    name: str
    where: str
    constants: str
    reads: tuple[BytesOf, ...]
    writes: tuple[BytesOf, ...]
    group: tuple[int, ...] = ()
    """The ranks of a collective."""
    fresh: tuple[bool, ...] = ()
    """Which written storages the operation made."""
    peer: int = -1
    """The other rank of a message."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.where, len(self.reads), tuple(each.shape for each in self.writes)


class OperationRecorder(TorchDispatchMode):
    """Records the operations of a rank's program in its `with` block."""

    def __init__(self, rank: int, micros: int, apart: bool) -> None:
        """`micros` is the number of micro-batches of all steps. `apart`: each has an update of its own."""
        super().__init__()
        self.rank, self.apart = rank, apart
        self.events: list[RecordedOperation] = []
        self.findings: list[SumFinding] = []
        self.numbers: dict[int, int] = {}
        self.storages = 0
        self.micros, self.all = micros, 0
        self.bits: dict[int, int] = {}
        """By address of a micro-batch's array, its bit: micro-batch + micro-batches × source. A source is a data rank's
        tokens, or the targets of one of its context-parallel ranks."""
        self.tokens = 0
        """The bits of all data ranks' tokens."""
        self.kept: list[Any] = []
        self.scalars: dict[int, float] = {}
        """By storage, the values of what backward passes begin with: powers of one number."""
        self.factor = 0.0
        self.batches: list[int] = []
        """The bits that each update should depend on, as far as this rank reads them."""
        self.updates = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as DryWorld's

    def place(self, x: Tensor, fresh: bool = False) -> BytesOf:
        if type(x) is not FakeTensor:
            with RealTensors():
                bits = self._bit(x)
                content = bytes(x.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
            return BytesOf(-1, 0, 0, True, tuple(x.shape), hashlib.sha256(content).hexdigest()[:16], bits)
        key, shape, size, span = x.untyped_storage()._cdata, tuple(x.shape), x.element_size(), x.numel()
        if fresh or key not in self.numbers:
            self.numbers[key] = self.storages
            self.storages += 1
        first, dense = int(x.storage_offset()) * size, x.is_contiguous()
        if span and not dense:
            span = sum((n - 1) * s for n, s in zip(shape, x.stride(), strict=True)) + 1
            dense = span == x.numel()
        return BytesOf(self.numbers[key], first, first + span * size, dense, shape)

    def _bit(self, x: Tensor) -> int:
        if x.is_meta or type(x) is not Tensor:
            return 0
        return self.bits.get(x.untyped_storage().data_ptr(), 0)

    def check(self, name: str, shards: Iterable[tuple[str, Tensor]]) -> None:
        """Records tensors with what they are: on ranks where that is the same, they must be equal."""
        for what, x in shards:
            local = x.to_local() if isinstance(x, DTensor) else x
            where = self.place(local.detach() if type(local) is FakeTensor else local)
            update = str(self.updates)
            self.events.append(RecordedOperation(f"{name} {what.split(' | ')[0]}", update, what, (where,), (where,)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of_torch(args[0])
        if DTensor in types:
            return NotImplemented  # the local tensors inside are recorded
        kwargs = kwargs or {}
        if func.is_view and type(args[0]) is FakeTensor:
            return func(*args, **kwargs)
        name = func._overloadpacket.__name__
        given = list(_tensors((args, kwargs)))
        if any(type(x) is not FakeTensor and x.is_meta for x in given):
            return func(*args, **kwargs)
        known = {x.untyped_storage()._cdata for x in given if type(x) is FakeTensor}
        reads = [] if name in SHAPED else [self.place(x) for x in given]
        out = func(*args, **kwargs)
        constants, group = repr(list(_constants((args, kwargs)))), ()
        where = heartbeat.module()
        if func.namespace == "fsdp":
            self._copies(name, where, args, kwargs, out)
            return out
        if func.namespace == "c10d":
            of = next(
                ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and "Group" in str(x._type())
            )
            group = tuple(dist.get_process_group_ranks(of))
            peer = group[args[2]] if name in ("send", "recv_") else -1
            name = "c10d." + name
            lists = [[self.place(x) for x in _tensors(each)] for each in args]
            writes, reads = lists[0], lists[1] or lists[0]
            if name == "c10d.send":
                writes = []
            if name == "c10d.allreduce_" and not next(_tensors(args[0])).is_floating_point():
                name = "c10d.votes"  # flags of ranks are counted, and equal ones on purpose
            self.events.append(RecordedOperation(name, where, constants, tuple(reads), tuple(writes), group, (), peer))
            return out
        written = [
            x
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        made = [x for x in _tensors(out) if not any(x is y for y in written)]
        if not written and all(x.untyped_storage()._cdata in known for x in made if not x.is_meta):
            return out  # a view
        if any(x.is_meta for x in made):
            return out
        fresh = [False] * len(written) + [x.untyped_storage()._cdata not in known for x in made]
        seen: set[int] = set()
        writes = [self.place(x) for x in written]
        for x, new in zip(made, fresh[len(written) :], strict=True):
            key = x.untyped_storage()._cdata
            writes.append(self.place(x, new and key not in seen))
            seen.add(key)
        if writes:
            self.events.append(RecordedOperation(name, where, constants, tuple(reads), tuple(writes), (), tuple(fresh)))
        if name == "ones_like":
            self.scalars[writes[0].storage] = 1.0
        elif name in ("mul", "div") and made and made[0].dim() == 0 and len(args) == 2:
            a, b = map(self._scalar, args)
            if a is not None and b:
                self.scalars[writes[0].storage] = a * b if name == "mul" else a / b
        return out

    def _copies(self, name: str, where: str, args: Any, kwargs: Any, out: Any) -> None:
        """Records what FSDP2 copies between parameters and the buffers of its collectives, place by place."""
        made = list[tuple[list[BytesOf], BytesOf]]()
        match name:
            case "all_gather_copy_in":
                made.append(([self.place(x) for x in args[0]], self.place(out[0])))
            case "split_with_sizes_copy":
                whole, row, offset = self.place(args[0]), args[0].shape[1] * args[0].element_size(), 0
                for x, size in zip(kwargs["out"], args[1], strict=True):
                    length = size * x.element_size()
                    starts = range(whole.first + offset, whole.last, row)
                    made.append(([whole._replace(first=a, last=a + length) for a in starts], self.place(x)))
                    offset += length
            case _:  # chunk_cat
                tensors, _, ranks, read = *args, list[BytesOf]()
                for rank in range(ranks):
                    for x in tensors:
                        at, size = self.place(x), math.ceil(x.shape[0] / ranks) * (x.nbytes // max(x.shape[0], 1))
                        first, last = (min(at.first + n * size, at.last) for n in (rank, rank + 1))
                        padding = BytesOf(-1, 0, size - (last - first), True, ())
                        read += [at._replace(first=first, last=last), padding]
                made.append((read, self.place(kwargs["out"])))
        for reads, write in made:
            self.events.append(RecordedOperation("cat", where, "", tuple(reads), (write,), (), (False,)))

    def _scalar(self, x: Any) -> float | None:
        """Returns the value of a number, if it is known."""
        if type(x) is FakeTensor:
            return self.scalars.get(self.place(x).storage) if x.dim() == 0 else None
        if isinstance(x, Tensor):
            with RealTensors():
                return x.item()
        return float(x)

    # rehearse() says when steps begin, when gradients are final, and when the last step has ended.

    def begins(self, stepper: Stepper) -> None:
        optimizer, mesh = stepper.optimizer, stepper.mesh
        cp, tokens = mesh.coordinates["cp"], mesh.data_rank
        self.tokens = (1 << self.micros * mesh.data_ranks) - 1
        self.sources = tokens, mesh.data_ranks + tokens * mesh.sizes["cp"] + cp
        self.check("parameter", self._parameters(stepper))
        self.check("shard", [(_identity(f), f.value) for f in stepper.trained])
        self.check("master", [(_identity(f), optimizer.masters[f.name]) for f in optimizer.shards])
        if isinstance(sync := stepper.sync, DiLoCo):
            for flat in (sync.anchor, sync.momentum):
                of_shards = zip(optimizer.shards, parts(flat, sync.values), strict=True)
                self.check("master", [(_identity(f), x) for f, x in of_shards])
        if stepper.replica.objective.compared is None and not self.apart:
            stepper.replica.objective.register_forward_hook(self._watch_loss)

    def _watch_loss(self, _: nn.Module, inputs: Any, loss: Tensor) -> None:
        if loss.dim() == 0 and loss.requires_grad:
            loss.register_hook(self._judge_factor)

    def _judge_factor(self, gradient: Tensor) -> None:
        """Judges the factor with which the backward pass of a micro-batch begins: it makes a mean over all ranks."""
        if (known := self._scalar(gradient)) is None or not self.factor:
            return
        ratio = known / self.factor
        if not math.isclose(ratio, 1, rel_tol=1e-6):
            why = f"{ratio:g} × what makes a mean over the tokens of all ranks"
            self.findings.append(SumFinding("", (self.rank, self.rank), "the factor of the loss", why))

    def _parameters(self, stepper: Stepper) -> Iterator[tuple[str, Tensor]]:
        for shard in stepper.replica.local_parameters():
            yield _identity(shard), shard.value

    def reads(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.kept.append(micro_batches)
        if not self.apart:
            self.batches.append(0)
        for each in micro_batches:
            if self.apart:
                self.batches.append(0)
            for x, source in zip((each.tokens, each.targets), self.sources, strict=True):
                bit = 1 << self.all + self.micros * source
                self.bits[x.ctypes.data] = bit
                self.batches[-1] |= bit
            self.all += 1

    def divides(self, factor: float) -> None:
        self.factor = factor

    def gradients(self, stepper: Stepper) -> None:
        held = [(f, f.gradient) for f in stepper.replica.shards if f.gradient is not None]
        self.check("gradient of", [(_identity(f) + " | balances" * f.balances, x) for f, x in held])
        self.updates += 1

    def ends(self, stepper: Stepper) -> None:
        self.check("final parameter", self._parameters(stepper))


def _identity(shard: ParameterShard) -> str:
    part = shard.tensor_slice
    return f"{shard.name} | {part.dim} {part.start} {part.size} | {shard.start} {shard.value.numel()}"


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _constants(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _constants(each)
    elif isinstance(tree, dict):
        yield from _constants(list(tree.values()))
    elif isinstance(tree, (int, float, str, bool)):
        yield tree


Piece = tuple[int, int, int]
"""The bits of a run of bytes: its first, one past its last, and their bits."""


class ByteStates:
    """What is known of the bytes of a rank's storages, a number of bits each; those never written have none."""

    def __init__(self) -> None:
        self.ranges: defaultdict[int, list[Piece]] = defaultdict(list)

    def pieces(self, at: BytesOf) -> list[Piece]:
        """Returns the parts of a place, in order."""
        found, here = list[Piece](), at.first
        for start, end, bits in self.ranges[at.storage]:
            first, last = max(start, at.first), min(end, at.last)
            if first < last:
                if here < first:
                    found.append((here, first, 0))
                found.append((first, last, bits))
                here = last
        return [*found, (here, at.last, 0)] if here < at.last else found

    def of(self, at: BytesOf) -> int:
        """Returns the bits of all bytes of a place."""
        found = 0
        for first, last, bits in self.ranges[at.storage]:
            if max(first, at.first) < min(last, at.last):
                found |= bits
        return found

    def write(self, at: BytesOf, bits: int) -> None:
        self.put(at, [(at.first, at.last, bits if at.dense else bits | self.of(at))])  # bytes between them keep theirs

    def put(self, at: BytesOf, pieces: Sequence[Piece]) -> None:
        kept = list[Piece]()
        for first, last, bits in self.ranges[at.storage]:
            if first < at.first:
                kept.append((first, min(last, at.first), bits))
            if last > at.last:
                kept.append((max(first, at.last), last, bits))
        self.ranges[at.storage] = sorted([*kept, *pieces])


def moved(pieces: Sequence[Piece], by: int) -> list[Piece]:
    """Returns pieces at other bytes."""
    return [(first + by, last + by, bits) for first, last, bits in pieces]


def joined(parts: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Returns the pieces of a sum of parts that begin at the same byte."""
    borders = sorted({x for part in parts for first, last, _ in part for x in (first, last)})
    found = list[Piece]()
    for a, b in pairwise(borders):
        bits = 0
        for part in parts:
            for first, last, each in part:
                if first <= a and b <= last:
                    bits |= each
        found.append((a, b, bits))
    return found


Key = tuple[str, tuple[Any, ...], int]
"""A collective or message: its name, its ends, and its number among theirs."""
Parts = defaultdict[Key, dict[Any, tuple[tuple[int, ...], list[Piece]]]]
"""By collective and end, the shape and the states of what it brings, from byte 0 on."""


class FollowedStates:
    """The states of a program that runs together with others: a collective's result is known once all its ends have
    come to it. The first of `ranks` takes part in its collectives; `me` is its end of them."""

    def __init__(self, ranks: tuple[int, int], me: Any, axis: str, parts: Parts):
        self.ranks, self.rank, self.me, self.axis, self.parts = ranks, ranks[0], me, axis, parts
        self.states, self.findings = ByteStates(), list[SumFinding]()
        self.coming = defaultdict[int, list[tuple[BytesOf, Key, RecordedOperation]]](list)
        """By storage, what arrives there."""
        self.counts = defaultdict[tuple[str, tuple[Any, ...]], int](int)
        self.done = 0
        """Operations that have been followed."""

    def find(self, what: str, why: str, where: str = "", other: int | None = None, axis: str = "") -> None:
        """Notes a finding between these ranks, or one of them and another."""
        ranks = self.ranks if other is None else (self.rank, other)
        self.findings.append(SumFinding(axis or self.axis, ranks, what, why, where))

    def meet(self, event: RecordedOperation, name: str, ends: tuple[Any, ...], differs: int = 0) -> None:
        """Comes to a collective or a "message" of `ends`, with what the event reads; `differs` are bits of all of it.
        Its results are written before anything uses them."""
        key = name, ends, self.counts[name, ends]
        self.counts[name, ends] += 1
        source = event.reads[0]
        if event.name != "c10d.recv_":
            pieces = moved(self.states.pieces(source), -source.first)
            if differs or not source.dense or len(event.reads) > 1:
                bits = reduce(or_, map(self.states.of, event.reads), differs)
                pieces = [(0, source.last - source.first, bits)]
            self.parts[key][self.me] = source.shape, pieces
        for at in event.writes:
            self.coming[at.storage].append((at, key, event))

    def await_at(self, places: Iterable[BytesOf]) -> Iterator[None]:
        """Writes what arrives at places that are used now; stops while it has not been sent."""
        for place in places:
            for at, key, event in self.coming.pop(place.storage, ()):
                needed = key[1][:1] if key[0] == "message" else key[1]
                while not self.parts[key].keys() >= {*needed}:
                    yield
                found = [self.parts[key][end] for end in needed]
                if key[0] == "message" and found[0][0] != at.shape:
                    why = f"a message of {list(found[0][0])} is received as {list(at.shape)}"
                    self.find(MESSAGE, why, event.where, event.peer, "pp")
                self.arrive(at, event, [pieces for _, pieces in found])

    def arrive(self, at: BytesOf, event: RecordedOperation, parts: Sequence[list[Piece]]) -> None:
        """Writes what a collective brings."""
        size = at.last - at.first
        pieces: list[Piece] = []
        if event.name == "c10d._reduce_scatter_base_":
            first = event.group.index(self.rank) * size
            cut = [[(max(a, first), min(b, first + size), bits) for a, b, bits in part] for part in parts]
            pieces = moved(joined([[each for each in part if each[0] < each[1]] for part in cut]), at.first - first)
        elif event.name == "c10d._allgather_base_":
            each = size // len(parts)
            pieces = [piece for place, part in enumerate(parts) for piece in moved(part, at.first + place * each)]
        elif event.name in ("c10d.allreduce_", "c10d.recv_"):
            pieces = moved(joined(parts), at.first)
        if at.dense and len(event.writes) == 1 and pieces and (pieces[0][0], pieces[-1][1]) == (at.first, at.last):
            self.states.put(at, pieces)
        else:
            self.states.write(at, reduce(or_, map(bits_of, parts), 0))


def bits_of(pieces: Sequence[Piece]) -> int:
    return reduce(or_, (bits for _, _, bits in pieces), 0)


def run_together(programs: Sequence[tuple[FollowedStates, Iterator[None]]]) -> None:
    """Runs programs, each until it needs what no other has sent yet; some may never get it."""
    running, before = list(programs), None
    while running and before != (now := (len(running), sum(each.done for each, _ in programs))):
        before = now
        running = [each for each in running if next(each[1], programs) is not programs]
    for each, _ in running:
        each.find("the program", "it waits for a message or a sum in which another rank takes no part")
