"""Host memory of a rank, and the copies between it and the device.

On an accelerator host memory is pinned, and copies run on a stream of their own, beside the computation. On a CPU both
are the same memory: tensors made inside `on_host` count as the host's, and everything else as the device's.

A CPU has no device memory that could run out: with `run.device_budget_mib` every storage that is made outside `on_host`
counts until it is freed, so that a layout that would not fit into so large a device fails as it would there.

Activations: after a block's forward pass the tensors that autograd has saved in it are copied down and given up. When
the backward pass reaches the block after it, they are fetched, so that the copies run beside that block's computation
(vDNN: Rhu et al. 2016; ZeRO-Infinity: Rajbhandari et al. 2021, section 5.1).

Optimizer state may lie in a file of a local disk. It has no name, so that nothing can collide with it, and the kernel
frees its space when the process ends. Updates bypass the page cache (O_DIRECT): state that passes once per step would
only displace what others use. Checkpoints, digests and loading see the same bytes through a memory map.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.config.layout import Layout
from phalanx.errors import OffloadError, RunError
from phalanx.model.layers import Run
from phalanx.model.transformer import Block, Transformer
from phalanx.partition.derived import offloaded_layers
from phalanx.units import MIB, gib

ALIGNMENT = 4096
"""Bytes to which direct I/O aligns places in the file, lengths and memory."""


class StateFile:
    """A file of `size` bytes in a folder, whose space is reserved. Raises OffloadError."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, padded(max(1, size))
        path = folder / f".phalanx-{secrets.token_hex(8)}"
        with self._failing("made"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._plain = os.open(path, flags, 0o600)
            weakref.finalize(self, os.close, self._plain)
            try:
                os.posix_fallocate(self._plain, 0, self.size)
                self._direct = _open_direct(path)
            finally:
                path.unlink()
            if self._direct is not None:
                weakref.finalize(self, os.close, self._direct)
            self._map = mmap.mmap(self._plain, self.size)
        self.mapped = torch.frombuffer(self._map, dtype=torch.uint8)
        """All bytes of the file (size,)."""
        _FILES[self.mapped.untyped_storage().data_ptr()] = self

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._direct is not None

    def read(self, into: Tensor, place: int) -> None:
        """Reads bytes from a place, a multiple of ALIGNMENT, as `into` is in length and address. Raises
        OffloadError."""
        view, done = into.numpy().data, 0
        with self._failing("read"):
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], place + done)
                if not count:
                    raise OSError(errno.EIO, f"it ends at byte {place + done:,} of {self.size:,}")
                done += count
            if self._direct is None:
                os.posix_fadvise(self._plain, place, done, os.POSIX_FADV_DONTNEED)

    def write(self, source: Tensor, place: int) -> None:
        """Writes bytes to a place, aligned as for `read`. Raises OffloadError."""
        view, done = source.numpy().data, 0
        with self._failing("written"):
            while done < len(view):
                done += os.pwritev(self._descriptor, [view[done:]], place + done)
            if self._direct is None:  # pages leave the cache only once they are on the disk
                os.fdatasync(self._plain)
                os.posix_fadvise(self._plain, place, done, os.POSIX_FADV_DONTNEED)

    def speed(self, buffer: Tensor) -> float:
        """Returns the bytes per second of writing the buffer to the file's beginning and reading it back, which
        overwrites what is there. Raises OffloadError."""
        size = min(len(buffer), self.size)
        began = time.perf_counter()
        self.write(buffer[:size], 0)
        self.read(buffer[:size], 0)
        return 2 * size / (time.perf_counter() - began)

    def will_read(self, place: int, size: int) -> None:
        """Begins to read bytes into the page cache, for someone who is about to read them through the map."""
        with suppress(OSError):
            os.posix_fadvise(self._plain, place, size, os.POSIX_FADV_WILLNEED)

    @property
    def _descriptor(self) -> int:
        return self._plain if self._direct is None else self._direct

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """Turns a failure of the file system into an OffloadError."""
        try:
            yield
        except OSError as error:
            raise OffloadError(
                f"optimizer state in {self.folder} on {platform.node()} ({gib(self.size)}, layout.offload_to) cannot "
                f"be {action}: {error.strerror or error}. Checkpoints are whole: once the disk works, or with another "
                "folder or offload_to=cpu, the same command resumes from the newest"
            ) from error


