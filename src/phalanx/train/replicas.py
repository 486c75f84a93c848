"""The parts of the training state that several ranks hold, and the comparison of their digests.

Two tensors are replicas if they are the same range of the same slice of the same parameter, of one kind (the parameter
itself, its fp32 master, a moment, its summed gradient). Nothing else is assumed about the layout: ranks along an axis
tell each other what they hold, once, as hashes. So dp_replicate's copies, the whole parameters of ZeRO-1 and -2, norms
and routers over tp, tied embeddings at both ends of a pipeline and DualPipe's second direction are all found alike.

Replicas differ in some bit only if one of them is corrupt: they begin with the same bits, an all-reduce gives the same
bits to all its ranks (gloo and NCCL add every element once, along one path, and pass on the sum; DDP has relied on it
since 2020), and the optimizer computes each element from that element's state alone. Tensor ranks compute some
gradients each for itself, from equal inputs: these are equal where kernels are deterministic, and compared only there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.step import Stepper

_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # odd: 2^64 / golden ratio, and splitmix64's
_LOW_BITS = 0xFFFFFFFF


@torch.no_grad()
def digests(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the digest of every tensor, (len(tensors),) of int64 on `device`; 0 for None.

    Tensors of equal bits and shapes have equal digests, on any device. Different ones have different digests, but for
    one chance in 2^63."""
    entries: list[Tensor] = []
    lengths: list[int] = []
    for tensor in tensors:
        # Offloaded state is summed on its host.
        parts = [] if tensor is None else [part.to(device) for part in _sums(words(tensor))]
        entries += parts
        lengths.append(sum(part.numel() for part in parts))
    result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if not entries:
        return result
    values = torch.cat(entries)
    owners = torch.repeat_interleave(torch.tensor(lengths, device=device), output_size=len(values))
    # Places count from the start of each tensor, so that a digest does not depend on the tensors beside it.
    starts = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
    places = torch.arange(len(values), device=device) - starts[owners]
    weights = _mixed(places + 1) | 1
    return result.index_add_(0, owners, _mixed(values + weights) * weights)


