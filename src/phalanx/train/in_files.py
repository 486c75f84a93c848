"""An optimizer's state in files: three buffers of host memory through which it passes in each step (ZeRO-Infinity:
Rajbhandari et al. 2021, section 5.2).

While one part is updated, the next is read and the one before is written. Between steps master weights and state
tensors are views of the file's map: checkpoints, digests and loading read and write them there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import gcd, lcm
from pathlib import Path

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.config.optimizer import Optimizer
from phalanx.launch.watchdog import heartbeat
from phalanx.optimizers.entry import MASTER
from phalanx.parallel.offload.host import Host, on_host
from phalanx.parallel.offload.state_file import ALIGNMENT, StateFile, padded
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.derived import BUFFER_BYTES, BUFFERS
from phalanx.train.offload_space import require_space
from phalanx.train.optimizers.shapes import state_shapes
from phalanx.train.residence import OnHost, step
from phalanx.units import counted, gib
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)

MOST_WAITING = 0.5
"""Share of a step that its update may wait for the disk without a warning."""


@dataclass(frozen=True)
class Region:
    """The place of one tensor in the file, from `start` on."""

    start: int
    shape: torch.Size
    dtype: torch.dtype
    block: int
    """Elements of the shard per element of the tensor."""

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + padded(self.bytes)

    @property
    def unit(self) -> int:
        """Elements of the shard at multiples of which the tensor may be cut, so that each piece is aligned."""
        return ALIGNMENT // gcd(ALIGNMENT, self.dtype.itemsize) * self.block

    def cut(self, start: int, stop: int) -> Region:
        """Returns the place of elements `start` to `stop` - 1 of the shard, a flat tensor."""
        first, last = start // self.block, -(-stop // self.block)
        return Region(self.start + first * self.dtype.itemsize, torch.Size([last - first]), self.dtype, self.block)

    def view(self, memory: Tensor, first: int = 0) -> Tensor:
        """Returns the tensor as a view of bytes that begin at the file's byte `first`."""
        return memory[self.start - first :][: self.bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class FilePiece:
    """A shard, or the elements `start` to `stop` - 1 of one that is larger than a buffer."""

    shard: ParameterShard
    start: int
    stop: int
    regions: Mapping[str, Region]
    """By kind, with the master."""

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.shard.value.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the piece of a tensor of the shard's shape: flat, unless it is whole."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class FilePart:
    """Pieces that are in one buffer together: whole shards that follow each other in the file, or one piece."""

    pieces: tuple[FilePiece, ...]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First and last place of the consecutive bytes of the file, in the order in which they are in the buffer."""
        found: list[tuple[int, int]] = []
        for region in (region for piece in self.pieces for region in piece.regions.values()):
            if found and found[-1][1] == region.start:
                found[-1] = found[-1][0], region.stop
            else:
                found.append((region.start, region.stop))
        return found

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def views(self, buffer: Tensor) -> Iterator[tuple[FilePiece, dict[str, Tensor]]]:
        """Yields each piece with its tensors in a buffer, by kind."""
        place = 0
        for piece in self.pieces:
            found = {}
            for kind, region in piece.regions.items():
                found[kind] = region.view(buffer[place:], region.start)
                place += region.stop - region.start
            yield piece, found


class InFiles(OnHost):
    """State in a file of a local disk, gradients in host memory."""

    def __init__(
        self,
        host: Host,
        folder: Path,
        config: Optimizer,
        shards: Sequence[ParameterShard],
        world: Axis,
        level: int,
        *,
        beside: bool = False,
    ):
        """Makes this rank's file, with room for the state of `shards`, and logs its size at `level`. A collective
        of all ranks. Raises JobError on all of them if the disks have too little space, OffloadError if the file cannot
        be made."""
        super().__init__(host, beside=beside)
        self.places: dict[str, dict[str, Region]] = {}
        """By shard, the place of each kind of tensor; of shards that the optimizer updates."""
        size, trained = 0, [shard for shard in shards if shard.value.numel() and not shard.balances]
        for shard in trained:
            precision = torch.promote_types(shard.value.dtype, torch.float32)
            shapes = {MASTER: (shard.value.shape, precision, 1), **state_shapes(config, shard, precision)}
            self.places[shard.name] = {}
            for kind, (shape, dtype, block) in shapes.items():
                region = self.places[shard.name][kind] = Region(size, shape, dtype, block)
                size = region.stop
        require_space(folder, size, world)
        self.parts = list(parts(trained, self.places))
        self.file = StateFile(folder, size)
        largest = max((part.bytes for part in self.parts), default=0)
        self.buffers = [self._buffer(largest) for _ in range(min(BUFFERS, len(self.parts)))]
        self._moved = {"read": 0, "written": 0}
        self.updates = 0
        """Updates so far."""
        self.waited = 0.0
        """Seconds for which the last update waited for the disk."""
        self.updated_at = 0.0
        self.warns = True
        self._tell_speed(size, level)

    def master(self, shard: ParameterShard) -> Tensor:
        if shard.name not in self.places:
            return super().master(shard)
        region, value = self.places[shard.name][MASTER], shard.value.detach().reshape(-1)
        most = len(self.buffers[0]) // (region.unit * region.dtype.itemsize) * region.unit
        for start in range(0, len(value), most):
            piece = region.cut(start, min(start + most, len(value)))
            piece.view(self.buffers[0], piece.start).copy_(value[start : start + most])
            self.file.write(self.buffers[0][: padded(piece.bytes)], piece.start)
        return region.view(self.file.mapped).requires_grad_()

    def kept(self, shard: ParameterShard) -> Mapping[str, Tensor]:
        places = self.places.get(shard.name, {})
        return {kind: region.view(self.file.mapped) for kind, region in places.items() if kind != MASTER}

    @property
    def moved(self) -> Mapping[str, int]:
        return self._moved

    def update(self, rule: torch.optim.Optimizer, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        began, self.waited = time.perf_counter(), 0.0
        masters = {shard.name: master for shard, master in pairs}
        gradients = {name: master.grad for name, master in masters.items() if master.grad is not None}
        for master in masters.values():
            master.grad = None
        updated = [part for part in self.parts if any(piece.shard.name in gradients for piece in part.pieces)]
        with ThreadPoolExecutor(1, "read ahead") as reader, ThreadPoolExecutor(1, "write behind") as writer:
            reads = deque(reader.submit(self._read_after, *each) for each in zip(updated, self.buffers, strict=False))
            writes: deque[Future[None]] = deque()
            for number, part in enumerate(updated):
                heartbeat.beat()
                buffer = self.buffers[number % BUFFERS]
                self._wait(reads.popleft())
                self._update(rule, part, buffer, masters, gradients)
                self.host.settle()  # copies to the device have left the buffer
                writes.append(writer.submit(self.write_back, part, buffer))
                if number + BUFFERS < len(updated):
                    reads.append(reader.submit(self._read_after, updated[number + BUFFERS], buffer, writes.popleft()))
            for written in writes:
                self._wait(written)
        self.write([pair for pair in pairs if pair[0].name not in self.places])
        self.host.join()
        self.updates += 1
        self._judge(began)

    def _update(
        self,
        rule: torch.optim.Optimizer,
        part: FilePart,
        buffer: Tensor,
        masters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Runs the rule on a part in a buffer, and starts copying its parameters to the device."""
        bound = [(piece, masters[piece.shard.name], own) for piece, own in part.views(buffer)]
        bound = [each for each in bound if each[0].shard.name in gradients]
        before = [rule.state.pop(master, {}) for _, master, _ in bound]
        with on_host():
            for (piece, master, own), state in zip(bound, before, strict=True):
                # The rule knows a master by its identity: during the update its elements are the buffer's.
                master.data = own[MASTER]
                master.grad = piece.of(gradients[piece.shard.name])
                if state:
                    counters = {kind: value.clone() for kind, value in state.items() if kind not in own}
                    rule.state[master] = {kind: own.get(kind, counters.get(kind)) for kind in state}
            copies = {m: c for piece, m, _ in bound if (c := self._copy(piece, m)) is not None}
            step(rule, copies)
        for (piece, master, own), state in zip(bound, before, strict=True):
            after, shard, master.grad = rule.state.pop(master), piece.shard, None
            self._up(piece, own[MASTER])
            master.data = self.places[shard.name][MASTER].view(self.file.mapped)
            if not state:  # the rule has made it, outside the buffer
                for kind in own.keys() - {MASTER}:
                    own[kind].copy_(after[kind].view(own[kind].shape))
            if piece.stop == shard.value.numel():
                rule.state[master] = {**after, **self.kept(shard)}
            elif state:
                rule.state[master] = state  # counters advance with the last piece

    def _copy(self, piece: FilePiece, master: Tensor) -> Tensor | None:
        """Returns the place of a piece's updated parameters in their own type; None if it is the buffer."""
        copy = self.copy_of(piece.shard, master)
        return None if copy is None else piece.of(copy)

    def _up(self, piece: FilePiece, master: Tensor) -> None:
        """Starts copying a piece's parameters, which the update has written, to the device."""
        if not self.beside:
            copy = self._copy(piece, master)
            self.host.up(master.detach() if copy is None else copy, piece.of(piece.shard.value.detach()))

    def _read_after(self, part: FilePart, buffer: Tensor, write: Future[None] | None = None) -> None:
        if write is not None:
            write.result()
        self.read(part, buffer)

    def read(self, part: FilePart, buffer: Tensor) -> None:
        """Reads a part of the file into a buffer. Raises OffloadError."""
        place = 0
        for start, stop in part.runs:
            self.file.read(buffer[place : place + stop - start], start)
            place += stop - start
        self._moved["read"] += place

    def write_back(self, part: FilePart, buffer: Tensor) -> None:
        """Writes a buffer to its part of the file. Raises OffloadError."""
        place = 0
        for start, stop in part.runs:
            self.file.write(buffer[place : place + stop - start], start)
            place += stop - start
        self._moved["written"] += place

    def _wait(self, transfer: Future[None]) -> None:
        began = time.perf_counter()
        transfer.result()
        self.waited += time.perf_counter() - began

    def _buffer(self, size: int) -> Tensor:
        whole = self.host.empty(torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="meta"))
        first = -whole.data_ptr() % ALIGNMENT
        return whole[first : first + size]

    def _tell_speed(self, size: int, level: int) -> None:
        """Measures the disk with one buffer, and logs what each step will take."""
        if not self.buffers:
            return
        rate = self.file.speed(self.buffers[0])
        way = "direct I/O" if self.file.is_direct else "through the page cache"
        log.log(
            level,
            "offload: %s of optimizer state per rank in files of %s (%s), %s of %s; at %.2f GB/s a step reads and "
            "writes it in %s",
            *(gib(size), self.file.folder, way, counted(len(self.buffers), "buffer"), gib(len(self.buffers[0]))),
            *(rate / 1e9, as_time(2 * size / rate)),
        )

    def _judge(self, began: float) -> None:
        """Warns, once, if steps mostly wait for the disk; the update began at `began`."""
        now, before = time.perf_counter(), self.updated_at
        self.updated_at = now
        if not (self.warns and before):
            return
        self.warns = False
        if self.waited > MOST_WAITING * (now - before):
            moved, computed = 2 * sum(part.bytes for part in self.parts), max(1e-9, now - began - self.waited)
            log.warning(
                "offload: a step of %s waits %s for the disk of %s, which reads and writes %s at %.2f GB/s; %.3g GB/s "
                "would hide it. A larger train.global_batch needs it less often, more layout.dp_shard less of it",
                *(as_time(now - before), as_time(self.waited), self.file.folder, gib(moved)),
                *(moved / (now - began) / 1e9, moved / computed / 1e9),
            )


def parts(shards: Sequence[ParameterShard], places: Mapping[str, Mapping[str, Region]]) -> Iterator[FilePart]:
    """Yields the parts of a file: runs of whole shards that fit a buffer of BUFFER_BYTES together, and pieces of larger
    shards, each alone."""
    run: list[FilePiece] = []
    used = 0
    for shard in shards:
        regions, elements = places[shard.name], shard.value.numel()
        size = sum(region.stop - region.start for region in regions.values())
        if run and used + size > BUFFER_BYTES:
            yield FilePart(tuple(run))
            run, used = [], 0
        if size <= BUFFER_BYTES:
            run.append(FilePiece(shard, 0, elements, regions))
            used += size
            continue
        unit = lcm(*(region.unit for region in regions.values()))
        each = max(1, BUFFER_BYTES * elements // size // unit) * unit
        for start in range(0, elements, each):
            stop = min(start + each, elements)
            yield FilePart((FilePiece(shard, start, stop, {kind: r.cut(start, stop) for kind, r in regions.items()}),))
    if run:
        yield FilePart(tuple(run))