_FILES: weakref.WeakValueDictionary[int, StateFile] = weakref.WeakValueDictionary()
"""By the address of their maps, the files of this process."""


def file_of(storage: torch.UntypedStorage) -> StateFile | None:
    """Returns the file that a storage maps; None for memory."""
    return _FILES.get(storage.data_ptr()) if _FILES else None


def will_read(tensor: Tensor) -> None:
    """Begins to read a tensor that maps a file; does nothing for others."""
    if file := file_of(tensor.untyped_storage()):
        file.will_read(int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes)


def padded(size: int) -> int:
    """Returns a number of bytes, rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _open_direct(path: Path) -> int | None:
    """Opens a file for direct I/O. Returns None if the file system does not take it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    with mmap.mmap(-1, ALIGNMENT) as page:
        try:
            os.preadv(descriptor, [page], 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EINVAL:  # some refuse at the first read, or need a larger alignment
                return None
            raise
    return descriptor


class BudgetError(RunError, MemoryError):
    """A device's budget is spent; `free` are the bytes that were left of it."""

    def __init__(self, message: str, free: int):
        super().__init__(message)
        self.free = free


class DeviceBudget(TorchDispatchMode):
    """Counts the storages of the thread in whose `with` block they are made. `limit` is in bytes; 0: only counts."""

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.device = self.host = self.device_peak = self.host_peak = 0
        """Bytes of tensors now, and at most so far."""
        self._sizes: dict[int, tuple[bool, int]] = {}
        """By storage, whether it is the host's, and its bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # of a DTensor the local tensors inside count
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or file_of(storage):
            return
        self._sizes[key] = is_on_host(), 0
        weakref.finalize(storage, self._forget, key)
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        on_host, before = self._sizes[key]
        self._sizes[key] = on_host, size
        if on_host:
            self.host += size - before
            self.host_peak = max(self.host_peak, self.host)
            return
        self.device += size - before
        self.device_peak = max(self.device_peak, self.device)
        if size > before and self.limit and self.device > self.limit:
            raise BudgetError(
                f"tensors of {gib(self.device)} exceed run.device_budget_mib, {gib(self.limit)} per device",
                max(0, self.limit - self.device + size - before),
            )

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._sizes[key]

    @contextmanager
    def counting(self) -> Iterator[DeviceBudget]:
        """Counts in the `with` block, also storages that are resized without an operation, as FSDP2 does."""
        plain: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, size)
            return result

        with self, mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield self


@contextmanager
def device_budget(mib: float) -> Iterator[dict[str, int]]:
    """Enforces `run.device_budget_mib` in the `with` block. Yields the peaks in bytes, which are known after it; empty
    without a budget."""
    peaks: dict[str, int] = {}
    if not mib:
        yield peaks
        return
    with DeviceBudget(round(mib * MIB)).counting() as budget:
        yield peaks
    peaks |= {"device_peak_bytes": budget.device_peak, "host_peak_bytes": budget.host_peak}


_PLACE = threading.local()
Arrival = Any
"""A mark in the stream of copies; None on a CPU, whose copies have ended when they are started."""


@contextmanager
def on_host() -> Iterator[None]:
    """Counts the tensors that this thread makes in the `with` block as the host's."""
    before = is_on_host()
    _PLACE.host = True
    try:
        yield
    finally:
        _PLACE.host = before


def is_on_host() -> bool:
    """Returns whether tensors that this thread makes now are the host's."""
    return getattr(_PLACE, "host", False)


@dataclass
class CopiedBytes:
    """Bytes copied between device and host since the start of a run."""

    down: int = 0
    """From the device."""
    up: int = 0
    """To the device."""

    def goes_up(self, size: int) -> None:
        """Counts bytes that are copied to the device by others."""
        self.up += size


class Host:
    """The host memory beside one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copied = CopiedBytes()
        self.stream = torch.Stream(device) if device.type != "cpu" else None
        """The stream of copies."""
        self._free: dict[int, list[Tensor]] = {}
        """By size, memory to be lent again: pinning memory is slow."""

    def empty(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns host memory for a tensor of the shape of `like`, uninitialised."""
        with on_host():
            return torch.empty(
                like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=self.device.type != "cpu"
            )

    def lend(self, size: int) -> Tensor:
        """Returns `size` bytes of host memory that `take_back` has got earlier, or new ones: uninitialised."""
        free = self._free.get(size)
        if free:
            return free.pop()
        with on_host():
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.device.type != "cpu")

    def take_back(self, memory: Tensor) -> None:
        """Keeps memory that was lent. Copies from it may still be on their way: later ones into it wait for them."""
        self._free.setdefault(memory.numel(), []).append(memory)

    def down(self, tensor: Tensor, into: Tensor) -> None:
        """Starts copying a tensor of the device to host memory of the same type. `settle` waits for it."""
        self.copied.down += tensor.nbytes
        self._copy(tensor, into)
        if self.stream is not None:
            tensor.record_stream(self.stream)  # its memory may be used again only after the copy

    def up(self, source: Tensor, into: Tensor) -> None:
        """Starts copying host memory to a tensor of the device of the same type. What the device computes after the
        next `join` sees it."""
        self.copied.up += into.nbytes
        self._copy(source, into)

    def _copy(self, source: Tensor, into: Tensor) -> None:
        if self.stream is None:
            into.copy_(source)
            return
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            into.copy_(source, non_blocking=True)

    def arrival(self, into: Tensor) -> Arrival:
        """Returns a mark in the stream of copies: those into `into` are before it."""
        if self.stream is None:
            return None
        into.record_stream(self.stream)  # it may be freed before they end
        return self.stream.record_event()

    def wait(self, arrival: Arrival) -> None:
        """Makes the device's next computation wait for the copies before a mark."""
        if arrival is not None:
            torch.accelerator.current_stream(self.device).wait_event(arrival)

    def join(self) -> None:
        """Makes the device's next computation wait for all copies."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self.stream)

    def settle(self) -> None:
        """Waits until all copies have ended."""
        if self.stream is not None:
            self.stream.synchronize()


LEAST_BYTES = 1024
"""Smaller tensors stay: a copy would take longer than it is worth."""


def offload_activations(model: Transformer, layout: Layout, stages: Sequence[range], host: Host) -> int:
    """Makes blocks of `model` keep what they save in host memory if the layout says so for their place in one of the
    `stages`, of which only those are local whose blocks the model has. Returns their number."""
    found = 0
    for stage in stages:
        away = offloaded_layers(layout, stage)
        earlier: SwappingRun | None = None
        for layer in stage:
            if str(layer) not in model.blocks:
                continue
            block = model.blocks[str(layer)]
            assert isinstance(block, Block), "nothing wraps blocks before this"
            block.run = earlier = SwappingRun(block, host, earlier, leaves=layer in away)
            found += earlier.leaves
    return found


class SwappingRun:
    """The `run` of a block whose saved tensors leave the device, or of one in whose backward pass those of the block
    before it are fetched. It calls the `run` that it replaces."""

    def __init__(self, block: Block, host: Host, earlier: SwappingRun | None, *, leaves: bool):
        self.block, self.host, self.earlier, self.leaves = block, host, earlier, leaves
        self.run: Run = block.run
        self.latest: SavedByPass | None = None
        """The latest forward pass, until the next block's takes it over."""

    def __call__(self, compute: Run, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.run(compute, *inputs)
        mine = SavedByPass(self.host, self._before())
        if not self.leaves:
            output = self.run(compute, *inputs)
        else:
            # Autograd may save the other inputs, which do not belong to this block.
            shared = {_key(tensor) for tensor in inputs[1:] if isinstance(tensor, Tensor)}
            with saved_tensors_hooks(lambda tensor: mine.pack(tensor, self.block, shared), unpack):
                output = self.run(compute, *inputs)
            mine.leave()
        self.latest = mine
        if output.requires_grad:
            output.register_hook(mine.arrive)
        return output

    def _before(self) -> SavedByPass | None:
        """Returns the pass of the block before this one that has just ended."""
        if self.earlier is None:
            return None
        before, self.earlier.latest = self.earlier.latest, None
        return before


class SavedByPass:
    """The tensors that one forward pass of a block has saved."""

    def __init__(self, host: Host, before: SavedByPass | None):
        self.host, self.before = host, before
        self.made: dict[int, SavedStorage] = {}
        """By storage, while the forward pass runs."""
        self.saved: list[ref[SavedStorage]] = []
        """Autograd alone keeps them: each ends with the last operation that needs it."""

    def pack(self, tensor: Tensor, block: nn.Module, shared: set[int]) -> Tensor | PackedView:
        """Returns what autograd keeps in place of a tensor that it saves."""
        if (
            tensor.device.type != self.host.device.type
            or tensor.layout != torch.strided
            or _bytes(tensor) < LEAST_BYTES
            or _bytes(tensor) % tensor.itemsize
        ):
            return tensor
        key = _key(tensor)
        if key not in self.made:
            # Gathered parameters are the module's only while it computes.
            if key in shared or key in map(_key, block.parameters()):
                return tensor
            self.made[key] = SavedStorage(tensor, self.host)
        return PackedView(self.made[key], tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def leave(self) -> None:
        """Starts copying everything to the host, and gives up the device's memory of it."""
        for each in self.made.values():
            each.leave()
        self.saved = [ref(each) for each in self.made.values()]
        self.made = {}

    def fetch(self) -> None:
        """Starts copying everything to the device that the backward pass still needs."""
        for each in self._needed():
            each.fetch()

    def arrive(self, _: Tensor) -> None:
        """Called when the block's backward pass begins: what it needs is here for the device's next computation, and
        what the block before it needs is on its way."""
        self.fetch()
        for each in self._needed():
            each.arrive()
        if self.before is not None:
            self.before.fetch()
            self.before = None

    def _needed(self) -> Iterator[SavedStorage]:
        return (each for weak in self.saved if (each := weak()) is not None)


class SavedStorage:
    """The memory of saved tensors, one of which is given: on the device, in host memory, or on its way."""

    def __init__(self, tensor: Tensor, host: Host):
        self.host, self.size = host, tensor.untyped_storage().nbytes()
        whole = tensor.detach().as_strided((self.size // tensor.itemsize,), (1,), 0)
        self.bytes: Tensor | None = whole.view(torch.uint8)
        """The device's memory, if it is there (size,)."""
        self.copy: Tensor | None = None
        """The host's, if it is there."""
        self.arrival: Arrival | None = None

    def leave(self) -> None:
        """Starts copying it to the host."""
        assert self.bytes is not None, "only once, after the forward pass"
        self.copy = self.host.lend(self.size)
        self.host.down(self.bytes, self.copy)
        self.bytes = None

    def fetch(self) -> None:
        """Starts copying it to the device, unless it is there or on its way."""
        if self.bytes is not None:
            return
        assert self.copy is not None, "it is on the host or on the device"
        self.bytes = torch.empty(self.size, dtype=torch.uint8, device=self.host.device)
        self.host.up(self.copy, self.bytes)
        self.arrival = self.host.arrival(self.bytes)
        self._free()

    def arrive(self) -> None:
        """Makes the device's next computation wait until it is there."""
        if self.arrival is not None:
            self.host.wait(self.arrival)
            self.arrival = None

    def _free(self) -> None:
        if self.copy is not None:
            self.host.take_back(self.copy)
            self.copy = None

    def __del__(self) -> None:
        self._free()  # of a step that was given up


class PackedView(NamedTuple):
    """A saved tensor as a view of its storage."""

    saved: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def unpack(packed: Tensor | PackedView) -> Tensor:
    """Returns a saved tensor for the backward pass."""
    if isinstance(packed, Tensor):
        return packed
    saved, dtype, size, stride, offset = packed
    saved.fetch()
    saved.arrive()
    assert saved.bytes is not None, "it was fetched"
    return saved.bytes.view(dtype).as_strided(size, stride, offset)


def _key(tensor: Tensor) -> int:
    """Returns a number that tensors with the same memory share."""
    return 0 if hasattr(tensor, "to_local") else tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return 0 if hasattr(tensor, "to_local") else tensor.untyped_storage().nbytes()
