"""Joins the ranks into torch's process group, and leaves it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed.*, to the type stubs

from phalanx.config.cluster import DEVICE_TYPES
from phalanx.errors import RunError, StoppedError
from phalanx.launch.meeting import Meeting, failed, missing
from phalanx.launch.ranks import LOOPBACK, REPLICA, Ranks
from phalanx.launch.verdict import LostPeerError, lost_line


@contextmanager
def process_group(
    ranks: Ranks, *, device: torch.device, timeout_s: float, store: Store | None = None
) -> Iterator[None]:
    """The process group for the length of a `with` block.

    After an error the group of several ranks is left as it is: peers may be inside a collective, and waiting for them
    would hide the error. The process is about to end. A planned stop is no such error: all ranks stop together.
    """
    init(ranks, device=device, timeout_s=timeout_s, store=store)
    try:
        yield
    except BaseException as error:
        if ranks.world == 1 or isinstance(error, StoppedError):
            shutdown()
        raise
    shutdown()


def init(ranks: Ranks, *, device: torch.device, timeout_s: float, store: Store | None = None) -> None:
    """Initialises the default process group with the backend that `backend_of` names.

    A world of one also gets a group, so that callers need not check for one. Where all ranks are on this machine, the
    sockets stay on loopback. This and every later collective may wait `timeout_s` for a peer. `store` is that of ranks
    that have met; None if they still have to. Raises RunError if there is no rendezvous, a peer does not join in time,
    or two have the same rank."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    backend = backend_of(ranks, device)
    if store is None:
        meeting = Meeting(ranks)
        meeting.join(timeout_s, {"backend": backend})
        store = meeting.store
    if ranks.one_node and REPLICA not in os.environ:  # other replicas may be on other nodes
        os.environ.update(LOOPBACK)
    try:
        # Without device_id: torch would bind NCCL's communicator to the device and split groups off it, which all ranks
        # must call together, while only their members create some of ours (Mesh.among).
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        # A peer that has ended says why itself; this rank only says so if it does not (launch/meeting.py).
        kind = LostPeerError if lost_line(error) else RunError
        message, absent = failed(ranks, timeout_s, error), ""
        with suppress(RuntimeError):
            absent = missing(store, ranks.world)
        joined = "All ranks joined; see the first error in their logs."
        hint = f"Not there: {absent}. See the end of its log." if absent else joined
        raise kind(f"{message}\n{hint}") from error


def backend_of(ranks: Ranks, device: torch.device) -> str:
    """Returns the backend: gloo for CPU tensors; for GPU tensors torch's own (NCCL, RCCL under that name, or xccl), or
    gloo where ranks of a node share a GPU."""
    if device.type == "cpu":
        return "gloo"
    shared = (ranks.local_world or 1) > torch.accelerator.device_count()
    # Not just "gloo": beside a default group of that name torch 2.11's DeviceMesh creates NCCL groups.
    return f"cpu:gloo,{device.type}:{'gloo' if shared else dist.get_default_backend_for_device(device)}"


def device_of(ranks: Ranks, device_type: str) -> torch.device:
    """Returns the device of a rank: the CPU, or the GPU with the rank's number on its node, modulo the node's GPUs."""
    if device_type == "cpu":
        return torch.device("cpu")
    assert ranks.local_rank is not None, "the ranks have met"
    return torch.device(DEVICE_TYPES[device_type], ranks.local_rank % torch.accelerator.device_count())


def new_group(ranks: Sequence[int], backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Creates the group of some global ranks, this one included, by default with the timeout of the default group:
    torch's own default is 30 minutes. Only its members call it."""
    group = dist.new_group(list(ranks), timeout or _timeout(), backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is among them"
    return group


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Gives a group that torch created the timeout of the default group."""
    dist.distributed_c10d._set_pg_timeout(_timeout(), group)


def _timeout() -> timedelta:
    """Returns the timeout of the default group, whose CPU backend is gloo's in any case."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout


def shutdown() -> None:
    """Destroys the process group and drops all references to it: the threads of a referenced group keep running, and
    one whose peer is gone can occupy a whole core. That of a rehearsal has none."""
    rehearsed = dist.get_backend() == "fake"
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        # DTensor caches sharding decisions, each with a mesh and its groups.
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    if not rehearsed:
        gc.collect()  # objects that refer to each other in a circle