def words(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as 64-bit words, (n,) of int64: a view where it fills whole words."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    if flat.is_contiguous() and not flat.nbytes % 8 and not flat.storage_offset() * size % 8:
        return flat.view(torch.int64)
    padded = torch.zeros(-(-flat.nbytes // 8), dtype=torch.int64, device=flat.device)
    padded.view(flat.dtype)[: flat.numel()].copy_(flat)
    return padded


def _sums(bits: Tensor) -> list[Tensor]:
    """Returns the sums of rows and of columns of the words (n,) as a matrix, and the words that fill no row."""
    width = 1 << (len(bits).bit_length() // 2)
    whole = len(bits) // width * width
    matrix = bits[:whole].view(-1, width)
    return [matrix.sum(1), matrix.sum(0), bits[whole:]]


def _mixed(x: Tensor) -> Tensor:
    """Returns a bijective hash of 64-bit words (the steps of splitmix64: Steele et al. 2014)."""
    for multiplier in _MULTIPLIERS:
        x = (x ^ ((x >> 32) & _LOW_BITS)) * multiplier
    return x ^ ((x >> 32) & _LOW_BITS)


PARAMETER, MASTER, GRADIENT = "parameter", "master", "gradient"
AXES = ("dp_replicate", "shard", "tp", "pp")
"""The axes along which replicas may lie: each rank's place follows from these four."""
_NONE = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the training state on this rank."""

    kind: str
    shard: ParameterShard

    @property
    def name(self) -> str:
        """The parameter's name, with the kind where it is not the parameter itself."""
        return self.shard.name if self.kind == PARAMETER else f"{self.shard.name} ({self.kind})"

    @cached_property
    def key(self) -> int:
        """A hash that replicas on other ranks have, too, and nothing else."""
        part, shard = self.shard.tensor_slice, self.shard
        facts = (self.kind, shard.name, part.dim, part.start, part.size, shard.start, shard.value.numel())
        return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), signed=True)


@dataclass(frozen=True)
class Difference:
    """A tensor whose replicas differ."""

    key: int
    kind: str
    name: str
    digests: dict[int, int]
    """By rank."""

    @property
    def good(self) -> list[int]:
        """The ranks that hold what more than half of the replicas hold; none without a majority."""
        digest, count = Counter(self.digests.values()).most_common(1)[0]
        return [rank for rank, own in self.digests.items() if own == digest] if 2 * count > len(self.digests) else []

    @property
    def suspects(self) -> list[int]:
        """The ranks that hold something else than the majority; all of them without one."""
        good = self.good
        return [rank for rank in self.digests if rank not in good]


class Replicas:
    """This rank's part in comparing the replicated state of a run."""

    def __init__(self, stepper: Stepper, *, exact: bool):
        """Finds the replicas; `exact` if kernels are deterministic. A collective of all ranks."""
        self.stepper, self.mesh, self.device = stepper, stepper.mesh, stepper.device
        self.held = _held(stepper)
        summed = {name for partial in stepper.replica.model.partials for name in partial.names}
        with self.mesh.ledger.untracked():
            lines = []
            for axis in (self.mesh.axis(name) for name in AXES):
                compared = [exact or axis.name != "tp" or held.shard.whole_name in summed for held in self.held]
                keys = [held.key if yes else _NONE for held, yes in zip(self.held, compared, strict=True)]
                if axis.size > 1:
                    lines.append(_Line(axis, torch.tensor(keys, dtype=torch.int64, device=self.device)))
            self.lines = [line for line in lines if len(line.keys)]
            self.exist = self._count(len(self.lines)) > 0
        """Whether any rank has a replica of anything."""
        shared = {int(number) for line in self.lines for number in line.own}
        sizes = [0 if held.kind == GRADIENT else self._bytes(held) for held in self.held]
        self.share = sum(sizes[number] for number in shared) / max(1, sum(sizes))
        """The share of this rank's parameters and moments that another rank holds, too."""

    @torch.no_grad()
    def differing(self, *, gradients: bool) -> list[Difference]:
        """Compares all replicas, with the summed `gradients` or without. Returns those that differ, the same on all
        ranks. A collective of all ranks; while all are equal, each axis sends 16 bytes per tensor."""
        if not self.exist:
            return []
        self.stepper.replica.arrive()
        with self.mesh.ledger.untracked():
            own = digests([self.tensor(h) if gradients or h.kind != GRADIENT else None for h in self.held], self.device)
            found = {int(number) for line in self.lines for number in line.differing(own)}
            if not self._count(len(found)):
                return []
            return self._locate(found, own.tolist())

    def tensor(self, held: StateTensor) -> Tensor | None:
        """Returns what is held, which the optimizer may not have yet, or no longer."""
        optimizer, shard = self.stepper.optimizer, held.shard
        if held.kind == PARAMETER:
            return shard.value
        master = optimizer.masters[shard.name]
        if held.kind == MASTER:
            return master
        if held.kind == GRADIENT:
            return master.grad
        return optimizer.state_of(shard, held.kind)

    def gradient_digest(self) -> int:
        """Returns one digest of all gradients that this rank's optimizer has."""
        gradients = [self.tensor(held) for held in self.held if held.kind == GRADIENT]
        return int(digests([digests(gradients, self.device)], self.device).item())

    @torch.no_grad()
    def heal(self, differences: Sequence[Difference]) -> None:
        """Copies each tensor from the first rank of its majority to the ranks that hold something else. A collective of
        the ranks concerned; every difference has a majority."""
        self.stepper.optimizer.before_write()
        by_key = {held.key: held for held in self.held}
        world = self.mesh.axis("world")
        with self.mesh.ledger.untracked():
            for difference in differences:
                source = difference.good[0]
                if world.rank != source and world.rank not in difference.suspects:
                    continue
                tensor = self.tensor(by_key[difference.key])
                assert tensor is not None, "it had a digest"
                if world.rank != source:
                    arrived = torch.empty_like(tensor, device=self.device, memory_format=torch.contiguous_format)
                    world.receive(arrived, source)
                    tensor.copy_(arrived)
                    continue
                for rank in difference.suspects:
                    world.send(tensor.detach().to(self.device).contiguous(), rank)

    def _bytes(self, held: StateTensor) -> int:
        """Returns the bytes of a parameter, a master or a tensor of the optimizer's state."""
        if held.kind == PARAMETER:
            return held.shard.value.nbytes
        optimizer = self.stepper.optimizer
        master = optimizer.masters[held.shard.name]
        if held.kind == MASTER:
            return master.nbytes
        own = next(kind for kind in optimizer.kinds_of(held.shard) if kind.kind == held.kind)
        return (own.bytes or master.element_size()) * (master.numel() // own.block)

    def _locate(self, found: set[int], own: list[int]) -> list[Difference]:
        """Returns the tensors that any rank has `found` to differ, with the digests of all ranks that hold them."""
        world = self.mesh.axis("world")
        keys = {key for theirs in world.gather_json([self.held[n].key for n in found]) for key in theirs}
        mine = [(h.key, h.kind, h.name, own[n]) for n, h in enumerate(self.held) if h.key in keys]
        merged: dict[int, Difference] = {}
        for rank, theirs in enumerate(world.gather_json(mine)):
            for key, kind, name, digest in theirs:
                merged.setdefault(key, Difference(key, kind, name, {})).digests[rank] = digest
        return [merged[key] for key in sorted(merged, key=lambda key: (merged[key].name, key))]

    def _count(self, mine: int) -> int:
        total = torch.tensor([mine], device=self.device)
        self.mesh.axis("world").all_reduce(total).wait()
        return int(total.item())


class _Line:
    """The tensors that ranks of one axis hold more than once."""

    def __init__(self, axis: Axis, keys: Tensor):
        """Exchanges the `keys` (n,) of what each rank holds."""
        self.axis = axis
        longest = torch.tensor([len(keys)], device=keys.device)
        axis.all_reduce(longest, dist.ReduceOp.MAX).wait()
        mine = keys.new_full((int(longest.item()),), _NONE)
        mine[: len(keys)] = keys
        every = keys.new_empty(axis.size * len(mine))
        axis.all_gather(every, mine).wait()
        known, counts = every.unique(return_counts=True)
        self.keys = known[(counts > 1) & (known != _NONE)]
        """What at least two ranks hold, in one order on all of them."""
        own = torch.isin(keys, self.keys)
        self.own = own.nonzero().squeeze(1)
        """The indices of this rank's tensors among them."""
        self.places = torch.searchsorted(self.keys, keys[own])
        """Their places in `keys`."""

    def differing(self, own: Tensor) -> Tensor:
        """Returns the indices of this rank's tensors that differ from their replicas on the axis, from the digests of
        all its tensors: one all-reduce for largest and smallest."""
        extremes = own.new_full((2, len(self.keys)), _NONE)
        extremes[0, self.places] = own[self.own]
        extremes[1, self.places] = ~own[self.own]
        self.axis.all_reduce(extremes, dist.ReduceOp.MAX).wait()
        return self.own[(extremes[0] != ~extremes[1])[self.places]]


def _held(stepper: Stepper) -> list[StateTensor]:
    optimizer = stepper.optimizer
    shards = [shard for shard in optimizer.shards if shard.value.numel()]
    held = [StateTensor(PARAMETER, shard) for shard in stepper.replica.local_parameters() if shard.value.numel()]
    held += [StateTensor(MASTER, shard) for shard in shards if optimizer.masters[shard.name] is not shard.value]
    for kind in optimizer.kinds:
        has = {shard.name for shard in optimizer.places(kind)}
        held += [StateTensor(kind, shard) for shard in shards if shard.name in has and not shard.balances]
    return held + [StateTensor(GRADIENT, shard) for shard in shards]
